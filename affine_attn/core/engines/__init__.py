"""A module for each engine, with why_not(call), run(call) and DESCRIPTION; dispatch.py asks them in its order."""
