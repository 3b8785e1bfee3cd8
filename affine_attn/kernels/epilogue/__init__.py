"""Stages 2 to 4 as row-wise work on (o, z), forward and backward."""
