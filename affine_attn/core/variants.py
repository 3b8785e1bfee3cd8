"""The named members of the family. Tests, benchmarks and the README table iterate over :data:`VARIANTS`."""

from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from affine_attn.core.spec import ACTIVATIONS, YOUR_OWN, Affine, Alibi, AttentionSpec, LogN, ScaleInvariant
from affine_attn.errors import UserError


class Variant(NamedTuple):
    """A named spec, with its formula and source as the table shows them."""

    spec: AttentionSpec
    formula: str
    source: str


VARIANTS: dict[str, Variant] = {
    "softmax": Variant(AttentionSpec(), "softmax(s) v", "arXiv 1706.03762"),
    "off_by_one": Variant(AttentionSpec(sink=0.0), "exp(s) / (1 + Σ exp(s)) v", "Miller 2023"),
    "sink": Variant(AttentionSpec(sink="learned"), "exp(s) / (exp(sink_h) + Σ exp(s)) v", "gpt-oss"),
    "gated": Variant(AttentionSpec(gate="elementwise"), "σ(W_g x) ⊙ softmax(s) v", "arXiv 2505.06708"),
    "gated_headwise": Variant(AttentionSpec(gate="headwise"), "σ(w_g·x) softmax(s) v", "arXiv 2505.06708"),
    "affine": Variant(AttentionSpec(affine=Affine()), "(α softmax(s) + β) v", "arXiv 2602.23057"),
    "affine_sigmoid": Variant(
        AttentionSpec(affine=Affine(phi="sigmoid")), "(α softmax(s) + β) v, α = σ(w_a·x)", "arXiv 2602.23057"
    ),
    "affine_gated": Variant(
        AttentionSpec(affine=Affine(), gate="elementwise"), "σ(W_g x) ⊙ (α softmax(s) + β) v", "arXiv 2602.23057"
    ),
    "scale_invariant": Variant(
        AttentionSpec(logit=ScaleInvariant()), "softmax(a_t s + m_t) v, t = i-j", "arXiv 2505.17083"
    ),
    "logn": Variant(AttentionSpec(logit=LogN()), "softmax(c_h log(n_i) s) v", "SSMax, arXiv 2501.19399"),
    "alibi": Variant(AttentionSpec(logit=Alibi()), "softmax(s - slope_h (i-j)) v", "arXiv 2108.12409"),
}


def variant(name: str) -> AttentionSpec:
    """The spec of a named variant, or of several put together: ``"scale_invariant+affine"`` has the stages of both."""
    if not isinstance(name, str):
        raise UserError(f"variant: name must be a str, got {name!r}")
    stages: dict[str, Any] = {}
    parts = name.split("+")
    if repeated := next((part for part in parts if parts.count(part) > 1), None):
        raise UserError(f"variant {name!r}: {repeated!r} is given more than once")
    for part in parts:
        spec = _named(part)
        own = {field.name: value for field in fields(spec) if (value := getattr(spec, field.name)) is not None}
        for stage in own:
            if stages.get(stage, own[stage]) != own[stage]:
                raise UserError(f"variant {name!r}: {part!r} has another {stage} than what it is put together with")
        stages |= own
    return AttentionSpec(**stages)


def _named(name: str) -> AttentionSpec:
    if name not in VARIANTS:
        nearest = get_close_matches(name, VARIANTS, n=1)
        hint = f", did you mean {nearest[0]!r}?" if nearest else ";"
        if name in ACTIVATIONS:
            hint = f", which is an activation of alpha, AttentionSpec(affine=Affine(phi={name!r}));"
        raise UserError(
            f"unknown variant {name!r}{hint} allowed are {', '.join(VARIANTS)}, and several joined by +; {YOUR_OWN}"
        )
    return VARIANTS[name].spec


def at_length(spec: AttentionSpec, length: int) -> AttentionSpec:
    """The spec for models trained on sequences of this length."""
    affine = spec.affine and replace(spec.affine, length=length)

    def lengthened(logit: Any) -> Any:
        if isinstance(logit, tuple):
            return tuple(lengthened(part) for part in logit)
        return replace(logit, length=length) if hasattr(logit, "length") else logit

    return replace(spec, affine=affine, logit=lengthened(spec.logit))


def name_of(spec: AttentionSpec) -> str | None:
    """The variant that a spec is, whatever length it was trained with; None for any other attention."""
    lengths = [getattr(part, "length", None) for part in (spec.scores.logit, spec.affine)]
    # Lengths of 0 and "keys" are no lengths of training but other attention.
    length = next((length for length in lengths if isinstance(length, int) and length), 2048)
    return next((name for name, known in VARIANTS.items() if at_length(known.spec, length) == spec), None)


def variants_table() -> str:
    """Markdown table of all variants, as shown in the README and by ``affine-attn variants``."""
    rows = ["| variant | output | logit | sink | affine | gate | source |", "|---|---|---|---|---|---|---|"]
    for name, (spec, formula, source) in VARIANTS.items():
        logit = type(spec.logit).__name__ if spec.logit else ""
        sink = "" if spec.sink is None else str(spec.sink)
        affine = spec.affine.phi if spec.affine else ""
        rows.append(f"| `{name}` | {formula} | {logit} | {sink} | {affine} | {spec.gate or ''} | {source} |")
    return "\n".join(rows)
