"""What a training step is measured by, for ``metrics.jsonl`` (``runs.series`` has its columns)."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import TrainerCallback, TrainingArguments

from affine_attn.distill.estimate import PEAKS
from affine_attn.runs.layout import RunFolder

_NAMES = {"learning_rate": "lr"}


class Metrics(TrainerCallback):
    """Measures every step and writes what Trainer logs. A resumed run goes on after the lines of its checkpoint."""

    def __init__(self, folder: RunFolder, args: TrainingArguments, step_tokens: int, flops_per_token: int):
        self.file, self.device = folder.metrics, args.device
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
