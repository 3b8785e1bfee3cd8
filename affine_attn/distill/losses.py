"""Distillation losses from hidden states, a chunk of tokens at a time: logits [tokens, vocabulary] need not exist.

With student p = softmax(z / T), teacher q = softmax(z' / T) and T the temperature, per token

    forward_kl   T² Σ q (log q - log p)
    soft_ce      T² Σ q (-log p)             = forward_kl + entropy of q: another value, the same gradient
    reverse_kl   T² Σ p (log p - log q)
    jsd          T² (β Σ q (log q - log m) + (1-β) Σ p (log p - log m)),  m = β q + (1-β) p
    hard         -log softmax(z)[label]      always at temperature one

T² keeps the size of the gradient when the temperature changes. The loss is (1 - hard) kd + hard CE, a mean over tokens.

Gradients are computed in the forward, while the logits of a chunk are there: four products per chunk (logits of student
and teacher, gradient of hidden states and of the head), and no logits are kept for the backward, which only scales.
Logits have the dtype of the hidden states, as a model's own; statistics and the sum for the head's gradient are fp32.
"""

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from affine_attn.errors import UserError, first_line

KINDS = ("soft_ce", "forward_kl", "reverse_kl", "jsd")
IGNORE_INDEX = -100
# Of a chunk's logits. The sum of the head's gradient is read and written once per chunk, so small ones cost time.
CHUNK_BYTES = 2**29
# On a CPU. malloc keeps blocks up to this size; larger ones come from the kernel anew, zeroed page by page.
CPU_CHUNK_BYTES = 2**25
# Compiling takes a CPU four seconds and saves 20 to 30 ns per logit: from so many logits on it pays.
_FEWEST_CALLS, _FEWEST_LOGITS = 50, 2**28
# Rows of a tile of a matrix product: chunks are multiples of it where they are that long.
_TILE = 128
# For log 0: times a probability of 0 it is 0, where -inf would give NaN.
_LOG_ZERO = -1e30
# Kinds, dtypes, with and without labels or gradients: each is a graph, and by default torch gives up after 8.
_MOST_GRAPHS = 64


@dataclass(frozen=True)
class LossSpec:
    """What is minimised: (1 - hard) kd + hard CE. ``beta`` is the teacher's share in m, for jsd alone."""

    kind: str = "soft_ce"
    temperature: float = 1.0
    beta: float = 0.5
    hard: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"loss: its kind is {self.kind!r}; allowed are {', '.join(KINDS)}")
        if not (0 < self.temperature < math.inf):
            raise UserError(f"temperature is {self.temperature}; it must be positive and finite")
        if not 0 < self.beta < 1:
            raise UserError(f"beta is {self.beta}; it lies between 0 and 1, whose limits are forward_kl and reverse_kl")
        if not 0 <= self.hard <= 1:
            raise UserError(f"hard is {self.hard}; it must lie in [0, 1]")


class Teacher(NamedTuple):
    """Soft targets from a teacher's last hidden states [..., D'] and its head [V', D']; never differentiated."""

    hidden: Tensor
    weight: Tensor


class Logits(NamedTuple):
    """Soft targets from a teacher's logits [..., V'], never differentiated: where they are there whole, because several
    students share them or because the teacher's head is more than a product."""

    logits: Tensor


class TopK(NamedTuple):
    """Soft targets from a cache: distinct entries ``ids`` [..., k] and their log-probabilities [..., k].

    The target is the teacher cut to these entries and renormalised, softmax(log_probs / T) over the k, and zero
    elsewhere; the loss is exact for it. -inf marks an entry that is not used; its id may repeat another.
    """

    ids: Tensor
    log_probs: Tensor


class Loss(NamedTuple):
    """``loss`` has the gradient. The rest is detached, over the same denominator: loss = (1 - hard) kd + hard CE.

    ``entropy`` is T² times the teacher's: soft_ce - entropy = forward_kl. Parts that do not apply are 0.
    """

    loss: Tensor
    kd: Tensor
    hard: Tensor
    entropy: Tensor
    tokens: Tensor  # that count in this call, int64


