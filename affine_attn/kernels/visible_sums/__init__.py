"""Sums of the values that a mask leaves visible, and their transpose."""
