"""The hook form: a layer that divides its input by its smoothing factor before it reads it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ptq import channels
from ptq.hooks import pass_input_through

ATTRIBUTE = "smoothing"


class InputScaling(nn.Module):
    """Divides an input by one factor per channel; lives on its layer as ``layer.smoothing``."""

    factor: Tensor  # [C]

    def __init__(self, factor: Tensor, axis: int) -> None:
        super().__init__()
        self.register_buffer("factor", factor)
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return x / channels.over_inputs(self.factor, self.axis, x).to(x.dtype)


def is_smoothed(layer: nn.Module) -> bool:
    return hasattr(layer, ATTRIBUTE)


def attach_scaling(layer: channels.Layer, factor: Tensor) -> RemovableHandle:
    """Make the layer divide its input, and nothing else: the weight is the caller's to multiply."""
    layer.add_module(ATTRIBUTE, InputScaling(factor.to(layer.weight.device), channels.channel_axis(layer)))
    # First of all hooks: statistics and quantizers see the scaled input.
    return layer.register_forward_pre_hook(partial(pass_input_through, ATTRIBUTE), prepend=True, with_kwargs=True)


def smooth_layer(layer: channels.Layer, factor: Tensor) -> Callable[[], None]:
    """``X / s`` by a pre-hook and ``W · s`` in place; returns what takes both back, bit for bit."""
    weight = layer.weight.detach()
    original = weight.clone()
    channels.scale_inputs(weight, layer, factor.to(weight))
    handle = attach_scaling(layer, factor)

    def undo() -> None:
        handle.remove()
        delattr(layer, ATTRIBUTE)
        layer.weight.detach().copy_(original)

    return undo
