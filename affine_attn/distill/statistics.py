"""How the student attends as it learns, for ``statistics.jsonl`` (``runs.series`` says what a line holds)."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from affine_attn.distill.losses import LossSpec
from affine_attn.distill.metrics import Metrics
from affine_attn.models.collect import LayerStatistics, collect_statistics
from affine_attn.runs.layout import RunFolder

SEQUENCES = 4
_PER_HEAD = ("entropy", "first_token", "row_sum", "sink_mass", "mean_logit", "max_logit")
_OF_ALPHA = ("alpha", "alpha_saturated", "alpha_ma")


class Statistics(TrainerCallback):
    """Writes the file, without a trace in training: the losses of a run are the same with and without it.

    ``sequences`` are items of a dataset. They are looked at one by one, so memory does not depend on their number; all
    ranks do it, because under FSDP a forward takes all of them.
    """

    def __init__(self, folder: RunFolder, every: int, sequences: Sequence[dict[str, Tensor]], metrics: Metrics):
        self.file, self.every, self.metrics = folder.statistics, every, metrics
        self.sequences = sequences

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        if state.is_world_process_zero:
            self.file.cut(state.global_step)
        if state.global_step == 0:
            self._write(args, state, model)

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        if state.global_step % self.every == 0:
            self._write(args, state, model)

    def _write(self, args: Any, state: Any, model: Any) -> None:
        def forward(batch: dict[str, Tensor]) -> None:
            # The forward of training, at the door where FSDP and autocast wait.
            context = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
            loss = {"labels": batch["shift_labels"], "target": None, "spec": LossSpec()}
            model(**context, **loss, shared=None, tokens=None)

        with self.metrics.paused():
            batches = ({name: t[None].to(args.device) for name, t in one.items()} for one in self.sequences)
            layers = collect_statistics(model, batches, forward=forward)
            if state.is_world_process_zero:
                self.file.append({"step": state.global_step, **columns(layers)})


def columns(layers: list[LayerStatistics]) -> dict[str, list]:
    """A line of the file, without its step."""
    names = [*_PER_HEAD, *(_OF_ALPHA if any(layer.alpha is not None for layer in layers) else ())]
    values = {name: [getattr(layer, name) for layer in layers] for name in names}
    return {name: [None if v is None else v.tolist() for v in column] for name, column in values.items()}
