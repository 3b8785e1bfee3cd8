"""``metrics.jsonl``: what is measured at every step, one JSON object per line.

==================== ==================================================================================================
step                 optimizer steps done, from 1
loss                 what is minimised; kd, hard and entropy are its parts (``losses.Loss``); kd needs a teacher
grad_norm            2-norm of all gradients before they are clipped
lr                   learning rate of this step
tokens_per_second    of all devices, since the line before; validation and statistics do not count
mfu                  tokens_per_second by the FLOPs of a token (student's training, teacher's forward), over the peak
                     of the devices; only in bfloat16 and on a device whose peak is known (``estimate.PEAKS``)
peak_memory_bytes    most that torch has held on the first process's GPU so far
max_rss_bytes        without a GPU instead: most memory the first process has held so far
valid_...            after a step that was followed by validation, see ``validation``
==================== ==================================================================================================
"""

import json
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

from affine_attn.distill.estimate import PEAKS
from affine_attn.errors import UserError
from affine_attn.runs.files import errors_naming, write_text

METRICS = "metrics.jsonl"
_NAMES = {"learning_rate": "lr"}


class JsonLines:
    """A file of JSON objects, one per line and each with its step."""

    def __init__(self, path: Path):
        self.path = path

    def rows(self) -> list[dict[str, Any]]:
        written = self.path.read_bytes() if self.path.exists() else b""
        # A line without an end was cut when its process was killed.
        lines = written[: written.rfind(b"\n") + 1].splitlines()
        return [self._row(number, line) for number, line in enumerate(lines, start=1)]

    def _row(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
            row["step"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(f"{self.path}, line {number}, is damaged: remove it") from error
        return row

    def cut(self, step: int) -> None:
        """Drop what is later than the checkpoint of this step, which is about to be done again. At step 0 there is no
        checkpoint, and nothing stays."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [json.dumps(row) + "\n" for row in self.rows() if 0 < step >= row["step"]]
        write_text(self.path, "".join(kept))

    def append(self, row: dict[str, Any]) -> None:
        with errors_naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


class Metrics(TrainerCallback):
    """Measures every step and writes what Trainer logs. A resumed run goes on after the lines of its checkpoint."""

    def __init__(self, folder: Path, args: TrainingArguments, step_tokens: int, flops_per_token: int):
        self.file, self.device = JsonLines(folder / METRICS), args.device
        self.step_tokens, self.flops_per_token = step_tokens, flops_per_token
        peak = PEAKS.get(torch.cuda.get_device_name(args.device)) if args.device.type == "cuda" and args.bf16 else None
        self.peak = None if peak is None else peak * args.world_size
        # For the row of the step that has just been done.
        self.validation: dict[str, float] = {}
        self.step, self.seconds = 0, 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is no training and does not slow it down in the metrics."""
        self._synchronize()
        start = time.perf_counter()
        yield
        self._synchronize()
        self.seconds += time.perf_counter() - start

    def measured(self, step: int) -> dict[str, float]:
        """What Trainer does not measure, for the steps since the last call."""
        now = time.perf_counter()
        speed = (step - self.step) * self.step_tokens / (now - self.seconds)
        self.step, self.seconds = step, now
        row = {"tokens_per_second": round(speed, 1)}
        if self.peak is not None:
            row["mfu"] = round(speed * self.flops_per_token / self.peak, 4)
        if self.device.type == "cuda":
            row["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.device)
        else:
            # Linux counts in KiB.
            unit = 1 if sys.platform == "darwin" else 1024
            row["max_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        validation, self.validation = self.validation, {}
        return row | validation

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.step, self.seconds = state.global_step, time.perf_counter()
        if state.is_world_process_zero:
            self.file.cut(state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if not state.is_world_process_zero or logs is None or "loss" not in logs:
            return
        row = {"step": state.global_step, **{_NAMES.get(key, key): value for key, value in logs.items()}}
        row.pop("epoch", None)
        self.file.append(row)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
