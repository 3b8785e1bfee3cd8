"""Evaluation: tasks of lm-evaluation-harness, perplexity, long contexts, and scoring on another machine."""
