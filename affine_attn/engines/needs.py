"""Facts about a call, and every reason to refuse one: a function for each engine and each kernel that is choosy.

Each takes facts and returns a sentence, or None where nothing stands in the way. Facts can be made up, so what a GPU
would run is known without it. Those that choose an engine are also asked while a compiler traces, before the
operator; those of ``Sizes`` of real tensors alone, inside of it.
"""

import functools
import inspect
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch.autograd import forward_ad
from torch.nn.attention import current_flash_attention_impl

from affine_attn.core.call import Call
from affine_attn.core.spec import Alibi, LogN
from affine_attn.engines import flash_attn_4, timings
from affine_attn.errors import first_line
from affine_attn.kernels import launch
from affine_attn.kernels.decode.launch import CURVES as DECODE_CURVES
from affine_attn.kernels.decode.launch import LOGITS as DECODE_LOGITS
from affine_attn.kernels.device import capability, must_be_deterministic
from affine_attn.kernels.epilogue.tiles import SLIDING
from affine_attn.kernels.flash.launch import CURVES as FLASH_CURVES
from affine_attn.kernels.flash.launch import LOGITS as FLASH_LOGITS
from affine_attn.kernels.launch import ELEMENTWISE, gate_kind
from affine_attn.kernels.sm90.backward import LENGTHS as SM90_LENGTHS
from affine_attn.kernels.sm90.forward import STAGES as SM90_STAGES
from affine_attn.kernels.sm90.scheduler import can_be_copied

# What PyTorch's operator for the CPU can be given: LogN is in q, ALiBi a float mask.
OFFSETS = (type(None), LogN, Alibi)
# The most queries of the decode engine.
MAX_QUERIES = 16
# Heads of all sequences together: CUDA's limit for the second axis of a grid.
MOST_HEADS = 65535


def _triton_problem() -> str | None:
    """Why Triton cannot be used at all, or None; found without importing it, which takes a while."""
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        installed = version("triton")
    except PackageNotFoundError:
        return None  # the module comes from a distribution of another name, as in ROCm builds
    oldest = (3, 6)
    return None if tuple(int(part) for part in installed.split(".")[:2]) >= oldest else f"triton {installed} is too old"


# A constant of the process, so that a compiler has nothing to look up.
_TRITON_PROBLEM = _triton_problem()
_HOPPER = (9, 0)
# Major numbers of the capabilities of Hopper and Blackwell, which FlashAttention-4 is for.
_BLACKWELL = 10
_FA4_CAPABILITIES = (_HOPPER[0], _BLACKWELL)
# Channels of keys and of values, those of DeepSeek-V3, which kernels have that stop at 128 otherwise.
_DEEPSEEK = (192, 128)
# What is known of a call's documents.
SCATTERED, CONTIGUOUS, COUNTED = "scattered", "contiguous", "counted"
_NO_CUDA = "Triton kernels need a CUDA device"


class Machine(NamedTuple):
    """The machine that a call runs on."""

    device: str
    capability: tuple[int, int] | None  # of an NVIDIA GPU, (0, 0) of all else; None while tracing, which cannot ask
    triton: str | None  # why Triton cannot run there


# Machines that a call can be explained for.
MACHINES = {
    "cpu": Machine("cpu", (0, 0), _NO_CUDA),
    **{f"sm{a}{b}": Machine("cuda", (a, b), None) for a, b in ((8, 0), (9, 0), (10, 0))},
}


def machine_of(device: torch.device, is_interpreted: bool, is_tracing: bool = False) -> Machine:
    problem = _TRITON_PROBLEM
    if problem is None and device.type != "cuda" and not is_interpreted:
        problem = _NO_CUDA
    return Machine(device.type, None if is_tracing else capability(device), problem)


_known_machine = functools.cache(machine_of)


class Process(NamedTuple):
    """What holds for all calls and may change between two."""

    flash: str | None
    is_deterministic: bool


def process() -> Process:
    return Process(current_flash_attention_impl(), must_be_deterministic())


