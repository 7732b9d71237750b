"""Fake-quant: values that stand on the integer grid, in float arithmetic, on the user's own modules."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ptq import channels
from ptq.calibration import LayerStatistics
from ptq.formats import affine, diffusion
from ptq.formats import format as read_format
from ptq.hooks import pass_input_through
from ptq.quantization.scheme import Bits, Scheme

ATTRIBUTE = "input_quantizer"
ZERO_POINT = "weight_zero_point"  # of each output channel, [O], where it isn't always 0


class FakeQuantize(nn.Module):
    """Rounds a tensor to the grid ``(q - zero_point) · scale``; lives on its layer as ``layer.input_quantizer``."""

    scale: Tensor
    zero_point: Tensor

    def __init__(self, bits: int, *, symmetric: bool = False) -> None:
        super().__init__()
        self.bits, self.symmetric = bits, symmetric
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("zero_point", torch.zeros(()))

    def set_range(self, low: float, high: float) -> None:
        if self.symmetric:
            self.scale.copy_(affine.symmetric_scale(torch.tensor(max(-low, high)), self.bits))
        else:
            scale, zero_point = affine.affine_parameters(torch.tensor(low), torch.tensor(high), self.bits)
            self.scale.copy_(scale)
            self.zero_point.copy_(zero_point)

    @property
    def reach(self) -> float:
        """From one end of the range to the other."""
        first, last = affine.code_range(self.bits, symmetric=self.symmetric)
        return (last - first) * float(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        first, last = affine.code_range(self.bits, symmetric=self.symmetric)
        return affine.fake(x, self.scale, self.zero_point, first, last)

    def extra_repr(self) -> str:
        return f"bits={self.bits}, {'symmetric' if self.symmetric else 'affine'}"


class DiffusedQuantize(FakeQuantize):
    """The same grid for a whole image, with the rounding error of each value spread over those rounded after it."""

    spread: Tensor

    def __init__(self, bits: int, channels: int, *, symmetric: bool = False) -> None:
        super().__init__(bits, symmetric=symmetric)
        size = 2 * diffusion.REACH + 1
        self.register_buffer("spread", torch.zeros(channels, channels, size, size))

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:  # unbatched
            return self(x[None])[0]  # type: ignore[no-any-return]
        first, last = affine.code_range(self.bits, symmetric=self.symmetric)
        return diffusion.diffused(x, float(self.scale), float(self.zero_point), first, last, self.spread)


class FormatQuantize(nn.Module):
    """Takes a tensor through a number format and back; its ranges come from the tensor itself, batch by batch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.format = read_format(text)

    def forward(self, x: Tensor) -> Tensor:
        return self.format.fake(x)

    def extra_repr(self) -> str:
        return str(self.format)


def is_quantized(layer: nn.Module) -> bool:
    return hasattr(layer, "quantized_to")


def prepare_layer(layer: channels.Layer, bits: Bits, scheme: Scheme) -> None:
    """Give the layer the buffers and the hook that its bits need, all still neutral."""
    device = layer.weight.device
    layer.quantized_to = str(bits)  # type: ignore[assignment]
    if bits.weights is not None and not bits.weight_format:
        layer.register_buffer("weight_scale", torch.ones(channels.output_channels(layer), device=device))
        if scheme.shifts_weights(bits.weights):
            layer.register_buffer(ZERO_POINT, torch.zeros(channels.output_channels(layer), device=device))
    if bits.activation_format:
        layer.add_module(ATTRIBUTE, FormatQuantize(bits.activation_format))
    elif bits.activations is not None:
        layer.add_module(ATTRIBUTE, FakeQuantize(bits.activations, symmetric=scheme.symmetric_activations).to(device))
    if hasattr(layer, ATTRIBUTE):
        layer.register_forward_pre_hook(partial(pass_input_through, ATTRIBUTE), with_kwargs=True)


def weight_codes(layer: channels.Layer, bits: int) -> tuple[Tensor, int, int]:
    """Of a prepared layer's weights: the zero-points [O], and the first and the last code."""
    if hasattr(layer, ZERO_POINT):
        return layer.get_buffer(ZERO_POINT), *affine.code_range(bits)
    return torch.zeros_like(layer.get_buffer("weight_scale")), *affine.code_range(bits, symmetric=True)


def diffuse_input(layer: channels.Layer) -> DiffusedQuantize:
    """Let a prepared layer's quantizer spread its errors, on the same grid; how is left to be set."""
    plain = layer.get_submodule(ATTRIBUTE)
    assert isinstance(plain, FakeQuantize)
    diffused = DiffusedQuantize(plain.bits, channels.input_channels(layer), symmetric=plain.symmetric)
    diffused.scale.copy_(plain.scale)
    diffused.zero_point.copy_(plain.zero_point)
    diffused.to(layer.weight.device)
    setattr(layer, ATTRIBUTE, diffused)
    return diffused


@torch.no_grad()
def quantize_layer(layer: channels.Layer, bits: Bits, statistics: LayerStatistics, observer: str) -> None:
    """Round the weight to its grid and set the range of the input, on a prepared layer."""
    if bits.weight_format:
        layer.weight.copy_(read_format(bits.weight_format).fake(layer.weight))
    elif bits.weights is not None:
        weight = layer.weight
        absmax = channels.output_absmax(weight, layer) * statistics.weight_clip
        scale = affine.symmetric_scale(absmax, bits.weights)  # [O]
        layer.weight_scale.copy_(scale)  # type: ignore[operator]
        spread = channels.over_outputs(scale, weight, layer)
        first, last = affine.code_range(bits.weights, symmetric=True)
        weight.copy_(affine.fake(weight, spread, torch.zeros_like(spread), first, last))
    if bits.activations is not None and not bits.activation_format:
        quantizer = layer.get_submodule(ATTRIBUTE)
        assert isinstance(quantizer, FakeQuantize)
        quantizer.set_range(*statistics.range(observer, bits.activations))
