"""transformers' own common model and generation tests on small AffineAttn models; see ``make test-hf-common``.

The foreign tests come from a checkout of transformers (SOURCE), whose ``tests`` package and library are imported here;
nothing of it is kept. Every case that does not apply is named with its reason below, and has to fail.
"""

import unittest

import pytest
import torch
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_modeling_common import ModelTesterMixin, ids_tensor, torch_device
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from affine_attn.models import AffineAttnConfig, AffineAttnForCausalLM, AffineAttnModel
from hf_common.expected import ONNX, failing

NOT_APPLICABLE = {
    "test_can_set_attention_dynamically": "there is one implementation; 'eager' is accepted and means the same",
    "test_config_attn_implementation_setter": "there is one implementation; 'sdpa' is refused",
    "test_custom_4d_attention_mask": "arbitrary dense masks are refused; packing and padding have names of their own",
    "test_generate_compilation_all_outputs": "weights over a static cache are those of its filled slots",
    "test_inherits_generation_mixin": "GenerationMixin comes with LlamaForCausalLM",
    "test_model_weights_reload_no_missing_tied_weights": "a checkpoint without the layers' tensors is refused",
}
# The foreign tests look these up by class name, to know which model has a loss and which labels it takes.
MODEL_MAPPING_NAMES[AffineAttnConfig.model_type] = AffineAttnModel.__name__
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AffineAttnConfig.model_type] = AffineAttnForCausalLM.__name__


class Small:
    """What the foreign tests ask of a ``model_tester``."""

    batch_size, seq_length, is_training = 3, 7, True
    hidden_size, num_hidden_layers, num_attention_heads, vocab_size = 32, 2, 2, 99

    def __init__(self, attention: str):
        self.attention = attention

    def get_config(self) -> AffineAttnConfig:
        return AffineAttnConfig(
            attention=self.attention,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=32,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )

    def prepare_config_and_inputs_for_common(self):
        tokens = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens).to(torch_device)}


class Common(ModelTesterMixin, GenerationTesterMixin):
    attention: str
    all_model_classes = (AffineAttnModel, AffineAttnForCausalLM)

    def setUp(self):
        self.model_tester = Small(self.attention)


# Before the classes below exist: transformers looks through a test class when it is made.
for _name, _reason in NOT_APPLICABLE.items():
    setattr(Common, _name, pytest.mark.xfail(reason=_reason, strict=True)(getattr(Common, _name)))
for _name, _reason in ONNX.items():
    setattr(Common, _name, failing(Common, _name, _reason))


class WithoutAverage(Common):
    @unittest.skip("alpha_ma is kept in fp32 where there is one")
    def test_keep_in_fp32_modules_exist(self):
        pass


class SoftmaxTest(WithoutAverage, unittest.TestCase):
    attention = "softmax"


class SinkTest(WithoutAverage, unittest.TestCase):
    attention = "sink"


class AffineTest(Common, unittest.TestCase):
    attention = "affine"