# The fewest queries that FlashAttention-4 has been timed with, in training: it is asked for no fewer.
FA4_QUERIES = timings.LENGTHS[0]
# What it must save of the time of its plain attention to be asked for: less than that is noise.
FA4_MARGIN = 0.01


class Questions:
    """Comparisons of sizes, each made when it is asked: to a compiler it is a guard, to an export a constraint."""

    __slots__ = ("batch", "heads", "keys", "queries")

    def __init__(self, batch: int, heads: int, queries: int, keys: int):
        self.batch, self.heads, self.queries, self.keys = batch, heads, queries, keys

    @property
    def is_empty(self) -> bool:
        """No sequence, no query or no key."""
        return 0 in (self.batch, self.queries, self.keys)

    @property
    def is_overlong(self) -> bool:
        """More queries than keys."""
        return self.queries > self.keys

    @property
    def is_single(self) -> bool:
        """One query."""
        return self.queries == 1

    @property
    def is_short(self) -> bool:
        """No more queries than the decode engine takes."""
        return 0 < self.queries <= MAX_QUERIES

    @property
    def length(self) -> int:
        """The largest number of tokens that was timed and is not above that of the queries; 0 below all of them."""
        return next((tokens for tokens in reversed(timings.LENGTHS) if self.queries >= tokens), 0)

    @property
    def is_crowded(self) -> bool:
        """More heads of all sequences together than a grid has places."""
        # Said of the batch alone: torch.export can name no limit of a product.
        return self.batch > MOST_HEADS // max(self.heads, 1)

    @property
    def is_broad(self) -> bool:
        """More sequences than a grid has places."""
        return self.batch > MOST_HEADS


class Answers(NamedTuple):
    """All :class:`Questions`, answered: classes of sizes, never sizes, which in decoding grow with each token."""

    is_empty: bool
    is_overlong: bool
    is_single: bool
    is_short: bool
    length: int
    is_crowded: bool
    is_broad: bool


@functools.lru_cache(1024)
def _answers(batch: int, heads: int, queries: int, keys: int) -> Answers:
    questions = Questions(batch, heads, queries, keys)
    return Answers(*(getattr(questions, name) for name in Answers._fields))


class Facts(NamedTuple):
    """What the choice of an engine depends on, and the key under which it is remembered."""

    is_traced: bool  # which then is not remembered: a cached function must not be traced
    machine: Machine
    flash: str | None  # what torch's flash operators have been replaced by
    is_deterministic: bool
    has_transforms: bool  # torch.func, forward-mode derivatives
    has_grad: bool
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    is_grouped: bool  # heads share keys and values
    curve: type  # the two parts of stage 1
    logit: type
    causal: bool
    restrictions: tuple[str, ...]  # what hides keys besides causality, by name
    documents: str | None  # what is known of them
    has_long_window: bool  # one whose sums of values slide along
    has_sink: bool
    has_row_sink: bool  # one for each token
    has_alpha: bool
    has_beta: bool
    has_gate: bool
    has_bias: bool
    has_bias_grad: bool
    sizes: Answers | Questions

    @property
    def has_stages(self) -> bool:
        """Return True if something is done after the attention, row by row."""
        return self.has_sink or self.has_alpha or self.has_beta or self.has_gate


class Sizes(NamedTuple):
    """What the choice of kernels depends on besides: layouts and lengths of real tensors, and kinds of gates."""

    is_square: bool = False  # as many keys as queries; no dimension is 0
    is_timed: bool = False  # a length for which the sm90 backward has been timed
    has_rows: bool = False  # TMA reads q, k and v
    is_elementwise: bool = False
    gate_dtype: torch.dtype | None = None
    has_gate_rows: bool = True  # TMA reads an elementwise gate


# Of all machines whose kernels do not ask.
NO_SIZES = Sizes()


def is_traced(call: Call) -> bool:
    """Return True under torch.compile or with fake tensors."""
    return torch.compiler.is_compiling() or type(call.q) not in (torch.Tensor, torch.nn.Parameter)


