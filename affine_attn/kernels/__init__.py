"""How it is made fast: a folder per mechanism, with eager.py (torch), launch.py (host) and kernels.py (device code)."""
