"""The Llama decoder of transformers with ``AttentionLayer`` in place of its attention; all else is inherited."""

# The annotations of transformers are narrower than what its models take and give.
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false, reportArgumentType=false

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
)
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from affine_attn.api import attention
from affine_attn.core.call import checked_call, refuse_context_parallel
from affine_attn.core.reference import run_with_weights
from affine_attn.core.spec import LEARNED_GATE, LogN
from affine_attn.errors import UserError
from affine_attn.models.attn_implementation import refuse_unknown
from affine_attn.models.configuration import AffineAttnConfig
from affine_attn.models.masks import PreparedMask, decoder_mask
from affine_attn.models.streaming import StreamingCache
from affine_attn.nn.alpha import AlphaGate
from affine_attn.nn.layer import AttentionLayer
from affine_attn.nn.rope import rotate


class AffineAttnAttention(AttentionLayer):
    """``AttentionLayer`` with the call of a Llama attention: rotary tables, mask and cache come from the model."""

    def __init__(self, config: AffineAttnConfig, layer_idx: int):
        super().__init__(
            dim=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            attention=config.spec(layer_idx),
            qkv_bias=config.qkv_bias or config.attention_bias,
            out_bias=config.attention_bias,
            qk_norm=config.qk_norm,
            rope=None,
            norm_eps=config.rms_norm_eps,
            init_std=config.initializer_range,
            layer_idx=layer_idx,
        )
        self.window = config.layer_window(layer_idx)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", window={self.window}" if self.window else "")

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: PreparedMask,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
        impl: str = "auto",
        **named: Any,
    ) -> tuple[Tensor, Tensor | None]:
        refuse_unknown(attention_mask.mask, named)
        q, k, v = self.project(hidden_states)
        # transformers repeats the table for both halves of a head.
        cos, sin = (table[..., : self.head_dim // 2] for table in position_embeddings)
        if isinstance(past_key_values, StreamingCache):
            # The tables are those of all its keys, whose places change with every call.
            k, v = past_key_values.extend(k, v, self.layer_idx)
            k = rotate(k, cos, sin)
        else:
            k = rotate(k, cos, sin)
            if past_key_values is not None:
                k, v = past_key_values.update(k, v, self.layer_idx)
        q = rotate(q, cos[:, -q.shape[2] :], sin[:, -q.shape[2] :])
        k, v = attention_mask.filled(k, v)
        stages = self.arguments(hidden_states, q, k, v, attention_mask.windowed(self.window))
        weights = None
        if output_attentions:
            y, weights = run_with_weights(checked_call(**stages))
        else:
            y = attention(**stages, impl=impl)
        return self.o_proj(y.transpose(1, 2).flatten(2)), weights


class AffineAttnDecoderLayer(LlamaDecoderLayer):
    """Llama's, with ``AffineAttnAttention``."""

    def __init__(self, config: AffineAttnConfig, layer_idx: int):
        # Not LlamaDecoderLayer's: it would fill a second attention with random numbers first.
        GradientCheckpointingLayer.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn = AffineAttnAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class AffineAttnRotaryEmbedding(LlamaRotaryEmbedding):
    """Llama's, with frequencies that stay fp32."""

    def _apply(self, fn, recurse=True):
        """.to(bfloat16) must not round the frequencies: far tokens would turn by radians less, or more, until the model
        is saved, without them, and loaded."""
        exact = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, frequencies in exact.items():
            if (made := getattr(self, name)).dtype != frequencies.dtype:
                setattr(self, name, frequencies.to(made.device))
        return self


@torch.no_grad()
def not_finite_average(model: nn.Module) -> str | None:
    """Name an alpha_ma with a NaN or an infinity, if there is one. No training mends it, and its layer gives NaN."""
    gates = {name: gate.alpha_ma for name, gate in model.named_modules() if isinstance(gate, AlphaGate)}
    finite = [average.isfinite().all() for average in gates.values() if not average.is_meta]
    # All layers at once: on a GPU, each question would wait for it.
    if not finite or torch.stack([each.to(finite[0].device) for each in finite]).all():
        return None
    name, average = next((name, average) for name, average in gates.items() if not average.isfinite().all())
    return f"{name}.alpha_ma is {average[~average.isfinite()][0].item()}"


class AffineAttnPreTrainedModel(LlamaPreTrainedModel):
    """What AffineAttn models have in common: how they are loaded, and how their parameters start."""

    config: AffineAttnConfig
    config_class = AffineAttnConfig
    # One implementation, see AffineAttnConfig; its engines are chosen call by call.
    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_context_parallel = False
    _no_split_modules = ["AffineAttnDecoderLayer"]  # noqa: RUF012 (as in transformers)
    _keep_in_fp32_modules_strict = ["alpha_ma"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": AffineAttnDecoderLayer,
        "attentions": AffineAttnAttention,
    }

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path, *model_args, output_loading_info: bool = False, **kwargs
    ) -> Any:
        """Load as transformers does, but raise if a layer's tensors do not fit the config's attention.

        transformers would start what is missing from random numbers, the moving average of alpha from its first value,
        and drop what it does not know: another attention than the one that was trained.
        """
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
        )
        model, info = loaded
        for problem in ("missing_keys", "unexpected_keys"):
            if keys := sorted(key for key in info[problem] if "layers." in key):
                more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
                raise UserError(
                    f"{pretrained_model_name_or_path}: {problem.replace('_', ' ')} {keys[0]}{more}; the checkpoint "
                    "does not hold the attention its config names (affine_attn.models.convert changes a model's)"
                )
        if problem := not_finite_average(model):
            raise UserError(f"{pretrained_model_name_or_path}: {problem}, so the checkpoint is damaged")
        return (model, info) if output_loading_info else model

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing, as for the config, which writes what a folder needs."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # transformers' init functions leave alone what a checkpoint has already filled.
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, AlphaGate):
            init.normal_(module.w_a, std=std)
            init.constant_(module.alpha_ma, module.affine.start)
        elif isinstance(module, AffineAttnAttention):
            if module.sinks is not None:
                init.normal_(module.sinks, std=std)
            if module.logn_scale is not None and isinstance(logit := module.spec.scores.logit, LogN):
                init.constant_(module.logn_scale, logit.start)
            if module.attn_gate is not None and (gate := module.spec.projected_gate) and gate.starts_at_zero:
                init.zeros_(module.attn_gate.weight)
            if module.gate_scale is not None:
                init.constant_(module.gate_scale, LEARNED_GATE)


