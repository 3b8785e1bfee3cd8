"""A page about runs: what they learned, how they were measured and how they attend, from the files they left."""

from affine_attn.report.page import write_report

__all__ = ["write_report"]