def facts_of(call: Call, machine: Machine | None = None) -> Facts:
    q, is_tracing = call.q, is_traced(call)
    (batch, heads, queries, head_dim), keys = q.shape, call.k.shape[2]
    if machine is None:
        machine = (
            machine_of(q.device, launch.INTERPRETED, is_tracing=True)._replace(capability=_capability_compiled_for(q))
            if is_tracing
            else _known_machine(q.device, launch.INTERPRETED)
        )
    # Not while a compiler traces: it would put the question into every graph.
    has_transforms = not (is_tracing and torch.compiler.is_compiling()) and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )
    return Facts(
        is_tracing,
        machine,
        current_flash_attention_impl(),
        not is_tracing and must_be_deterministic(),
        has_transforms,
        call.needs_grad,
        q.dtype,
        head_dim,
        call.v.shape[3],
        heads != call.k.shape[1],
        type(call.curve),
        type(call.logit),
        call.mask.causal,
        call.mask.restrictions,
        None if call.mask.documents is None else _known_of_documents(call),
        (call.mask.window or 0) >= SLIDING,
        call.sink is not None,
        isinstance(call.sink, torch.Tensor) and call.sink.ndim == 3,
        call.alpha is not None,
        call.beta is not None,
        call.gate is not None,
        call.bias is not None,
        call.bias is not None and call.bias.requires_grad and torch.is_grad_enabled(),
        (Questions if is_tracing else _answers)(batch, heads, queries, keys),
    )


def _capability_compiled_for(q: torch.Tensor) -> tuple[int, int] | None:
    """Return the compute capability of the GPU that a compiler traces for; an exported program may run on another."""
    is_here = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return _constant_capability(q.device) if is_here else None


def _constant_capability(device: torch.device) -> tuple[int, int] | None:
    return _known_machine(device, launch.INTERPRETED).capability


def _known_of_documents(call: Call) -> str:
    if not call.mask.contiguous:
        return SCATTERED
    return CONTIGUOUS if call.mask.most_documents is None else COUNTED


def sizes_of(call: Call, f: Facts) -> Sizes:
    if f.machine.capability != _HOPPER:
        return NO_SIZES
    q, gate = call.q, call.gate
    is_elementwise = gate is not None and gate_kind(gate) == ELEMENTWISE
    return Sizes(
        q.shape[2] == call.k.shape[2] and 0 not in q.shape,
        q.shape[2] in SM90_LENGTHS,
        can_be_copied(q) and can_be_copied(call.k) and can_be_copied(call.v),
        is_elementwise,
        None if gate is None else gate.dtype,
        gate is None or not is_elementwise or can_be_copied(gate),
    )


def plain_scores(f: Facts, curves: tuple[type, ...] = (type(None),)) -> str | None:
    """What a kernel needs that has no bias of scores, and no curves but these."""
    if f.curve not in curves:
        return f"its kernels do not know the {f.curve.__name__} curve"
    if f.logit is LogN and f.curve is not type(None):
        return f"LogN scales q for it, which {f.curve.__name__} comes before"
    if f.has_bias:
        return "its kernels have no bias"
    return None


def simple_mask(f: Facts) -> str | None:
    """What a kernel needs that has no mask of single pairs and no window on both sides."""
    for name in ("allowed", "window_after"):
        if name in f.restrictions:
            return f"its kernels have no mask.{name}"
    return None


def same_widths(f: Facts) -> str | None:
    """What a kernel needs whose tiles of keys and values are alike."""
    if f.value_dim != f.head_dim:
        return f"its kernels have values as wide as keys, not {f.value_dim} channels for {f.head_dim}"
    return None


def _widths(f: Facts) -> str:
    return str(f.head_dim) if f.value_dim == f.head_dim else f"{f.head_dim} with values of {f.value_dim}"


def transforms(f: Facts) -> str | None:
    """What every engine but the reference needs."""
    if f.has_transforms:
        return "the transforms of torch.func and forward-mode derivatives know the operations of the reference alone"
    return None


