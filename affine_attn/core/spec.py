"""The attention family as data: four stages, each a frozen value.

An :class:`AttentionSpec` says which attention a layer computes. It is the config entry, the test id, the benchmark
label and the compile key at once, so it is frozen, hashable and turns into plain JSON and back. Parameters live in the
layer; formulas of the logit stage live here, because every engine needs the same ones.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from affine_attn.checks import is_count
from affine_attn.errors import UserError


class Coefficients(NamedTuple):
    """What depends on places: s = factor * f(scale * q.k) + offset. ``None`` means 1 and 0."""

    factor: Tensor | None
    offset: Tensor | None


# Of names in errors: a command, and a Python program, know what they have imported.
YOUR_OWN = "your own count once their module is imported (commands: --import FILE)"

LARGEST_COUNT = 2**31 - 1  # kernels count in 32 bits


def is_number(value: Any) -> bool:
    """A finite one that JSON can write and a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_sink(value: Any) -> bool:
    """A number, or an infinite one: -inf is softmax."""
    # By comparison: functions of math cannot be traced once a compiler has made a number a variable.
    return is_number(value) or (isinstance(value, float) and abs(value) == math.inf)


def check_counts(owner: str, least: int = 1, **values: Any) -> None:
    """Raise if one of them is no integer from ``least`` on that kernels can count to."""
    for name, value in values.items():
        if not is_count(value, least, LARGEST_COUNT):
            raise UserError(
                f"{owner}: {name} must be an integer >= {least}, got {value!r}; the largest is {LARGEST_COUNT}"
            )


class Table(dict[str, Any]):
    """Definitions by name, to which anyone may add; ``modules``: which module has. A checkpoint names it."""

    def __init__(self, **ours: Any):
        super().__init__(ours)
        self.modules: dict[str, str] = {}

    def __setitem__(self, name: str, definition: Any) -> None:
        # A function may be torch's own: where it was added says more than where it is from.
        self.modules[name] = sys._getframe(1).f_globals.get("__name__", "__main__")
        super().__setitem__(name, definition)


_LOGITS: dict[str, "type[Logit]"] = {}


@dataclass(frozen=True)
class Logit:
    """A stage 1: s = factor * f(scale * q.k) + offset, where a subclass has the curve f, the coefficients, or both.

    It is a frozen dataclass of numbers with defaults; defining it is enough to register it. It says more than the two
    defaults only where it can: they are the careful answers.
    """

    kind: ClassVar[str]  # its name in JSON and operators
    needs_causal = True  # refuse Mask(causal=False)
    same_in_all_heads = False  # else tensor parallelism refuses it: a rank knows only its own heads
    by_distance_alone = False  # coefficients read neither the count nor the head, so a table of them may be kept
    has_curve: ClassVar[bool]
    has_coefficients: ClassVar[bool]

    def __init_subclass__(cls):
        if not hasattr(cls, "kind"):
            raise TypeError(f"{cls.__name__} needs a kind, its name in JSON and operators")
        if Logit not in cls.__bases__:
            raise TypeError(f"{cls.__name__} must derive from Logit itself: engines would take it for its parent")
        known = _LOGITS.get(cls.kind)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"{cls.__name__}: the kind {cls.kind!r} is that of {known.__name__}")
        cls.has_curve = "curve" in vars(cls)
        if cls.has_curve != ("derivative" in vars(cls)):
            raise TypeError(f"{cls.__name__} must have both, a curve and its derivative, or neither")
        cls.has_coefficients = "coefficients" in vars(cls) or not cls.has_curve
        _LOGITS[cls.kind] = cls

    def curve(self, x: Tensor) -> Tensor:
        """Compute f(x) of each score x = scale * q.k."""
        raise NotImplementedError(f"{type(self).__name__} has no curve")

    def derivative(self, x: Tensor) -> Tensor:
        """Compute f'(x)."""
        raise NotImplementedError(f"{type(self).__name__} has no curve")

    def coefficients(self, distance: Tensor, count: Tensor, head: Tensor, heads: int) -> Coefficients:
        """Compute from tensors that broadcast: i - j, the visible keys n_i of the row, the head's number 0..H-1; and H.

        The reference calls it on whole blocks, FlexAttention on single scores.
        """
        raise NotImplementedError(f"{type(self).__name__} has no coefficients")


