"""Uniform affine integers: ``q = clamp(round(x / scale) + zero_point)``, and back.

Codes are signed, ``[-2^(b-1), 2^(b-1) - 1]``; the symmetric form uses the restricted range
``[-(2^(b-1) - 1), 2^(b-1) - 1]`` and zero-point 0. Rounding is half to even. Real zero is always exact, since
padding and ReLU produce it everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ptq.errors import InputError

MIN_BITS, MAX_BITS = 2, 16


def checked_bits(bits: int, what: str = "bits") -> int:
    if isinstance(bits, bool) or not isinstance(bits, int) or not MIN_BITS <= bits <= MAX_BITS:
        raise InputError(f"{what} = {bits}: choose a whole number from {MIN_BITS} to {MAX_BITS}")
    return bits


def code_range(bits: int, *, symmetric: bool = False) -> tuple[int, int]:
    """The smallest and the largest code.

    >>> code_range(4), code_range(4, symmetric=True)
    ((-8, 7), (-7, 7))
    """
    half = 2 ** (checked_bits(bits) - 1)
    return (1 - half if symmetric else -half), half - 1


def affine_parameters(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale ``(hi - lo) / (2^b - 1)`` and the zero-point, rounded and clamped, for ranges that contain zero."""
    first, last = code_range(bits)
    low, high = low.clamp(max=0).double(), high.clamp(min=0).double()
    scale = _usable((high - low) / (last - first))
    zero_point = (first - low / scale).round().clamp(first, last)
    return scale.float(), zero_point.float()


def symmetric_scale(absmax: Tensor, bits: int) -> Tensor:
    """``absmax / (2^(b-1) - 1)``: the restricted range, so that the largest value and its negative are both exact."""
    return _usable(absmax.double() / code_range(bits, symmetric=True)[1]).float()


def _usable(scale: Tensor) -> Tensor:
    # A constant zero tensor, or one so small that float32 can't hold its step, gets scale 1: its codes are all 0.
    return torch.where(scale >= torch.finfo(torch.float32).tiny, scale, torch.ones_like(scale))


def codes(x: Tensor, scale: Tensor, zero_point: Tensor, first: int, last: int) -> Tensor:
    """``clamp(round(x / scale) + zero_point, first, last)`` as integers."""
    return (x / scale).round_().add_(zero_point).clamp_(first, last).to(torch.int32)


def values(q: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return (q - zero_point) * scale


def fake(x: Tensor, scale: Tensor, zero_point: Tensor, first: int, last: int) -> Tensor:
    """``values(codes(x))`` without the integers in between.

    Clamping to ``[first - zero_point, last - zero_point]`` saves adding the zero-point and taking it away again;
    both are whole numbers far below 2^24, so the result is the same to the last bit. Three in-place passes after
    one division cost a quarter of ``torch.fake_quantize_per_tensor_affine`` on a CPU.
    """
    return (x / scale).round_().clamp_(first - zero_point, last - zero_point).mul_(scale)