def decode(f: Facts) -> str | None:
    if (reason := transforms(f) or triton(f)) is not None:
        return reason
    if f.has_grad:
        return "it has no backward"
    if (reason := plain_scores(f, DECODE_CURVES) or simple_mask(f)) is not None:
        return reason
    if not f.sizes.is_short:
        return f"it takes 1 to {MAX_QUERIES} queries"
    if f.sizes.is_broad:
        return f"it takes at most {MOST_HEADS} sequences"
    if f.sizes.is_empty or ("lengths" not in f.restrictions and f.sizes.is_overlong):
        return "it needs a key for every query"
    if f.logit not in DECODE_LOGITS:
        return f"its kernel does not know the {f.logit.__name__} logit"
    if f.logit is Alibi and not f.causal:
        return "its distance logits are causal"
    return None


def fa4(f: Facts) -> str | None:
    if (reason := transforms(f)) is not None:
        return reason
    if f.logit not in (type(None), LogN):
        return f"FlashAttention-4 is given plain scores, or those of LogN, not the {f.logit.__name__} logit"
    if (reason := plain_scores(f)) is not None:
        return reason
    for name in f.restrictions:
        if name not in ("documents", "window"):
            return f"FlashAttention-4 has no mask.{name}"
    if f.documents == SCATTERED:
        return "its documents are contiguous, which Mask.packed or Mask(contiguous=True) promises"
    if f.machine.device != "cuda":
        return f"FlashAttention-4 does not run on {f.machine.device}"
    if f.dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention-4 takes bfloat16 or float16, not {f.dtype}"
    if f.head_dim % 8 or f.head_dim > 256:
        return f"FlashAttention-4 needs a head_dim divisible by 8 and at most 256, not {f.head_dim}"
    if f.value_dim % 8 or f.value_dim > f.head_dim:
        return f"FlashAttention-4 needs values no wider than keys, and divisible by 8, not {_widths(f)}"
    # None while a compiler traces: then the package itself refuses when it is called.
    if f.machine.capability is not None:
        major = f.machine.capability[0]
        if major not in _FA4_CAPABILITIES:
            return "FlashAttention-4 is for GPUs of compute capability 9.x and 10.x"
        if major == _BLACKWELL and f.head_dim > 128 and (f.head_dim, f.value_dim) not in (_DEEPSEEK, (256, 256)):
            return f"FlashAttention-4 takes head dims up to 128, or 256, on Blackwell, not {_widths(f)}"
    if f.sizes.is_empty:
        return "FlashAttention-4 needs at least one query and one key"
    if f.sizes.is_overlong and (f.causal or f.documents is not None):
        return "FlashAttention-4 cannot have queries without any key (more queries than keys)"
    return beta(f) or flash_attn_4_package()


def fa4_unasked(f: Facts) -> str | None:
    """Why "auto" leaves FlashAttention-4 alone although it may be able to run the call, or None.

    It is taken where it has been timed, and was the faster one.
    """
    if f.machine.capability != _HOPPER:
        return "since it has been timed on compute capability 9.0 alone"
    if not f.has_grad:
        return "since its forward has not been timed by itself"
    if (reason := flash_attn_4_package()) is not None:
        # Before sizes are looked at, which a compiler would then have to guard.
        return f"since {reason}"
    if f.is_deterministic:
        return "since no other has been timed beside it in deterministic mode"
    if not f.causal:
        return "since it has been timed under causal masks alone"
    if f.value_dim != f.head_dim:
        return "since it has not been timed with values of another width than keys"
    if f.head_dim not in timings.HEAD_DIMS:
        return f"since it has not been timed with a head_dim of {f.head_dim}"
    if f.documents == CONTIGUOUS:
        return "since it would wait for the device to count the documents, which Mask.packed knows"
    if not f.sizes.length:
        return f"since it has not been timed with fewer than {FA4_QUERIES} queries"
    return None if timings.saved_by_fa4(*_point(f)) > FA4_MARGIN else "since others took less time"


def timed(f: Facts) -> dict[timings.Pair, float]:
    """Return the times of kernels for the call, as those of the nearest one that was timed."""
    return timings.of(_point(f))


