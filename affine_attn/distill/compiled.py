"""torch.compile for training, layer by layer: those of one attention share what was compiled for the first."""

from transformers import PreTrainedModel

# The gradient of a layer's input is a sum over its readers: q, k, v, the residual, and gates. From five reads on
# inductor would store that sum in fp32 before the norm's backward reads it, a pass over the activations more (LOG.md).
_OPTIONS: dict[str, str | int | bool] = {"realize_reads_threshold": 8}


def compile_layers(model: PreTrainedModel) -> None:
    blocks = model._no_split_modules or ()
    for module in model.modules():
        if type(module).__name__ in blocks:
            module.compile(options=_OPTIONS)
