"""Who runs a call: engines have why_not(call), run(call) and a DESCRIPTION; plan.py asks them in order."""