def _point(f: Facts) -> timings.Point:
    masks = {"documents": timings.DOCUMENTS, "window": timings.WINDOW}
    mask = next((kind for name, kind in masks.items() if name in f.restrictions), timings.CAUSAL)
    stages = timings.GATED if f.has_gate else timings.AFFINE if f.has_alpha or f.has_beta else timings.SINK
    heads = timings.SHARED if f.is_grouped else timings.OWN
    # A number of the table also where a compiler keeps that of the call open.
    head_dim = next((known for known in timings.HEAD_DIMS if known == f.head_dim), f.head_dim)
    return timings.Point(mask, head_dim, f.sizes.length, stages, heads)


def flash_attn_4_package() -> str | None:
    """Why the installed FlashAttention-4 cannot be called, or None; the first to ask imports it, and waits."""
    return _flash_attn_4_package()


# To a compiler their results are constants: there is nothing to trace in an import, the driver's answer or a table.
# This is all that the decorator torch.compiler.assume_constant_result does, but that imports the compiler.
for _constant in (flash_attn_4_package, _constant_capability, timings.saved_by_fa4):
    setattr(_constant, "_dynamo_marked_constant", True)  # noqa: B010


@functools.cache
def _flash_attn_4_package() -> str | None:
    try:
        installed = f"{flash_attn_4.PACKAGE} {version(flash_attn_4.PACKAGE)}"
    except PackageNotFoundError:
        return f"{flash_attn_4.PACKAGE} is not installed"
    # It is a beta, and what is called is inside of it.
    for name, wanted in flash_attn_4.FUNCTIONS.items():
        try:
            known = inspect.signature(flash_attn_4.function(name)).parameters
        except Exception as problem:  # whatever the import of a package raises, a missing library say
            return f"{installed} cannot be called: {first_line(problem)}"
        if missing := sorted(wanted - set(known)):
            return f"{installed} does not fit: its {name} has no argument {missing[0]}"
    return None


def sdpa(f: Facts) -> str | None:
    if (reason := transforms(f)) is not None:
        return reason
    is_on_cpu = f.machine.device == "cpu"
    if f.logit not in (type(None), LogN) and not is_on_cpu:
        return f"a stock kernel has plain scores, or those of LogN, not the {f.logit.__name__} logit"
    # The operator for the CPU adds a float mask to the scores, and matmuls in torch have factors for them too.
    if (reason := plain_scores(f._replace(has_bias=False) if is_on_cpu else f)) is not None:
        return reason
    if f.has_bias_grad:
        return "a stock kernel gives no gradient of a bias"
    for name in f.restrictions:
        if name != "window" and not is_on_cpu:
            return f"a stock kernel has no mask.{name}"
    return beta(f) or stock(f)


def stock(f: Facts) -> str | None:
    """What PyTorch's fused attention needs."""
    if f.sizes.is_empty:
        return "a stock kernel needs at least one query and one key"
    if f.causal and f.sizes.is_overlong:
        return "a stock kernel cannot have causal queries without any key (more queries than keys)"
    device, wide = f.machine.device, max(f.head_dim, f.value_dim)
    if device == "cpu":
        return None
    if device != "cuda":
        return f"there is no stock kernel with log-sum-exp on {device}"
    if f.dtype not in (torch.bfloat16, torch.float16):
        return f"the CUDA operators take bfloat16 or float16, not {f.dtype}"
    if wide % 8 or wide > 256:
        return f"the CUDA operators need a head_dim divisible by 8 and at most 256, not {wide}"
    return None if cudnn(f) is None else flash_operators(f)


def sdpa_unasked(f: Facts) -> str | None:
    """Why "auto" leaves the stock kernels alone although they may be able to run the call, or None."""
    if f.value_dim != f.head_dim and f.machine.device == "cuda":
        return "since its operators have not been run on a GPU with values of another width than keys"
    return None


