"""Every decoder of transformers, eager against ``attn_implementation="affine_attn"``; see ``make test-hf-models``.

The decoders are those of the installed transformers; their small configurations come from the testers in a checkout of
transformers (SOURCE), whose ``tests`` package is imported here; nothing of it is kept. Logits and all gradients with
padding on the left and on the right, packed positions, a cache that is filled in chunks, and greedy tokens:
docs/hf-models.md.
"""

import importlib
import json
import resource
import signal
import sys
import types
import unittest
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AttentionInterface
from transformers.distributed import tensor_parallel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from affine_attn.errors import UserError
from affine_attn.models.attn_implementation import NAME, transformers_attention

Row = tuple[str, str, str]  # model type, state, reason

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "hf-models.md"
RESULTS = ROOT / "build" / "hf-models"
SECONDS = 90  # of one architecture, at most
MEMORY = 8 * 2**30  # of all
GENERATED = 5
# Against the largest number of a tensor.
TOLERANCE = 2e-4


# What differs for a reason of its own.
BLT = "its patches mix in rows of padding, which see nothing: 0 here, a mean of all there"
KNOWN = {("blt", "padding left"): BLT, ("blt", "greedy"): BLT}
OTHER_INPUTS = dict.fromkeys(
    ("musicgen", "musicgen_melody"), "its input is a row of sound tokens for each codebook, not text"
)
# For decoders that the checkout has no tester of.
SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,  # so that hybrids have one with attention
    "num_attention_heads": 4,
    "head_dim": 8,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size_per_layer_input": 99,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# What the checkout's tests import and its testers do not use: it comes with functions of another version, or a package.
for _unused in ("test_fsdp_mixin", "test_tensor_parallel_mixin"):
    _module = types.ModuleType(f"tests.{_unused}")
    _module.__getattr__ = lambda name: type(name, (), {})
    sys.modules[_module.__name__] = _module
sys.modules["timeout_decorator"] = mock.MagicMock()
if not hasattr(tensor_parallel, "_get_parameter_tp_plan"):
    tensor_parallel._get_parameter_tp_plan = None

calls = 0


def counted(*given: Any, **named: Any) -> Any:
    """Ours, so that a model which has an attention of its own is not taken for one that runs."""
    global calls
    calls += 1
    return transformers_attention(*given, **named)


AttentionInterface.register(NAME, counted)


def decoders() -> Iterator[tuple[str, type]]:
    """Model type and class of every decoder of this version of transformers, each class once."""
    seen = set()
    for name, kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if kind not in seen:
            seen.add(kind)
            yield name, getattr(transformers, kind)


def tester(kind: type) -> Any:
    """The tester of the test class that has this decoder, None where the checkout has none that can be imported."""
    place = kind.__module__.removeprefix("transformers.models.").replace(".modeling_", ".test_modeling_")
    try:
        module = importlib.import_module(f"tests.models.{place}")
    except (ImportError, AttributeError):
        return None
    for found in vars(module).values():
        own = isinstance(found, type) and issubclass(found, unittest.TestCase) and found.__module__ == module.__name__
        if own and (hasattr(found, "all_model_classes") or hasattr(found, "model_tester_class")):
            test: Any = found()
            with suppress(unittest.SkipTest):
                test.setUp()
            if kind in (test.all_model_classes or ()):
                return test.model_tester
    return None


def small(kind: Any) -> tuple[Any, torch.Tensor]:
    """Configuration and tokens of a decoder: its own tester's, or its defaults made small."""
    if found := tester(kind):
        config, inputs = found.prepare_config_and_inputs_for_common()
        return config, inputs["input_ids"]
    try:
        config = kind.config_class(**SMALL, num_key_value_heads=2)
    except StrictDataclassClassValidationError:  # heads that share no keys, it may be
        config = kind.config_class(**SMALL, num_key_value_heads=4)
    torch.manual_seed(0)
    return config, torch.randint(5, SMALL["vocab_size"], (2, 12))


def made(kind: Any, config: Any, implementation: str) -> Any:
    """A model whose weights depend on the configuration alone, with sinks that matter."""
    torch.manual_seed(0)
    model = kind._from_config(deepcopy(config), attn_implementation=implementation).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sink" in name:
                parameter.copy_(torch.linspace(-4, 4, parameter.numel()).view_as(parameter))
    return model


def padded(tokens: torch.Tensor, left: bool) -> dict[str, torch.Tensor]:
    mask = torch.ones_like(tokens)
    (mask[0, :3] if left else mask[0, -3:]).zero_()
    return {"input_ids": tokens, "attention_mask": mask}


