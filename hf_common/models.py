"""Every decoder of transformers, eager against ``attn_implementation="affine_attn"``; see ``make test-hf-models``.

The architectures and their small configurations are those of the testers in a checkout of transformers (SOURCE), whose
``tests`` package and library are imported here; nothing of it is kept. Logits and all gradients with padding on the
left and on the right, packed positions, a cache that is filled in chunks, and greedy tokens: docs/hf-models.md.
"""

import importlib
import pkgutil
import signal
import sys
import unittest
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AttentionInterface

from affine_attn.errors import UserError
from affine_attn.models.attn_implementation import NAME, transformers_attention
from tests import models as foreign

PAGE = Path(__file__).parents[1] / "docs" / "hf-models.md"
SECONDS = 90  # of one architecture, at most
GENERATED = 5
# Against the largest number of a tensor.
TOLERANCE = 2e-4


# What differs for a reason of its own.
KNOWN = {("blt", "padding left"): "its patches mix in rows of padding, which see nothing: 0 here, a mean of all there"}

calls = 0


def counted(*given: Any, **named: Any) -> Any:
    """Ours, so that a model which has an attention of its own is not taken for one that runs."""
    global calls
    calls += 1
    return transformers_attention(*given, **named)


AttentionInterface.register(NAME, counted)


def testers() -> Iterator[tuple[str, type[unittest.TestCase]]]:
    """Model type and test class of every model whose tests can be imported here."""
    for folder in pkgutil.iter_modules(foreign.__path__):
        try:
            module = importlib.import_module(f"{foreign.__name__}.{folder.name}.test_modeling_{folder.name}")
        except (ImportError, RuntimeError, AttributeError):
            continue
        for found in vars(module).values():
            own = (
                isinstance(found, type) and issubclass(found, unittest.TestCase) and found.__module__ == module.__name__
            )
            if own and (hasattr(found, "all_model_classes") or hasattr(found, "model_tester_class")):
                yield folder.name, found
                break


def decoder(test: Any) -> type | None:
    """The causal model of a test class, after its setUp."""
    return next(
        (kind for kind in test.all_model_classes if kind.__name__.endswith(("ForCausalLM", "LMHeadModel"))), None
    )


def pair(kind: type, config: Any) -> list[Any]:
    """The same weights on the eager path and on ours, with sinks that matter."""
    made = []
    for implementation in ("eager", NAME):
        torch.manual_seed(0)
        model = kind._from_config(deepcopy(config), attn_implementation=implementation).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "sink" in name:
                    parameter.copy_(torch.linspace(-4, 4, parameter.numel()).view_as(parameter))
        made.append(model)
    return made


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
    try:
        eager, ours = pair(kind, config)
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
    return " ".join(str(error).split())[:200].replace("|", "/")


class TooLong(Exception):
    pass


def _alarm(*_: Any) -> None:
    raise TooLong


def rows(only: list[str]) -> Iterator[tuple[str, str, str]]:
    signal.signal(signal.SIGALRM, _alarm)
    for name, found in testers():
        if only and name not in only:
            continue
        signal.alarm(SECONDS)
        try:
            test: Any = found()
            test.setUp()
            kind = decoder(test)
            if kind is None:
                continue
            config, inputs = test.model_tester.prepare_config_and_inputs_for_common()
            tokens = inputs["input_ids"]
            if tokens.ndim != 2 or tokens.shape[1] < 5:
                continue
            yield name, *verdict(name, kind, config, tokens[:2, :12])
        except TooLong:
            yield name, "not compared", f"took more than {SECONDS} s"
        except (KeyError, TypeError, AttributeError, unittest.SkipTest, ImportError) as error:
            yield name, "not compared", f"its tester: {type(error).__name__}: {first_sentence(error)}"
        finally:
            signal.alarm(0)


def page(found: list[tuple[str, str, str]], version: str) -> str:
    counts = {state: sum(row[1] == state for row in found) for state in sorted({row[1] for row in found})}
    summary = ", ".join(f"{count} {state}" for state, count in counts.items())
    torch_version = torch.__version__.split("+")[0]
    lines = [
        "# Which models of transformers run",
        "",
        "Decoders of transformers with the small configuration of their own tests, random sinks where they have some.",
        'The eager path is compared with `attn_implementation="affine_attn"`: logits and all gradients with padding',
        "on the left and on the right, packed positions, a cache filled in two chunks, and greedy tokens.",
        "",
        f"Written by `make test-hf-models`: transformers {version}, torch {torch_version}. {summary}.",
        "",
        "| model | | what was compared, or why not |",
        "|---|---|---|",
        *(f"| {name} | {state} | {why} |" for name, state, why in found),
    ]
    return "\n".join(lines) + "\n"


def main(only: list[str]) -> int:
    """Compare all models and write the page, or compare the named ones alone."""
    found = []
    for row in rows(only):
        print(*row, sep="\t", flush=True)
        found.append(row)
    if not only:
        PAGE.write_text(page(found, transformers.__version__))
    return int(any(state == "FAILS" for _, state, _ in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
