"""Fake-quant that can be trained: rounding lets the gradient through, and steps are learned (LSQ) or observed.

In eval mode each of these gives, bit for bit, what the quantized network's own modules give with the same scales.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ptq.formats import Format, affine

TINY = 1e-12  # the least step
RATIOS = [number / 40 for number in range(40, 7, -1)]  # of the step that clips nothing; 1 first, so that it wins ties


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def rounded(x: Tensor, scale: Tensor, zero_point: float, first: int, last: int) -> Tensor:
    """``affine.fake`` with gradients: 1 for x inside the range, and by the step s, with v = x / s and z the
    zero-point, ``round(v) - v`` inside and ``first - z`` or ``last - z`` where it clips (LSQ)."""
    codes = cast(Tensor, _Round.apply(x / scale))  # type: ignore[no-untyped-call]
    return codes.clamp(first - zero_point, last - zero_point) * scale


def step_of(scale: Tensor, elements: int, largest_code: int) -> Tensor:
    """A learned step, kept positive, whose gradient is divided by ``√(elements · largest_code)`` as LSQ says."""
    factor = 1 / math.sqrt(max(1, elements) * largest_code)
    return cast(Tensor, _ScaledGradient.apply(scale.abs().clamp(min=TINY), factor))  # type: ignore[no-untyped-call]


@torch.no_grad()
def least_squares_steps(weight: Tensor, scale: Tensor, outputs: Tensor, bits: int) -> Tensor:
    """Of each channel's step times each of RATIOS, the one with the least squared error: ``[O]``.

    Steps that clip nothing are a poor start at two or three bits, from which training finds no way back.
    """
    first, last = affine.code_range(bits, symmetric=True)
    places = outputs.expand_as(weight).flatten()
    best, least = scale, torch.full_like(scale, torch.inf)
    for ratio in RATIOS:
        trial = scale * ratio
        difference = rounded(weight, trial[outputs], 0.0, first, last) - weight
        error = torch.zeros_like(scale).index_add(0, places, difference.square().flatten().to(scale.dtype))
        best, least = torch.where(error < least, trial, best), torch.minimum(error, least)
    return best


class WeightSteps(nn.Module):
    """A parametrization of a weight: symmetric, one step for each output channel, learned or from its maximum.

    ``outputs`` says of each weight element, broadcast, which output channel it belongs to.
    """

    outputs: Tensor
    clip: Tensor

    def __init__(self, bits: int, scale: Tensor, outputs: Tensor, clip: Tensor, *, learned: bool) -> None:
        super().__init__()
        self.bits, self.learned = bits, learned
        self.register_buffer("outputs", outputs, persistent=False)
        self.register_buffer("clip", clip.expand_as(scale).clone(), persistent=False)
        if learned:
            self.scale = nn.Parameter(scale.clone())

    def shares(self, weight: Tensor, scale: Tensor) -> Tensor:
        """``Σw² / Σ(w/c)²`` over each output channel, for weights w that were multiplied by c: ``[O]``."""
        places = self.outputs.expand_as(weight).flatten()
        now, before = (
            torch.zeros_like(self.scale).index_add(0, places, w.square().flatten()) for w in (weight, weight / scale)
        )
        return torch.where(before > 0, now / before, 1.0)

    def step(self, weight: Tensor) -> Tensor:
        """``[O]``."""
        if self.learned:
            largest = affine.code_range(self.bits, symmetric=True)[1]
            return step_of(self.scale, weight.numel() // len(self.scale), largest)
        places = self.outputs.expand_as(weight).flatten()
        absmax = torch.zeros_like(self.clip).scatter_reduce(0, places, weight.detach().abs().flatten(), "amax")
        return affine.symmetric_scale(absmax * self.clip, self.bits)

    def forward(self, weight: Tensor) -> Tensor:
        scale = self.step(weight)[self.outputs]
        first, last = affine.code_range(self.bits, symmetric=True)
        return rounded(weight, scale, 0.0, first, last)


class FormatWeight(nn.Module):
    """A parametrization of a weight: a number format, whose gradient is the format's own."""

    def __init__(self, form: Format) -> None:
        super().__init__()
        self.format = form

    def forward(self, weight: Tensor) -> Tensor:
        return self.format.fake(weight)


class InputSteps(nn.Module):
    """Rounds a layer's input; its step is learned, or its range follows the batches until it is frozen."""

    scale: Tensor
    zero_point: Tensor
    low: Tensor
    high: Tensor

    def __init__(
        self, bits: int, scale: Tensor, zero_point: Tensor, *, symmetric: bool, learned: bool, memory: float = 0.99
    ) -> None:
        super().__init__()
        self.bits, self.symmetric, self.learned, self.memory = bits, symmetric, learned, memory
        self.frozen = False
        self.register_buffer("zero_point", zero_point.clone())
        if learned:
            self.scale = nn.Parameter(scale.clone())
        else:
            first, last = affine.code_range(bits, symmetric=symmetric)
            self.register_buffer("scale", scale.clone())
            self.register_buffer("low", (first - zero_point) * scale)
            self.register_buffer("high", (last - zero_point) * scale)

    @torch.no_grad()
    def _observe(self, x: Tensor) -> None:
        """``low`` and ``high`` as moving averages of the batches' ends."""
        self.low.lerp_(x.amin().to(self.low.dtype), 1 - self.memory)
        self.high.lerp_(x.amax().to(self.high.dtype), 1 - self.memory)
        if self.symmetric:
            self.scale.copy_(affine.symmetric_scale(torch.maximum(-self.low, self.high), self.bits))
        else:
            scale, zero_point = affine.affine_parameters(self.low, self.high, self.bits)
            self.scale.copy_(scale)
            self.zero_point.copy_(zero_point)

    def step(self, x: Tensor | None = None) -> Tensor:
        if not self.learned:
            return self.scale
        features = x[0].numel() if x is not None and x.dim() else 1
        return step_of(self.scale, features, affine.code_range(self.bits, symmetric=self.symmetric)[1])

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.learned and not self.frozen:
            self._observe(x)
        first, last = affine.code_range(self.bits, symmetric=self.symmetric)
        return rounded(x, self.step(x), float(self.zero_point), first, last)