def cudnn(f: Facts) -> str | None:
    """What cuDNN's operator needs, or where it is not the one that is taken; other calls go to the flash operator."""
    if f.machine.capability is None or f.machine.capability < (9, 0):
        return "cuDNN is taken from compute capability 9.0 on"
    if "window" in f.restrictions:
        return "cuDNN is taken for calls without a window"
    is_timed = (f.head_dim, f.value_dim) == (256, 256) and f.machine.capability == _HOPPER
    if max(f.head_dim, f.value_dim) > 128 and (f.head_dim, f.value_dim) != _DEEPSEEK and not is_timed:
        return f"cuDNN is taken for head dims up to 128, and 256 on Hopper, not {_widths(f)}"
    if f.head_dim % 8 or f.value_dim % 8:
        return f"cuDNN is taken for head dims divisible by 8, not {_widths(f)}"
    if f.is_deterministic:
        return "cuDNN's backward adds up in no fixed order, and deterministic algorithms were asked for"
    if f.sizes.is_single:
        return "cuDNN is taken for more than one query"
    return None


def flash_operators(f: Facts) -> str | None:
    """What the flash operators on CUDA need: to be those that were tested."""
    if f.flash is not None:
        return f"torch's flash operators are those of {f.flash} now (activate_flash_attention_impl), not tested here"
    return None


def flash(f: Facts) -> str | None:
    """What engine "triton" needs, whose kernels are this package's flash kernels."""
    if (reason := transforms(f) or plain_scores(f, FLASH_CURVES)) is not None:
        return reason
    # LogN has moved into q by the time the kernels run.
    if (reason := score_statistics(f._replace(logit=type(None)) if f.logit is LogN else f)) is not None:
        return reason
    if not f.causal:
        return "its attention kernels are causal"
    return beta(f)


def score_statistics(f: Facts) -> str | None:
    """What the kernel needs that passes over the scores alone; it is less choosy than attention."""
    if (reason := epilogue(f) or plain_scores(f, FLASH_CURVES) or simple_mask(f)) is not None:
        return reason
    if "lengths" in f.restrictions:
        return "its kernels have no mask.lengths"
    if f.logit is LogN:
        return "LogN scales q, which would be rounded again"
    if f.logit not in FLASH_LOGITS:
        return f"its kernels do not know the {f.logit.__name__} logit"
    if not f.causal and f.logit is not type(None):
        return "its distance logits are causal"
    if f.head_dim < 16:
        return f"its kernels need a head_dim of at least 16, not {f.head_dim}"
    if f.sizes.is_empty:
        return "its kernels need at least one query and one key"
    return None


def flex(f: Facts) -> str | None:
    if (reason := transforms(f)) is not None:
        return reason
    if f.machine.device not in ("cpu", "cuda"):
        return f"FlexAttention does not run on {f.machine.device}"
    if f.sizes.is_empty:
        return "FlexAttention needs at least one query and one key"
    if f.machine.device == "cpu":
        return "FlexAttention has no backward on the CPU" if f.has_grad else None
    if f.dtype == torch.float64:
        return "FlexAttention has no float64 on CUDA"
    if min(f.head_dim, f.value_dim) < 16 or max(f.head_dim, f.value_dim) > 256:
        return f"FlexAttention is used for head dims from 16 to 256 on CUDA, not {_widths(f)}"
    return None


def flex_unasked(f: Facts) -> str | None:
    """Why "auto" leaves FlexAttention alone although it may be able to run the call, or None."""
    return "since it builds the dense matrix on the CPU" if f.machine.device == "cpu" else None


def nothing(f: Facts) -> str | None:
    """What the reference needs."""
    return None


def beta(f: Facts) -> str | None:
    """What the epilogue needs to sum the visible values: in torch it sums prefixes, and on the CPU pieces of masks."""
    if not f.has_beta:
        return None
    if epilogue(f) is None:
        return visible_sums(f)
    if "allowed" in f.restrictions:
        return "the epilogue cannot sum the values that mask.allowed leaves visible"
    if f.restrictions and f.machine.device != "cpu":
        return f"the epilogue cannot sum the values that mask.{f.restrictions[0]} leaves visible"
    return None


