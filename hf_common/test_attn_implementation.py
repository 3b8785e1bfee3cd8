"""transformers' own suites of models with sinks, soft caps or narrow values, by ``attn_implementation="affine_attn"``.

As in test_common.py they come from a checkout (SOURCE). A model that is asked for no implementation takes ours. What
does not apply is named with its reason below, and has to fail. Integration tests want checkpoints of a hub: left out.
"""

from typing import Any
from unittest import mock

from tests.models.gemma2 import test_modeling_gemma2
from tests.models.gpt_oss import test_modeling_gpt_oss
from tests.models.granite_swa import test_modeling_granite_swa
from tests.models.mimo_v2_flash import test_modeling_mimo_v2_flash
from transformers import PreTrainedModel

from affine_attn.models.attn_implementation import NAME
from hf_common.expected import ONNX, failing

STATIC = "transformers' exporter of static caches computes with the mask as a tensor"
NOT_APPLICABLE = ONNX | {
    "test_torch_export_generate_dynamic_static_cache": STATIC,
    "test_torch_export_generate_static_static_cache": STATIC,
}
# Models with sinks have no sdpa to look for.
OF_GEMMA2 = {"test_sdpa_can_dispatch_non_composite_models": "it looks for 'sdpa' in a model that was asked for nothing"}
asked = PreTrainedModel.get_correct_attn_implementation


def ours_by_default(model: Any, requested: str | None, is_init_check: bool = False) -> str:
    return asked(model, NAME if requested is None else requested, is_init_check)


def with_ours(suite: Any, **more: str) -> type:
    """The suite, with our implementation as the default. ``more``: what does not apply to this model alone."""

    class Suite(suite):
        def setUp(self):
            super().setUp()
            default = mock.patch.object(PreTrainedModel, "get_correct_attn_implementation", ours_by_default)
            default.start()
            self.addCleanup(default.stop)

    marked = {name: failing(suite, name, reason) for name, reason in (NOT_APPLICABLE | more).items()}
    return type(suite.__name__, (Suite,), marked)


Gemma2Test = with_ours(test_modeling_gemma2.Gemma2ModelTest, **OF_GEMMA2)
GptOssTest = with_ours(test_modeling_gpt_oss.GptOssModelTest)
GraniteSWATest = with_ours(test_modeling_granite_swa.GraniteSWAModelTest)
MiMoV2FlashTest = with_ours(test_modeling_mimo_v2_flash.MiMoV2FlashModelTest)
