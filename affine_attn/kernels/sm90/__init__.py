"""Kernels for Hopper (compute capability 9.0): causal forward, preprocess and backward."""
