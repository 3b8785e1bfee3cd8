"""The attention itself. Read reference.py first, then spec, epilogue, engines/sdpa, dispatch and layer."""
