"""What a smoothed model carries: explicit input scales, clamps per channel, and notes of what was folded away."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ptq import channels
from ptq.hooks import pass_input_through

ATTRIBUTE = "smoothing"
NOTES = "folding"


class InputScaling(nn.Module):
    """Divides an input by one factor per channel; lives on its layer as ``layer.smoothing``."""

    factor: Tensor  # [C]

    def __init__(self, factor: Tensor, axis: int) -> None:
        super().__init__()
        self.register_buffer("factor", factor)
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return x / channels.over_inputs(self.factor, self.axis, x).to(x.dtype)


class ChannelClamp(nn.Module):
    """ReLU6 or Hardtanh with bounds of its own for each channel: ``clamp(x/s, lo/s, hi/s) = clamp(x, lo, hi)/s``."""

    low: Tensor  # [C]
    high: Tensor  # [C]

    def __init__(self, low: Tensor, high: Tensor, axis: int) -> None:
        super().__init__()
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        self.axis = axis

    @classmethod
    def replacing(cls, clamp: nn.Hardtanh, factor: Tensor, axis: int) -> ChannelClamp:
        """ReLU6 is a Hardtanh, too."""
        return cls(clamp.min_val / factor, clamp.max_val / factor, axis)

    def forward(self, x: Tensor) -> Tensor:
        low, high = (channels.over_inputs(bound, self.axis, x).to(x.dtype) for bound in (self.low, self.high))
        return x.clamp(low, high)


class FoldingNotes(nn.Module):
    """What folding divided a layer's input and output by, on the layer as ``layer.folding``: never run, only read."""

    input: Tensor  # [C]
    output: Tensor  # [O]

    def __init__(self, inputs: int, outputs: int, *, behind_batchnorm: bool) -> None:
        super().__init__()
        self.register_buffer("input", torch.ones(inputs))
        self.register_buffer("output", torch.ones(outputs))
        self.behind_batchnorm = behind_batchnorm  # whether ``output`` is that of the BatchNorm that reads the layer


def folding_of(layer: nn.Module) -> FoldingNotes | None:
    notes = getattr(layer, NOTES, None)
    return notes if isinstance(notes, FoldingNotes) else None


def is_smoothed(layer: nn.Module) -> bool:
    return hasattr(layer, ATTRIBUTE) or hasattr(layer, NOTES)


def attach_scaling(layer: channels.Layer, factor: Tensor) -> RemovableHandle:
    """Make the layer divide its input, and nothing else: the weight is the caller's to multiply."""
    layer.add_module(ATTRIBUTE, InputScaling(factor.to(layer.weight.device), channels.channel_axis(layer)))
    # First of all hooks: statistics and quantizers see the scaled input.
    return layer.register_forward_pre_hook(partial(pass_input_through, ATTRIBUTE), prepend=True, with_kwargs=True)


def attach_notes(layer: channels.Layer, *, behind_batchnorm: bool) -> FoldingNotes:
    inputs, outputs = channels.input_channels(layer), channels.output_channels(layer)
    notes = FoldingNotes(inputs, outputs, behind_batchnorm=behind_batchnorm).to(layer.weight.device)
    layer.add_module(NOTES, notes)
    return notes


class Undo:
    """Remembers how to take changes back, bit for bit, latest first."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, step: Callable[[], object]) -> None:
        self._steps.append(step)

    def about_to_write(self, *tensors: Tensor | None) -> None:
        """Keep the values of tensors that will be written in place."""
        for tensor in tensors:
            if tensor is not None:
                self._steps.append(partial(tensor.detach().copy_, tensor.detach().clone()))

    def run(self) -> None:
        while self._steps:
            self._steps.pop()()