class AffineAttnModel(AffineAttnPreTrainedModel, LlamaModel):
    """The decoder without a head."""

    def __init__(self, config: AffineAttnConfig):
        config.settle_layers()
        # Not LlamaModel's, which would build its own layers first.
        LlamaPreTrainedModel.__init__(self, config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(AffineAttnDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = AffineAttnRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | PreparedMask | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        document_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run LlamaModel's forward; packed sequences have position_ids that restart, or document_ids [B, T]."""
        refuse_context_parallel()
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if tokens is None:
            raise UserError("AffineAttnModel: give input_ids or inputs_embeds")
        kwargs.setdefault("output_attentions", self.config.output_attentions)
        places = position_ids
        if isinstance(past_key_values, StreamingCache):
            attention_mask, places = None, past_key_values.key_positions(tokens, attention_mask)
        return super().forward(
            input_ids=input_ids,
            attention_mask=decoder_mask(tokens, attention_mask, past_key_values, position_ids, document_ids),
            position_ids=places,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )


class AffineAttnForCausalLM(AffineAttnPreTrainedModel, LlamaForCausalLM):
    """The decoder with its head. Training by hand needs ``affine_attn.track_alpha(model, optimizer)`` once."""

    def __init__(self, config: AffineAttnConfig):
        # Not LlamaForCausalLM's, which would build a Llama first.
        LlamaPreTrainedModel.__init__(self, config)
        self.model = AffineAttnModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @staticmethod
    def create_masks_for_generate(
        inputs_embeds: Tensor, attention_mask: Tensor, past_key_values: Cache, **_
    ) -> Tensor | None:
        """The mask of a prompt as it is; for a single token the padding of all slots, or None where all are real.

        ``generate`` calls it before a forward with a static cache. That of a single token may be compiled: tensors of
        one shape enter it and nothing else, as exporters want it too. The forward makes its ``Mask`` of them.
        """
        if inputs_embeds.shape[1] > 1:
            return attention_mask
        if bool(attention_mask.all()):
            return None
        slots, _ = past_key_values.get_mask_sizes(1, 0)
        return F.pad(attention_mask, (0, max(slots - attention_mask.shape[1], 0)), value=1)


class AffineAttnForSequenceClassification(GenericForSequenceClassification, AffineAttnPreTrainedModel):
    """The decoder with a linear head on the last token that is not padding; what trl calls a reward model, too."""


class AffineAttnForTokenClassification(GenericForTokenClassification, AffineAttnPreTrainedModel):
    """The decoder with a linear head on every token."""


class AffineAttnForQuestionAnswering(GenericForQuestionAnswering, AffineAttnPreTrainedModel):
    """The decoder with a linear head for the start and the end of an answer."""


# Here, where the code in a folder has it too: the heads above make their decoder by it.
AutoModel.register(AffineAttnConfig, AffineAttnModel)
AutoModelForCausalLM.register(AffineAttnConfig, AffineAttnForCausalLM)
AutoModelForSequenceClassification.register(AffineAttnConfig, AffineAttnForSequenceClassification)
AutoModelForTokenClassification.register(AffineAttnConfig, AffineAttnForTokenClassification)
AutoModelForQuestionAnswering.register(AffineAttnConfig, AffineAttnForQuestionAnswering)
