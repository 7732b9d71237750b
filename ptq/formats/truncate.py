"""Multiples of a fixed step, found by cutting off instead of rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ptq.errors import InputError
from ptq.formats import bits as packing
from ptq.formats.base import Format
from ptq.formats.tensors import block_of, bounds, checked_choice, fit_dtype, in_blocks, working_dtype

MODES = ("trunc", "floor")


@dataclass(frozen=True, kw_only=True)
class Truncate(Format):
    """``trunc(x / step) · step``, or with ``floor`` the next multiple below, which is biased by ``-step / 2``.

    The multiples are kept as signed integers of ``bits`` bits. A value that they don't reach is an error, or with
    ``saturate`` goes to the last one they do.
    """

    name: ClassVar[str] = "truncate"
    step: float = 2**-8
    mode: str = field(default="trunc", metadata={"choices": MODES})
    bits: int = 16
    saturate: bool = False

    def __post_init__(self) -> None:
        checked_choice(self.mode, MODES, "mode")
        if not (self.step > 0 and math.isfinite(self.step)):
            raise InputError(f"step = {self.step}: choose a number above 0")
        if not 2 <= self.bits <= packing.MAX_BITS:
            raise InputError(f"bits = {self.bits}: choose a whole number from 2 to {packing.MAX_BITS}")

    def nbytes_for(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        return packing.packed_length(math.prod(shape), self.bits)

    def _pack(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        low, high = bounds(x)
        half = 2 ** (self.bits - 1)
        ends = (torch.stack([low, high]).to(working_dtype(x.dtype)) / self.step).tolist()
        if not self.saturate and (math.floor(ends[0] if self.mode == "floor" else math.ceil(ends[0])) < -half
                                  or math.floor(ends[1]) >= half):  # fmt: skip
            raise InputError(
                f"{self}: {float(low):g} to {float(high):g} needs multiples from {ends[0]:.0f} to {ends[1]:.0f}, "
                f"{self.bits} bits hold {-half} to {half - 1}: take a larger step, more bits, or saturate"
            )
        codes = torch.empty(x.numel(), dtype=packing.code_dtype(self.bits), device=x.device)
        block = block_of(x.device, x.numel())
        for part, out in in_blocks(block, x.reshape(-1), codes):
            multiples = part.to(working_dtype(x.dtype)) / self.step
            multiples = multiples.trunc_() if self.mode == "trunc" else multiples.floor_()
            out.copy_(multiples.clamp_(-half, half - 1).add_(half).to(torch.int32))
        return packing.pack(codes, self.bits)

    def _unpack(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        codes = packing.unpack(payload, math.prod(shape), self.bits)
        multiples = codes.to(working_dtype(dtype)).sub_(2 ** (self.bits - 1))
        return fit_dtype(multiples.mul_(self.step), dtype).reshape(shape)
