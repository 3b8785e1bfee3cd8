"""How it is made fast: a folder per mechanism, used by engines/.

launch.py has the host side (sm90: forward.py and backward.py), files named *kernel* the device code (flash: scores.py
too), and epilogue/eager.py is the epilogue in torch.
"""
