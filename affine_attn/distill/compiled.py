"""torch.compile for training, layer by layer: those of one attention share what was compiled for the first."""

from transformers import PreTrainedModel

# The gradient of a layer's input is a sum over its readers: q, k, v and the norm's weight, and each gate adds one. From
# five reads on inductor would store that sum in fp32 before the norm's backward reads it, a pass over the activations
# more. The gradient of the residual has eight, is wanted twice, and had better be stored.
_OPTIONS: dict[str, str | int | bool] = {"realize_reads_threshold": 6}


def compile_layers(model: PreTrainedModel) -> None:
    """Compile the decoder layers of a model in place, when they are first called."""
    blocks = model._no_split_modules or ()
    for module in model.modules():
        if type(module).__name__ in blocks:
            module.compile(options=_OPTIONS)
