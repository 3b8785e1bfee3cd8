"""Modules with parameters: the alpha gate and its moving average, rotary positions, the attention layer."""
