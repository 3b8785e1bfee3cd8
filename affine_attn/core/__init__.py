"""What is computed: torch alone, no device, no engine. Read reference.py first, then stages, spec, masks and call."""
