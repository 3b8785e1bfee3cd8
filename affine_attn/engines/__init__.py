"""Who runs a call: needs.py has every reason to refuse one, plan.py decides, and an engine's module runs it."""