@dataclass(frozen=True)
class ScaleInvariant(Logit):
    """Scale-invariant attention (arXiv 2505.17083): a_t = sqrt(1 + 2 log(1 + t/tau)), m_t = -2 log(1 + t/tau)."""

    tau: float = 10.0
    kind = "scale_invariant"
    same_in_all_heads = True
    by_distance_alone = True

    def __post_init__(self):
        if not (is_number(self.tau) and self.tau > 0):
            raise UserError(f"ScaleInvariant: tau must be a number > 0, got {self.tau!r}")

    def coefficients(self, distance: Tensor, count: Tensor, head: Tensor, heads: int) -> Coefficients:
        # Keys ahead of the query are masked later; clamping keeps their factor, and so their gradient, finite.
        u = torch.log1p(distance.clamp(min=0) / self.tau)
        return Coefficients(torch.sqrt(1 + 2 * u), -2 * u)


@dataclass(frozen=True)
class LogN(Logit):
    """Log-length scaling (SSMax): s_ij = log(n_i) * raw. The layer's learned c_h starts at 1/log(length)."""

    length: int = 2048
    kind = "logn"
    needs_causal = False
    same_in_all_heads = True

    def __post_init__(self):
        if not is_count(self.length, 2, LARGEST_COUNT):
            raise UserError(f"LogN: length must be an integer > 1, got {self.length!r}; the largest is {LARGEST_COUNT}")

    @property
    def start(self) -> float:
        """First value of the learned c_h."""
        return 1 / math.log(self.length)

    def coefficients(self, distance: Tensor, count: Tensor, head: Tensor, heads: int) -> Coefficients:
        return Coefficients(self.row_scale(count, distance.dtype), None)

    @staticmethod
    def row_scale(count: Tensor, dtype: torch.dtype) -> Tensor:
        # A row without keys has no score to scale; log(1) = 0 keeps it finite.
        return torch.log(count.clamp(min=1).to(dtype))


@dataclass(frozen=True)
class Alibi(Logit):
    """ALiBi: s_ij = raw - slope_h * |i - j|, slope_h = 2^(-8 h / H) for h = 1..H."""

    kind = "alibi"
    needs_causal = False

    def coefficients(self, distance: Tensor, count: Tensor, head: Tensor, heads: int) -> Coefficients:
        slope = torch.exp2((head + 1).to(distance.dtype) * (-8.0 / heads))
        return Coefficients(None, -slope * distance.abs())


@dataclass(frozen=True)
class SoftCap(Logit):
    """Soft-capped scores (Gemma-2): s = cap * tanh(scale * q.k / cap), all between -cap and cap."""

    cap: float = 50.0
    kind = "softcap"
    needs_causal = False
    same_in_all_heads = True

    def __post_init__(self):
        if not (is_number(self.cap) and self.cap > 0):
            raise UserError(f"SoftCap: cap must be a number > 0, got {self.cap!r}")

    def curve(self, x: Tensor) -> Tensor:
        return self.cap * torch.tanh(x / self.cap)

    def derivative(self, x: Tensor) -> Tensor:
        return 1 - torch.tanh(x / self.cap).square()


# One, none, or one with a curve and one with coefficients.
Logits = Logit | tuple[Logit, ...] | None


class Scores(NamedTuple):
    """Stage 1 in its two parts, which are one logit where it has both."""

    curve: Logit | None
    logit: Logit | None  # that has coefficients


def scores_of(logit: Logits, owner: str = "") -> Scores:
    """Return the parts of a logit or of several; raise, as ``owner``, if there are two of a kind."""
    if logit is None:
        return Scores(None, None)
    given = logit if isinstance(logit, tuple) else (logit,)
    if not all(isinstance(part, Logit) and type(part) is not Logit for part in given):
        raise UserError(f"{owner}logit must be None or one of {logit_names()}, or a tuple of them, got {logit!r}")
    curves, others = [part for part in given if part.has_curve], [part for part in given if part.has_coefficients]
    if len(curves) > 1 or len(others) > 1:
        raise UserError(f"{owner}logit may have one with a curve and one with coefficients, got {logit!r}")
    return Scores(curves[0] if curves else None, others[0] if others else None)


def linear_clipping(x: Tensor) -> Tensor:
    """clamp(0.1 x + 0.5, 0, 1)."""
    return (0.1 * x + 0.5).clamp(0, 1)


# Of alpha: any function that maps each number to one.
ACTIVATIONS = Table(linear_clipping=linear_clipping, sigmoid=torch.sigmoid)