def next_tokens(ids: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Labels of the positions of ``ids`` [..., T]: the token that follows; none follows the last."""
    return F.pad(ids[..., 1:], (0, 1), value=ignore_index)


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Teacher | Logits | TopK | None = None,
    labels: Tensor | None = None,
    *,
    spec: LossSpec = LossSpec(),
    mask: Tensor | None = None,
    tokens: int | float | Tensor | None = None,
    shared: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    chunk_bytes: int | None = None,
    compiled: bool | None = None,
) -> Loss:
    """The loss of a student's last hidden states [..., D] through its head ``weight`` [V, D].

    target: what to distill from; None is plain cross-entropy on the labels.
    labels: int [...], the token that each row predicts: not shifted here (``next_tokens`` does). The hard loss needs
        them, and where they are given its value is reported even if it has no share in the loss.
    mask: bool [...], True = counts. A token counts in all parts or in none: it must be in the mask, and its label,
        where labels are given, must not be ``ignore_index``. Other tokens have no influence, whatever they hold.
    tokens: the denominator; by default the tokens that count here. With gradient accumulation or several ranks pass
        their total, as transformers' ``num_items_in_batch``: the losses of the calls then add up.
    shared: number of leading vocabulary entries that both tokenizers share. Student and teacher are restricted to them,
        as if the others did not exist; without it both vocabularies must have the same size.
    chunk_bytes: most bytes for the logits of a chunk, for the student and for the teacher each; by default 512 MiB on
        CUDA, 32 MiB on a CPU.
    compiled: whether torch.compile fuses the arithmetic between the products; by default on CUDA alone. On a CPU it
        changes the last digits, so it is decided once for a run: ``compiling_pays`` says when.
    """
    job = _job(hidden, weight, target, labels, spec, mask, shared, ignore_index)
    tape = torch.is_grad_enabled()
    needs = (tape and hidden.requires_grad, tape and weight.requires_grad)
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES if hidden.is_cuda else CPU_CHUNK_BYTES
    size = chunk_size(job.valid.numel(), job.vocabulary, job.dtype.itemsize, chunk_bytes)
    if compiled is None:
        compiled = hidden.is_cuda
    plan = _Plan(size, compiled, needs)
    total, sums = _ChunkedLoss.apply(hidden, weight, job, plan)
    count = job.valid.sum()
    denominator = count.clamp(min=1) if tokens is None else torch.as_tensor(tokens, device=hidden.device)
    # Divided here rather than in the chunks: gradients of logits that small would vanish in fp16.
    kd, hard, entropy = (sums / denominator).unbind()
    return Loss(total / denominator, kd, hard, entropy, count)


def chunk_size(tokens: int, vocabulary: int, itemsize: int, chunk_bytes: int) -> int:
    """Tokens per chunk: the fewest chunks of at most ``chunk_bytes`` logits, equally long, in whole tiles."""
    most = max(1, chunk_bytes // (vocabulary * itemsize))
    tile = _TILE if most >= _TILE else 1
    most -= most % tile
    size = math.ceil(tokens / math.ceil(tokens / most))
    return min(tokens, math.ceil(size / tile) * tile)


def compiling_pays(calls: int, logits: int) -> bool:
    """Return True if a loss of so many calls and logits in all is worth compiling on this CPU, and can be."""
    return calls >= _FEWEST_CALLS and logits >= _FEWEST_LOGITS and _can_compile()


@functools.cache
def _can_compile() -> bool:
    """Return True if torch.compile works on this CPU; where it does not, say so once."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8))
    except Exception as error:  # no compiler, no headers, no place for its files: each has an error of its own
        logging.getLogger(__name__).warning("the loss runs uncompiled, which is slower: %s", first_line(error))
        return False
    return True


class _Job(NamedTuple):
    """Checked and flat: rows are tokens, and the heads have the vocabulary that counts."""

    spec: LossSpec
    hard: float  # share of the hard loss
    vocabulary: int
    dtype: torch.dtype  # of the student's products
    teacher: Teacher | None
    teacher_logits: Tensor | None
    top_k: TopK | None
    labels: Tensor | None
    valid: Tensor


class _Plan(NamedTuple):
    size: int
    compiled: bool
    needs: tuple[bool, bool]  # gradient of hidden states, of the head


def _job(
    hidden: Tensor,
    weight: Tensor,
    target: Teacher | Logits | TopK | None,
    labels: Tensor | None,
    spec: LossSpec,
    mask: Tensor | None,
    shared: int | None,
    ignore_index: int,
) -> _Job:
    rows = hidden.shape[:-1]
    if rows.numel() == 0:
        raise UserError(f"hidden has no tokens: its shape is {tuple(hidden.shape)}")
    dtype = _product_dtype("student", hidden, weight)
    if target is None and labels is None:
        raise UserError("there is nothing to learn from: give a target, labels or both")
    if target is not None and labels is None and spec.hard > 0:
        raise UserError(f"spec.hard is {spec.hard} but no labels are given")
    expected = {"labels": labels, "mask": mask}
    if isinstance(target, Teacher):
        expected["target.hidden"] = target.hidden[..., 0]
    elif isinstance(target, Logits):
        expected["target.logits"] = target.logits[..., 0]
    elif target is not None:
        if spec.kind == "reverse_kl":
            raise UserError("reverse_kl is infinite for a top-k target, which has entries of probability 0")
        if target.ids.shape != target.log_probs.shape:
            shapes = f"{tuple(target.ids.shape)} and {tuple(target.log_probs.shape)}"
            raise UserError(f"target.ids and target.log_probs must have one shape, got {shapes}")
        expected["target.ids"] = target.ids[..., 0]
    for name, tensor in expected.items():
        if tensor is not None and tensor.shape != rows:
            raise UserError(f"{name} is for tokens {tuple(tensor.shape)}, hidden for {tuple(rows)}")
    if mask is not None and mask.dtype != torch.bool:
        raise UserError(f"mask must be bool (True = counts), got {mask.dtype}")

    vocabulary = _shared_vocabulary(weight, target, shared)
    valid = torch.ones(rows, dtype=torch.bool, device=hidden.device) if mask is None else mask
    if labels is not None:
        valid = valid & (labels != ignore_index)
        # A label to look up in every row: those that do not count are looked up and dropped.
        labels = labels.long().masked_fill(~valid, 0).flatten()
        _check_entries("labels", labels, vocabulary)
    teacher = logits = top_k = None
    if isinstance(target, Teacher):
        teacher_dtype = _product_dtype("teacher", *target)
        states, head = (x.detach().to(teacher_dtype) for x in target)
        teacher = Teacher(states.flatten(0, -2), head[:vocabulary])
    elif isinstance(target, Logits):
        logits = target.logits.detach().flatten(0, -2)[:, :vocabulary]
    elif target is not None:
        ids = target.ids.long().masked_fill(~valid[..., None], 0)
        _check_entries("target.ids", ids, vocabulary)
        top_k = TopK(ids.flatten(0, -2), target.log_probs.detach().flatten(0, -2))
    hard = 1.0 if target is None else spec.hard
    return _Job(spec, hard, vocabulary, dtype, teacher, logits, top_k, labels, valid.flatten())


def _product_dtype(who: str, hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype in which a linear layer would multiply here."""
    if hasattr(weight, "full_tensor"):
        raise UserError(f"the {who}'s weight is a DTensor; compute the loss inside the forward that gathers it")
    if hidden.shape[-1] != weight.shape[-1]:
        raise UserError(f"the {who}'s hidden size is {hidden.shape[-1]}, its head takes {weight.shape[-1]}")
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    if hidden.dtype != weight.dtype:
        raise UserError(f"the {who}'s hidden states are {hidden.dtype}, its head is {weight.dtype}")
    return hidden.dtype


def _shared_vocabulary(weight: Tensor, target: Teacher | Logits | TopK | None, shared: int | None) -> int:
    sizes = {"student": weight.shape[0]}
    if isinstance(target, Teacher):
        sizes["teacher"] = target.weight.shape[0]
    elif isinstance(target, Logits):
        sizes["teacher"] = target.logits.shape[-1]
    said = " and ".join(f"the {who} has {size}" for who, size in sizes.items())
    if shared is None:
        if len(set(sizes.values())) > 1:
            raise UserError(f"{said} vocabulary entries: give shared, the number of leading entries that mean the same")
        return weight.shape[0]
    if not 1 <= shared <= min(sizes.values()):
        raise UserError(f"shared is {shared}, but {said} vocabulary entries")
    return shared


def _check_entries(name: str, entries: Tensor, vocabulary: int) -> None:
    allowed = ((entries >= 0) & (entries < vocabulary)).all()
    message = f"{name} must lie in [0, {vocabulary}), the vocabulary entries that count"
    if entries.is_cuda:
        torch._assert_async(allowed, message)  # the host does not wait
    elif not allowed:
        raise UserError(message)


class _ChunkedLoss(torch.autograd.Function):
    """Sums over tokens: the loss, and (kd, hard, entropy)."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, job: _Job, plan: _Plan) -> tuple[Tensor, Tensor]:
        # The dtypes are decided; autocast would round the fp32 sum of the head's gradient at every chunk.
        with torch.autocast(hidden.device.type, enabled=False):
            sums, dhidden, dweight = _run(hidden.flatten(0, -2), weight, job, plan)
        ctx.shape, ctx.dtypes = hidden.shape, (hidden.dtype, weight.dtype)
        ctx.save_for_backward(dhidden, dweight)
        ctx.mark_non_differentiable(sums)
        return (1 - job.hard) * sums[0] + job.hard * sums[1], sums

    @staticmethod
    @once_differentiable
    def backward(ctx, scale: Tensor, _: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        dhidden, dweight = ctx.saved_tensors
        if dhidden is not None:
            dhidden = _scaled(dhidden, scale, ctx.dtypes[0]).view(ctx.shape)
        if dweight is not None:
            dweight = _scaled(dweight, scale, ctx.dtypes[1])
        return dhidden, dweight, None, None


def _scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale out of place, so that a retained graph stays right; rounded once, without a product in the wider dtype."""
    return torch.mul(x, scale, out=torch.empty_like(x, dtype=dtype))


def _run(hidden: Tensor, weight: Tensor, job: _Job, plan: _Plan) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Sums of the parts, and the gradients of the summed loss that are needed."""
    tokens, statistics = hidden.shape[0], torch.promote_types(job.dtype, torch.float32)
    head = weight[: job.vocabulary].to(job.dtype)
    # The buffers of all chunks.
    logits = head.new_empty(plan.size, job.vocabulary)
    teacher_logits = None if job.teacher is None else job.teacher.weight.new_empty(plan.size, job.vocabulary)
    sums = torch.zeros(3, dtype=statistics, device=hidden.device)
    dhidden = torch.empty_like(hidden, dtype=job.dtype) if plan.needs[0] else None
    dweight = None
    if plan.needs[1]:
        dweight = torch.empty(weight.shape, dtype=statistics, device=weight.device)
        dweight[job.vocabulary :] = 0
    normalise, measure, differentiate, finish = _compiled_passes() if plan.compiled else _PASSES
    # Every chunk has the same shape, so that one graph serves all: the last one reaches back into the one before it,
    # and its rows there do not count. From last to first, so that the owner of a row is the last to write its gradient.
    for first in reversed(range(0, tokens, plan.size)):
        start = min(first, tokens - plan.size)
        rows = slice(start, start + plan.size)
        # Copies of what is small: compiled code may depend on where in its storage a view starts.
        valid = job.valid[rows].clone()
        valid[: first - start] = False
        # Zeros where nothing counts: a NaN there would pass through the product of the head's gradient.
        states = torch.where(valid[:, None], hidden[rows], 0).to(job.dtype)
        torch.mm(states, head.t(), out=logits)
        if job.teacher is not None:
            torch.mm(job.teacher.hidden[rows], job.teacher.weight.t(), out=teacher_logits)
        elif job.teacher_logits is not None:
            teacher_logits = job.teacher_logits[rows]
        target = teacher_logits if job.top_k is None else job.top_k.log_probs[rows].clone()
        ids = None if job.top_k is None else job.top_k.ids[rows].clone()
        labels = None if job.labels is None else job.labels[rows].clone()
        lse = normalise(logits, target, job.spec)
        if any(plan.needs) and ids is None and job.spec.kind in _CENTRED:
            part, gradient = finish(logits, target, labels, valid, lse, job.spec, job.hard)
            sums += part
        else:
            part, centre, at_ids = measure(logits, target, ids, labels, valid, lse, job.spec)
            sums += part
            if not any(plan.needs):
                continue
            common = (labels, valid, lse, centre, job.spec, job.hard)
            gradient = differentiate(logits, target if ids is None else None, None, *common)
            if ids is not None and at_ids is not None:
                # Small, and a second shape would make the compiled one general. An entry that is not used may repeat
                # the id of one that is: a share of the target only ever lowers the gradient.
                at_ids = _differentiate(at_ids, target, ids, *common)
                gradient.scatter_reduce_(1, ids, at_ids, "amin", include_self=False)
        if dhidden is not None:
            torch.mm(gradient, head, out=dhidden[rows])
        if dweight is not None:
            _add_product(dweight[: job.vocabulary], gradient.t(), states, is_first=start + plan.size == tokens)
    return sums, dhidden, dweight


def _add_product(total: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:
    """total += a @ b, in the precision of the total; the first one need not read it."""
    beta = 0.0 if is_first else 1.0
    if a.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)


# What happens between the products, in three passes: normalise, measure, differentiate. Each is a function of its own,
# so that a compiled one reads the logits and writes row statistics, or the gradient. Out of one function, the compiler
# would store intermediate results [C, V] in fp32 from one loop for the next.
#
# logits [C, V]; target: the teacher's logits [C, V], or log-probabilities [C, K] of a top-k target at ``ids`` [C, K].


class _Normalisers(NamedTuple):
    """Log-sum-exp of every row [C, 1]."""

    p: Tensor  # of the student's logits over T
    q: Tensor  # of the target's over T; anything if there is none
    plain: Tensor  # of the student's at temperature one, for the hard loss


def _normalise(logits: Tensor, target: Tensor | None, spec: LossSpec) -> _Normalisers:
    p = _log_sum_exp(logits, spec.temperature)
    q = p if target is None else _log_sum_exp(target, spec.temperature)
    return _Normalisers(p, q, p if spec.temperature == 1 else _log_sum_exp(logits, 1.0))


def _measure(
    logits: Tensor,
    target: Tensor | None,
    ids: Tensor | None,
    labels: Tensor | None,
    valid: Tensor,
    lse: _Normalisers,
    spec: LossSpec,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(kd, hard, entropy) summed over the valid rows; the centre of each row's slope; the logits at the ids."""
    centre = torch.zeros_like(lse.p)
    kd = hard = entropy = centre[:, 0]
    elsewhere = None
    if labels is not None:
        hard = (lse.plain - logits.gather(1, labels[:, None]))[:, 0]
    at_ids = None if ids is None else logits.gather(1, ids)
    if target is not None:
        log_p = _log_prob(logits if at_ids is None else at_ids, lse.p, spec)
        if ids is not None:
            elsewhere = 1 - log_p.exp().sum(1)
        kd, entropy, centre = _divergence(log_p, _log_prob(target, lse.q, spec), elsewhere, spec)
    rows = torch.stack((spec.temperature**2 * kd, hard, spec.temperature**2 * entropy))
    return torch.where(valid, rows, 0.0).sum(1), centre, at_ids


def _differentiate(
    logits: Tensor,
    target: Tensor | None,
    ids: Tensor | None,
    labels: Tensor | None,
    valid: Tensor,
    lse: _Normalisers,
    centre: Tensor,
    spec: LossSpec,
    hard: float,
) -> Tensor:
    """Gradient of the loss by logits, which are those of the entries ``ids`` or of all. Without a target: where it has
    no mass."""
    gradient = torch.zeros_like(lse.p)
    if hard < 1:
        log_q = None if target is None else _log_prob(target, lse.q, spec)
        # d(T² kd)/dz = T d(kd)/d(z/T).
        share = (1 - hard) * spec.temperature
        gradient = gradient + share * _slope(_log_prob(logits, lse.p, spec), log_q, centre, spec)
    if hard > 0:
        entries = torch.arange(logits.shape[1], device=logits.device) if ids is None else ids
        p = (_wide(logits) - lse.plain).exp()
        gradient = gradient + hard * (p - (entries == labels[:, None]).to(p.dtype))
    return torch.where(valid[:, None], gradient, 0.0).to(logits.dtype)


def _finish(
    logits: Tensor,
    target: Tensor | None,
    labels: Tensor | None,
    valid: Tensor,
    lse: _Normalisers,
    spec: LossSpec,
    hard: float,
) -> tuple[Tensor, Tensor]:
    """Measure and differentiate in one pass, which a slope allows whose centre is known to be 0."""
    part, centre, _ = _measure(logits, target, None, labels, valid, lse, spec)
    return part, _differentiate(logits, target, None, labels, valid, lse, centre, spec, hard)


def _divergence(
    log_p: Tensor, log_q: Tensor, elsewhere: Tensor | None, spec: LossSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Divergence, entropy of q, and the centre of the slope; ``elsewhere`` is the mass of p at entries not given."""
    p, q = log_p.exp(), log_q.exp()
    entropy = -(q * log_q).sum(1)
    if spec.kind == "reverse_kl":
        kl = (p * (log_p - log_q)).sum(1)
        return kl, entropy, kl[:, None]
    if spec.kind == "jsd":
        log_m = _log_mixture(p, q, spec.beta)
        student = (p * (log_p - log_m)).sum(1)
        if elsewhere is not None:
            student = student - math.log(1 - spec.beta) * elsewhere
        teacher = (q * (log_q - log_m)).sum(1)
        return spec.beta * teacher + (1 - spec.beta) * student, entropy, student[:, None]
    kl = (q * (log_q - log_p)).sum(1)
    return kl + entropy if spec.kind == "soft_ce" else kl, entropy, torch.zeros_like(kl)[:, None]


def _slope(log_p: Tensor, log_q: Tensor | None, centre: Tensor, spec: LossSpec) -> Tensor:
    """Gradient of the divergence by the logits of p, at entries with log_q; without, where q is 0.

    The centre is the mean of the log-ratio under p: softmax does not feel a shift of all logits.
    """
    p = log_p.exp()
    if spec.kind in ("soft_ce", "forward_kl"):
        return p if log_q is None else p - log_q.exp()
    if log_q is None:
        log_ratio = -math.log(1 - spec.beta)  # m = (1-β) p
    else:
        log_ratio = log_p - (_log_mixture(p, log_q.exp(), spec.beta) if spec.kind == "jsd" else log_q)
    return (1 - spec.beta if spec.kind == "jsd" else 1.0) * p * (log_ratio - centre)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _log_sum_exp(logits: Tensor, temperature: float) -> Tensor:
    # Spelt out: the compiler knows this form, and makes one loop of the two.
    x = _wide(logits) / temperature
    largest = x.amax(1, keepdim=True)
    return (x - largest).exp().sum(1, keepdim=True).log() + largest


def _log_prob(logits: Tensor, lse: Tensor, spec: LossSpec) -> Tensor:
    return (_wide(logits) / spec.temperature - lse).clamp(min=_LOG_ZERO)


def _log_mixture(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """log m; where both vanish any finite number will do, since p or q multiplies it."""
    return (beta * q + (1 - beta) * p).clamp(min=torch.finfo(p.dtype).tiny).log()


# Kinds whose slope is centred by itself, see _divergence.
_CENTRED = ("soft_ce", "forward_kl")
_PASSES = (_normalise, _measure, _differentiate, _finish)


@functools.cache
def _compiled_passes() -> tuple[Callable, ...]:
    return tuple(_compiled(function) for function in _PASSES)


def _compiled(function: Callable) -> Callable:
    compiled = torch.compile(function, fullgraph=True)

    @functools.wraps(function)
    def call(*arguments):
        with torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS):
            return compiled(*arguments)

    return call
