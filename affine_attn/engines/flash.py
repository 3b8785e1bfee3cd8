"""Engine ``triton``: own flash kernels for logits, masks and widths that stock kernels lack, plus the epilogue."""

from affine_attn.engines.compose import compose
from affine_attn.engines.operator import on_its_device
from affine_attn.kernels.flash import launch

run = compose("triton", lambda call, _: launch.forward(call), lambda call, _, *rest: launch.backward(call, *rest), ())
score_statistics = on_its_device(launch.score_statistics)
