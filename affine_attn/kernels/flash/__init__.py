"""Flash attention for plain and distance logits with windows, documents and padding."""
