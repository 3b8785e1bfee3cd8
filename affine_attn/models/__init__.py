"""Hugging Face models with any attention of the family. Importing this registers them with the Auto classes."""

from affine_attn.errors import MissingPackage

try:
    from transformers import AutoConfig
except ModuleNotFoundError as error:
    raise MissingPackage("affine_attn.models needs transformers: pip install 'affine-attn[models]'") from error

import affine_attn.models.tensor_parallel  # noqa: F401 (registers the styles of the tensor-parallel plan)
from affine_attn.models.callback import TrackAlpha
from affine_attn.models.configuration import AffineAttnConfig
from affine_attn.models.convert import convert, export, logits_moved, stage_keys
from affine_attn.models.modeling import (
    AffineAttnForCausalLM,
    AffineAttnForQuestionAnswering,
    AffineAttnForSequenceClassification,
    AffineAttnForTokenClassification,
    AffineAttnModel,
    AffineAttnPreTrainedModel,
)
from affine_attn.models.presets import PRESETS, preset
from affine_attn.models.remote_code import save_with_code
from affine_attn.models.streaming import StreamingCache

AutoConfig.register(AffineAttnConfig.model_type, AffineAttnConfig)

__all__ = [
    "PRESETS",
    "AffineAttnConfig",
    "AffineAttnForCausalLM",
    "AffineAttnForQuestionAnswering",
    "AffineAttnForSequenceClassification",
    "AffineAttnForTokenClassification",
    "AffineAttnModel",
    "AffineAttnPreTrainedModel",
    "StreamingCache",
    "TrackAlpha",
    "convert",
    "export",
    "logits_moved",
    "preset",
    "save_with_code",
    "stage_keys",
]