def visible_sums(f: Facts) -> str | None:
    """What the kernels need that sum the visible values."""
    return "its sums of visible values have no mask.lengths" if "lengths" in f.restrictions else None


def epilogue(f: Facts) -> str | None:
    """What the fused epilogue needs."""
    if (reason := triton(f)) is not None:
        return reason
    if f.sizes.is_crowded:
        return f"the fused epilogue takes at most {MOST_HEADS} heads of all sequences together"
    return None


def triton(f: Facts) -> str | None:
    """What any kernel of Triton needs."""
    if f.machine.triton is not None:
        return f.machine.triton
    if f.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"Triton kernels take bfloat16, float16 or float32, not {f.dtype}"
    if f.head_dim > 256:
        return f"Triton kernels take head_dim up to 256, not {f.head_dim}"
    if f.value_dim > 256:
        return f"Triton kernels take values of up to 256 channels, not {f.value_dim}"
    return None


def sm90_forward(f: Facts, s: Sizes) -> str | None:
    """What the sm90 forward needs, or why it would gain nothing."""
    if (reason := sm90(f, s)) is not None:
        return reason
    if f.has_alpha != f.has_beta:
        return "the forward in one kernel has alpha only together with beta"
    if not (f.has_alpha or f.has_sink or f.has_gate):
        return "there is nothing to do after the attention"
    return sm90_gate(f, s)


def sm90_beside_fa4(f: Facts, s: Sizes) -> str | None:
    """What the sm90 forward needs to be the one of engine "fa4": it was timed, in training, and took less time."""
    if (reason := sm90_forward(f, s)) is not None:
        return reason
    # A compiled forward does not know that its backward will come.
    if fa4_unasked(f._replace(has_grad=True)) is not None:
        return "it has not been timed with the backward of FlashAttention-4"
    found = timings.fastest(timed(f), True)
    if found is None or found[0][0] != "sm90":
        return "the forward of FlashAttention-4 took less time"
    return None


def sm90_backward(f: Facts, s: Sizes) -> str | None:
    """What the sm90 backward needs, or where it would be slower than the stock one."""
    if f.is_deterministic:
        return "the backward for Hopper adds up dq in no fixed order, and deterministic algorithms were asked for"
    if (reason := sm90(f, s) or sm90_gate(f, s)) is not None:
        return reason
    if not s.is_timed:
        first, last = SM90_LENGTHS[0], SM90_LENGTHS[-1]
        return f"the backward for Hopper is for {first} to {last} tokens, where it is faster than cuDNN's"
    return None


def sm90(f: Facts, s: Sizes) -> str | None:
    """What any sm90 kernel needs, one for Hopper, forward or backward."""
    if (reason := epilogue(f)) is not None:
        return reason
    if f.machine.capability != _HOPPER:
        return "kernels for Hopper are for GPUs of compute capability 9.0"
    if f.dtype == torch.float32 or f.head_dim not in SM90_STAGES:
        return f"kernels for Hopper take 16-bit inputs with a head_dim of {' or '.join(map(str, SM90_STAGES))}"
    if f.logit not in (type(None), LogN):
        return f"kernels for Hopper have plain scores, or those of LogN, not the {f.logit.__name__} logit"
    if (reason := plain_scores(f) or same_widths(f)) is not None:
        return reason
    if not f.causal:
        return "kernels for Hopper are causal"
    if f.restrictions:
        return f"kernels for Hopper have no mask.{f.restrictions[0]}"
    if not s.is_square:
        return "kernels for Hopper take as many keys as queries, and at least one"
    if not s.has_rows:
        return "kernels for Hopper read rows that begin at multiples of 16 bytes"
    return None


def sm90_gate(f: Facts, s: Sizes) -> str | None:
    """What the sm90 kernels, those for Hopper, need of the call's gate."""
    if s.is_elementwise and s.gate_dtype != f.dtype:
        return f"kernels for Hopper take an elementwise gate in the type of q, not {s.gate_dtype}"
    if not s.has_gate_rows:
        return "kernels for Hopper read rows of a gate that begin at multiples of 16 bytes"
    return None
