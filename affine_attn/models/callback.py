"""``track_alpha`` where a trainer of transformers, or of trl, makes the optimizer."""

from typing import Any

from transformers import TrainerCallback

from affine_attn.nn.alpha import track_alpha


class TrackAlpha(TrainerCallback):
    """``Trainer(..., callbacks=[TrackAlpha()])``: update alpha_ma after every optimizer step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        track_alpha(kwargs["model"], kwargs["optimizer"])