def learned(model: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Logits of real tokens and the gradients of all parameters."""
    model.zero_grad()
    logits = model(**given, use_cache=False).logits[given["attention_mask"].bool()]
    logits.square().mean().backward()
    return {"logits": logits.detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def packed(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    places = torch.cat([torch.arange(4), torch.arange(tokens.shape[1] - 4)])[None]
    return {"logits": model(tokens[:1], position_ids=places, use_cache=False).logits.detach()}


def chunked(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    first = model(tokens[:, :3], use_cache=True)
    rest = model(tokens[:, 3:], past_key_values=first.past_key_values, use_cache=True)
    return {"logits": torch.cat([first.logits, rest.logits], 1).detach()}


def greedy(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    given = padded(tokens, left=True)
    return {"tokens": model.generate(**given, max_new_tokens=GENERATED, do_sample=False).float()}


CHECKS = {
    "padding left": lambda model, tokens: learned(model, padded(tokens, left=True)),
    "padding right": lambda model, tokens: learned(model, padded(tokens, left=False)),
    "packed": packed,
    "chunks": chunked,
    "greedy": greedy,
}


def verdict(model: str, kind: type, config: Any, tokens: torch.Tensor) -> tuple[str, str]:
    """Whether it runs, and what was compared, or why not."""
    eager = made(kind, config, "eager")
    try:
        ours = made(kind, config, NAME)
    except KeyError as error:
        return "refused", f"by transformers: its attention classes are named by implementation, {error} is none"
    except ValueError as error:
        return "refused", f"by transformers: {first_sentence(error)}"
    done, before = [], calls
    for name, check in CHECKS.items():
        if (model, name) in KNOWN:
            done.append(f"not {name} ({KNOWN[model, name]})")
            continue
        try:
            expected = check(eager, tokens)
        except Exception:  # a model of transformers that cannot do this at all
            continue
        try:
            found = check(ours, tokens)
        except UserError as error:
            return "refused", f"{name}: {first_sentence(error)}"
        except Exception as error:  # what the table is there to show
            return "FAILS", f"{name}: {type(error).__name__}: {first_sentence(error)}"
        for key, value in expected.items():
            apart = (found[key] - value).abs().max().item() if found[key].shape == value.shape else float("inf")
            if not apart <= TOLERANCE * max(1.0, value.abs().max().item()):
                return "FAILS", f"{name}: {key} differs by {apart:.1e}"
        done.append(name)
    if done and calls == before:
        return "not asked", "it calls no attention but its own, whatever the implementation"
    return ("runs", ", ".join(done)) if done else ("not compared", "its eager path takes none of these inputs")


def first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).split(". ")[0].replace("|", "/")


class TooLong(Exception):
    pass


def _alarm(*_: Any) -> None:
    raise TooLong


def rows(only: list[str]) -> Iterator[Row]:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, _alarm)
    for name, kind in decoders():
        if only and name not in only:
            continue
        signal.alarm(SECONDS)
        try:
            if name in OTHER_INPUTS:
                yield name, "not compared", OTHER_INPUTS[name]
                continue
            config, tokens = small(kind)
            yield name, *verdict(name, kind, config, tokens[:2, :12])
        except TooLong:
            yield name, "not compared", f"took more than {SECONDS} s"
        except ImportError as error:
            yield name, "not compared", first_sentence(error)
        except Exception as error:  # neither its tester nor its defaults make a small model
            print(name, type(error).__name__, error, file=sys.stderr)
            yield name, "not compared", "no tester of it can be imported, and its defaults cannot be made small"
        finally:
            signal.alarm(0)


def page(versions: dict[str, list[Row]]) -> str:
    """The table of all versions; a reason that they do not share says whose it is."""
    lines = [
        "# Which models of transformers run",
        "",
        "Decoders of transformers with the small configuration of their own tests, random sinks where they have some.",
        'The eager path is compared with `attn_implementation="affine_attn"`: logits and all gradients with padding',
        "on the left and on the right, packed positions, a cache filled in two chunks, and greedy tokens.",
        "*Not asked* are models without attention, or with one that no implementation reaches.",
        "",
        f"Written by `make test-hf-models` with torch {torch.__version__.split('+')[0]}:",
        "",
    ]
    for version, found in versions.items():
        counts = {state: sum(row[1] == state for row in found) for state in sorted({row[1] for row in found})}
        lines.append(f"- transformers {version}: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
    lines += [
        "",
        f"| model | {' | '.join(versions)} | what was compared, or why not |",
        f"|---|{'---|' * len(versions)}---|",
    ]
    by_name = {version: {name: (state, why) for name, state, why in found} for version, found in versions.items()}
    for name in sorted(set().union(*by_name.values())):
        there = {version: found[name] for version, found in by_name.items() if name in found}
        whys = {why for _, why in there.values()}
        why = whys.pop() if len(whys) == 1 else "; ".join(f"{version}: {why}" for version, (_, why) in there.items())
        states = " | ".join(there[version][0] if version in there else "" for version in versions)
        lines.append(f"| {name} | {states} | {why} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Compare all models or the named ones; `--page` writes the page from what runs of all models left."""
    if arguments == ["--page"]:
        files = sorted(RESULTS.glob("*.json"), key=lambda file: tuple(map(int, file.stem.split("."))))
        PAGE.write_text(page({file.stem: json.loads(file.read_text()) for file in files}))
        return 0
    found = []
    for row in rows(arguments):
        print(*row, sep="\t", flush=True)
        found.append(row)
    if not arguments:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{transformers.__version__}.json").write_text(json.dumps(found))
    return int(any(state == "FAILS" for _, state, _ in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
