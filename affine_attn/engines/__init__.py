"""Who runs a call: a module per engine with why_not(call), run(call) and DESCRIPTION; plan.py asks them in order."""