@functools.cache
def _ends(function: Callable[[Tensor], Tensor]) -> tuple[float, float] | None:
    """The least and the largest value of an activation, infinite where it grows for ever; None if it is not one.

    They are found by trying, so that no one has to state them and none can be stated wrong.
    """
    far = torch.tensor([-1e9, -1e6, 1e6, 1e9], dtype=torch.float64, device="cpu")
    near = torch.linspace(-100, 100, 20_001, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        y = function(torch.cat((far, near)))
    if y.shape != (len(far) + len(near),) or bool(y.isnan().any()):
        return None
    left, below, above, right = y[: len(far)].tolist()
    low, high = y.min().item(), y.max().item()
    much = 0.01 * max(1.0, abs(below), abs(above))
    if min(right - above, left - below) < -much:
        low = -math.inf
    if max(right - above, left - below) > much:
        high = math.inf
    return low, high


class Gate(NamedTuple):
    """A stage 4: one number per channel of a head, or one per head, each an activation of W_g x."""

    per_channel: bool
    activation: Callable[[Tensor], Tensor]
    starts_at_zero: bool = False  # W_g, so that every gate is activation(0) until it is trained


def twice_sigmoid(x: Tensor) -> Tensor:
    """2 sigmoid(x), which is 1 at 0."""
    return 2 * torch.sigmoid(x)


GATES = Table(
    elementwise=Gate(True, torch.sigmoid),
    headwise=Gate(False, torch.sigmoid),
    # The identity at the start. Like all gates in fp32 where x is not in 16 bits.
    elementwise_identity=Gate(True, twice_sigmoid, starts_at_zero=True),
    headwise_identity=Gate(False, twice_sigmoid, starts_at_zero=True),
)
LEARNED_GATE = 0.5  # where a learned gate starts, as alpha does


@dataclass(frozen=True)
class Affine:
    """Affine-scaled weights (arXiv 2602.23057): w = alpha * p + beta, beta = (alpha_ma - alpha) / N.

    N_i = max(length, n_i, 1) with n_i visible keys; ``length=0`` is N = n_i, ``length="keys"`` is N = keys of the call
    (then the output depends on how a sequence is cut into calls).

    phi: alpha = alpha_range * phi(W_a x); a key of ACTIVATIONS.
    length: that of training sequences, see above.
    alpha_range: the largest alpha of a phi that ends at 1.
    momentum: of the moving average alpha_ma.
    start: of alpha_ma.
    per_head: one average for each head, or one for all heads of the layer.
    beta: False is w = alpha * p.
    """

    phi: str = "linear_clipping"
    length: int | Literal["keys"] = 2048
    alpha_range: float = 1.0
    momentum: float = 0.9
    start: float = 0.0
    per_head: bool = True
    beta: bool = True

    def __post_init__(self):
        if self.phi not in list(ACTIVATIONS):
            raise UserError(f"Affine: phi must be one of {list(ACTIVATIONS)}, got {self.phi!r}; {YOUR_OWN}")
        if _ends(ACTIVATIONS[self.phi]) is None:
            raise UserError(f"Affine: phi must map each number to one, which {self.phi!r} does not")
        if self.length != "keys" and not is_count(self.length, 0, LARGEST_COUNT):
            raise UserError(
                f"Affine: length must be an integer >= 0 or 'keys', got {self.length!r}; the largest is {LARGEST_COUNT}"
            )
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            raise UserError(f"Affine: momentum must be a number in [0, 1), got {self.momentum!r}")
        if not (is_number(self.alpha_range) and self.alpha_range > 0):
            raise UserError(f"Affine: alpha_range must be a number > 0, got {self.alpha_range!r}")
        if not is_number(self.start):
            raise UserError(f"Affine: start must be a finite number, got {self.start!r}")
        for name in ("per_head", "beta"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"Affine: {name} must be True or False, got {getattr(self, name)!r}")

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the largest alpha, infinite where phi grows for ever."""
        low, high = _ends(ACTIVATIONS[self.phi]) or (math.nan, math.nan)
        return self.alpha_range * low, self.alpha_range * high

    def as_softmax(self) -> "Affine":
        """The same, starting as softmax where W_a is 0: alpha and alpha_ma are 1, and beta is 0."""
        start = float(ACTIVATIONS[self.phi](torch.zeros((), dtype=torch.float64, device="cpu")))
        if not (is_number(start) and start > 0):
            raise UserError(
                f"start_as_softmax: phi(0) must be positive and finite, so that alpha_range makes 1 of it, got {start} "
                f"of {self.phi!r}"
            )
        return dataclasses.replace(self, alpha_range=1 / start, start=1.0)


@dataclass(frozen=True)
class AttentionSpec:
    """Which attention a layer computes: logit -> sink -> affine -> gate; ``None`` switches a stage off.

    logit: of the scores, as ``LogN()``; two together as ``(SoftCap(50.0), ScaleInvariant())``.
    sink: a logit that takes weight, 0.0 is off-by-one softmax; "learned" is one per head.
    affine: ``Affine(...)``, alpha and beta on the weights.
    gate: on the output, a key of GATES; one without input is a number for all, or "learned", one per head.
    """

    logit: Logits = None
    sink: float | Literal["learned"] | None = None
    affine: Affine | None = None
    gate: str | float | None = None

    def __post_init__(self):
        scores_of(self.logit, "AttentionSpec: ")
        if not (self.sink is None or self.sink == "learned" or is_sink(self.sink)):
            raise UserError(f"AttentionSpec: sink must be None, a number or 'learned', got {self.sink!r}")
        if self.affine is not None and not isinstance(self.affine, Affine):
            raise UserError(f"AttentionSpec: affine must be None or Affine(...), got {self.affine!r}")
        if not (is_number(self.gate) or self.gate in [None, "learned", *GATES]):
            allowed = ["learned", *GATES]
            raise UserError(
                f"AttentionSpec: gate must be None, a number or one of {allowed}, got {self.gate!r}; {YOUR_OWN}"
            )

    @property
    def scores(self) -> Scores:
        """Stage 1 in its two parts."""
        return scores_of(self.logit)

    @property
    def projected_gate(self) -> Gate | None:
        """The gate where it is one of W_g x; None where there is none, or one that does not read x."""
        return GATES.get(self.gate) if isinstance(self.gate, str) else None

    @property
    def modules(self) -> set[str]:
        """Those that have added one of its stages to the family, which have to be imported before it can be made."""
        added = {ACTIVATIONS.modules.get(self.affine.phi if self.affine else ""), GATES.modules.get(str(self.gate))}
        logits = {type(part).__module__ for part in self.scores if part is not None}
        return {name for name in added | logits if name and name != __name__}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; :meth:`from_dict` is its inverse."""
        affine = None if self.affine is None else dataclasses.asdict(self.affine)
        # JSON has no infinity: a sink of -inf (softmax) or +inf is written as its name.
        sink = str(self.sink) if isinstance(self.sink, float) and math.isinf(self.sink) else self.sink
        return {"logit": _logit_to_dict(self.logit), "sink": sink, "affine": affine, "gate": self.gate}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "AttentionSpec":
        """The spec of what :meth:`to_dict` gave; missing entries have their defaults, unknown ones are refused."""
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(data, dict):
            raise UserError(f"AttentionSpec: from_dict takes a dict with entries among {sorted(known)}, got {data!r}")
        if unknown := set(data) - known:
            raise UserError(f"AttentionSpec: unknown entries {sorted(unknown)}; allowed are {sorted(known)}")
        sink, affine = data.get("sink"), data.get("affine")
        return cls(
            logit=_logit_from_dict(data.get("logit")),
            sink=float(sink) if sink in ("inf", "-inf") else sink,
            affine=None if affine is None else _from_fields(Affine, affine),
            gate=data.get("gate"),
        )


def logit_of_kind(kind: str) -> "type[Logit]":
    return _LOGITS[kind]


def _logit_to_dict(logit: Logits) -> Any:
    """JSON has lists where Python has tuples."""
    if isinstance(logit, tuple):
        return [_logit_to_dict(part) for part in logit]
    return None if logit is None else {"kind": logit.kind, **dataclasses.asdict(logit)}


def _logit_from_dict(data: Any) -> Any:
    if data is None:
        return None
    if isinstance(data, list | tuple):
        return tuple(_logit_from_dict(part) for part in data)
    if not isinstance(data, dict):
        raise UserError(f"AttentionSpec: logit must be None or a dict with 'kind', got {data!r}")
    fields = dict(data)
    kind = fields.pop("kind", None)
    if kind not in list(_LOGITS):  # as a list: what is no name need not have a hash
        raise UserError(f"AttentionSpec: logit kind must be one of {sorted(_LOGITS)}, got {kind!r}; {YOUR_OWN}")
    return _from_fields(_LOGITS[kind], fields)


def _from_fields(kind: type, data: Any) -> Any:
    known = sorted(field.name for field in dataclasses.fields(kind))
    if not isinstance(data, dict) or set(data) - set(known):
        raise UserError(f"{kind.__name__}: entries must be among {known}, got {data!r}")
    return kind(**data)


def logit_names() -> str:
    return ", ".join(kind.__name__ for kind in _LOGITS.values())
