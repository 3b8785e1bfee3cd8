"""``affine-attn variants --check``: what runs each variant on this machine, how exact it is, and what it costs."""

from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from affine_attn.api import attention
from affine_attn.bench.accuracy import Shape, deviations, random_inputs
from affine_attn.bench.timing import side_by_side
from affine_attn.core.call import checked_call
from affine_attn.core.variants import VARIANTS
from affine_attn.engines.needs import facts_of
from affine_attn.engines.plan import ENGINES, choose


def check_variants(console: Console) -> None:
    """Print a table of all variants; one outside the tolerance rule ends the program."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    check = Shape(batch=1, heads=4, kv_heads=2, tq=257, tk=257, head_dim=64)
    timed = Shape(*((4, 16, 4, 2048, 2048, 64) if device.type == "cuda" else (1, 8, 2, 1024, 1024, 64)))
    table = Table(title=f"the attention family on {_device_name(device)}, {str(dtype).removeprefix('torch.')}, causal")
    for column in ("variant", "engine", "error y", "worst gradient error", "time / plain"):
        table.add_column(column)
    refusals: dict[str, list[str]] = {}
    for name in track(VARIANTS, description="checking and timing", console=console, transient=True):
        spec = VARIANTS[name].spec
        inputs = random_inputs(spec, check, dtype, device)
        errors = deviations("auto", inputs)
        worst = max(errors[1:], key=lambda deviation: deviation.error)
        if wrong := [deviation.name for deviation in errors if not deviation.within]:
            raise SystemExit(f"{name}: {', '.join(wrong)} outside the tolerance rule on this machine")
        engine, reasons = _engine_and_reasons(inputs)
        for reason in reasons:
            refusals.setdefault(reason, []).append(name)
        ratio = _time_over_plain(random_inputs(spec, timed, dtype, device), device)
        gradient = f"{worst.error:.1e} ({worst.name})"
        table.add_row(name, engine, f"{errors[0].error:.1e}", gradient, f"{ratio:.2f}")
    console.print(table)
    console.print("Why an engine does not run a variant (the others could, and are slower):")
    for reason, names in refusals.items():
        console.print(f"  {reason}: {'all' if len(names) == len(VARIANTS) else ', '.join(names)}")
    console.print(
        f"Errors: largest, against the float64 reference, relative to 1 + the largest exact entry, at {check}.\n"
        f"Time: forward + backward over F.scaled_dot_product_attention at {timed}, median of interleaved rounds."
    )


def _leaves(inputs: dict[str, Any]) -> dict[str, Any]:
    """Make the inputs leaves, as in training: an engine without a backward then refuses."""
    return {name: x.requires_grad_() if isinstance(x, Tensor) else x for name, x in inputs.items()}


def _engine_and_reasons(inputs: dict[str, Any]) -> tuple[str, list[str]]:
    facts = facts_of(checked_call(**_leaves(inputs)))
    reasons = {name: engine.why_not(facts) for name, engine in ENGINES.items()}
    return choose(facts), [f"{name} ({reason})" for name, reason in reasons.items() if reason is not None]


def _time_over_plain(inputs: dict[str, Any], device: torch.device) -> float:
    leaves = _leaves(inputs)
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    dy = torch.randn_like(q)
    functions = {
        "plain": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).backward(dy),
        "variant": lambda: attention(**leaves).backward(dy),
    }
    return side_by_side(functions, "plain", device, rounds=3)["variant"].ratio


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({torch.get_num_threads()} threads)"
