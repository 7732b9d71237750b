"""Uniform affine integers: ``q = clamp(round(x / scale) + zero_point)``, and back.

Codes are signed, ``[-2^(b-1), 2^(b-1) - 1]``; the symmetric form uses the restricted range
``[-(2^(b-1) - 1), 2^(b-1) - 1]`` and zero-point 0. Rounding is half to even. Real zero is always exact, since
padding and ReLU produce it everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ptq.errors import InputError
from ptq.formats import bits as packing
from ptq.formats.base import Format
from ptq.formats.tensors import (
    ROUNDINGS,
    as_bytes,
    block_of,
    bounds,
    checked_choice,
    require_finite,
    take_bytes,
    working_dtype,
)

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
    one division cost an eighth of ``torch.fake_quantize_per_tensor_affine`` on a CPU, with numbers as bounds:
    clamping to tensors would take longer than all the rest.
    """
    codes = (x / scale).round_()
    if zero_point.numel() == 1 and zero_point.device.type == "cpu":
        zero = float(zero_point)
        return codes.clamp_(first - zero, last - zero).mul_(scale)
    return codes.clamp_(first - zero_point, last - zero_point).mul_(scale)


def full_range_scale(low: Tensor, high: Tensor, bits: int) -> Tensor:
    """The least scale that clips neither end on all codes: ``max(hi / (2^(b-1) - 1), -lo / 2^(b-1))``."""
    first, last = code_range(bits)
    return _usable(torch.maximum(high.double() / last, low.double() / first)).float()


def unclipped_parameters(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and zero-point for stochastic rounding, which is unbiased only where nothing is clipped.

    A rounded zero-point moves the grid by up to half a step off the range. Between a negative and a positive end one
    step is therefore given up: ``scale = (hi - lo) / (2^b - 2)``, ``zero_point = first - floor(lo / scale)``.
    """
    first, last = code_range(bits)
    low, high = low.clamp(max=0).double(), high.clamp(min=0).double()
    steps = torch.where((low < 0) & (high > 0), last - first - 1, last - first)
    scale = _usable((high - low) / steps).float().double()
    return scale.float(), (first - (low / scale).floor()).clamp(first, last).float()


def power_of_two_scale(scale: Tensor) -> Tensor:
    """The least power of two that is no smaller: ``2^⌈log2(scale)⌉``."""
    mantissa, exponent = torch.frexp(scale.double())  # scale = mantissa · 2^exponent, 1/2 ≤ mantissa < 1
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(mantissa), exponent.clamp(max=127)).float()


@dataclass(frozen=True, kw_only=True)
class Affine(Format):
    """Uniform integers with one scale, and unless symmetric one zero-point, for each group.

    Per tensor; per channel of ``axis``; per ``group`` consecutive channels of ``axis``; or, without an axis, per
    ``group`` consecutive elements. ``symmetric`` is the restricted range ``±(2^(b-1) - 1)``, ``full`` the symmetric
    range with all ``2^b`` codes. The header is a float32 scale, and an int32 zero-point, a group.

    Stochastic rounding goes up with the probability of the fraction, so that the mean of many results is the value
    itself; random numbers are drawn in the order of the elements, so that on a CPU a tensor cut along axis 0 between
    groups gives the same bytes as the whole, from one generator.
    """

    name: ClassVar[str] = "affine"
    bits: int = 8
    symmetric: bool = False
    full: bool = False
    axis: int | None = None
    group: int | None = None
    power_of_two: bool = False
    rounding: str = field(default="nearest", metadata={"choices": ROUNDINGS})

    def __post_init__(self) -> None:
        checked_bits(self.bits)
        checked_choice(self.rounding, ROUNDINGS, "rounding")
        if self.symmetric and self.full:
            raise InputError("symmetric is the restricted range and full is all of it: give one of them")
        if self.group is not None and self.group < 1:
            raise InputError(f"group = {self.group}: a group has at least one member")

    def nbytes_for(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        header = 4 if self._without_zero_point else 8
        return header * self._groups(shape) + packing.packed_length(math.prod(shape), self.bits)

    @property
    def _without_zero_point(self) -> bool:
        return self.symmetric or self.full

    def _groups(self, shape: Sequence[int]) -> int:
        elements = math.prod(shape)
        if not elements:
            return 0
        if self.axis is None:
            return 1 if self.group is None else -(-elements // self.group)
        return -(-(tuple(shape) or (1,))[self._axis_of(shape)] // (self.group or 1))

    def _axis_of(self, shape: Sequence[int]) -> int:
        axes = max(1, len(shape))
        assert self.axis is not None
        if not -axes <= self.axis < axes:
            raise InputError(f"axis={self.axis}: a tensor of shape {list(shape)} has axes {-axes} to {axes - 1}")
        return self.axis % axes

    def _rows(self, x: Tensor) -> Tensor:
        """The tensor as ``[rows, columns]``, rows being channels or groups of elements, the last filled with zeros."""
        if self.axis is not None:
            axis = self._axis_of(x.shape)
            return (x.movedim(axis, 0) if x.dim() > 1 else x).reshape((x.shape or (1,))[axis], -1).contiguous()
        if self.group is None:
            return x.reshape(1, -1).contiguous()
        flat = x.reshape(-1)
        return torch.nn.functional.pad(flat, (0, -len(flat) % self.group)).view(-1, self.group)

    def _shaped(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        """``_rows`` undone."""
        if self.axis is None or len(shape) < 2:
            return rows.reshape(-1)[: math.prod(shape)].reshape(shape)
        axis = self._axis_of(shape)
        others = [size for index, size in enumerate(shape) if index != axis]
        return rows.reshape(shape[axis], *others).movedim(0, axis).contiguous()

    def _parameters(self, rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero-point of each group."""
        if len(rows) == 1:
            low, high = (bound.reshape(1) for bound in bounds(x))
        else:
            low, high = rows.amin(1), rows.amax(1)
            require_finite(low, high, x)
        if self.axis is not None and self.group is not None:
            padding = (0, -len(low) % self.group)  # zeros: every range contains zero anyway
            low = torch.nn.functional.pad(low, padding).view(-1, self.group).amin(1)
            high = torch.nn.functional.pad(high, padding).view(-1, self.group).amax(1)
        if self.symmetric:
            scale = symmetric_scale(torch.maximum(-low, high), self.bits)
        elif self.full:
            scale = full_range_scale(low, high, self.bits)
        else:
            choose = affine_parameters if self.rounding == "nearest" else unclipped_parameters
            scale, zero_point = choose(low, high, self.bits)
            if self.power_of_two:
                scale = power_of_two_scale(scale)
                first, last = code_range(self.bits)
                lowest = low.clamp(max=0).double() / scale
                lowest = lowest.round() if self.rounding == "nearest" else lowest.floor()
                zero_point = (first - lowest).clamp(first, last).float()
            return scale, zero_point
        return power_of_two_scale(scale) if self.power_of_two else scale, torch.zeros_like(scale)

    def _columns(self, rows: Tensor, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
        """Scale, and zero-point less the first code, of each row: ``[rows, 1]``, in the dtype to calculate in."""
        columns = [scale, zero_point - code_range(self.bits, symmetric=self.symmetric)[0]]
        if self.axis is not None and self.group is not None:
            columns = [column.repeat_interleave(self.group)[: len(rows)] for column in columns]
        scale, offset = (column.to(working_dtype(rows.dtype)).reshape(-1, 1) for column in columns)
        return scale, offset

    def _quantized(
        self, rows: Tensor, scale: Tensor, offset: Tensor, generator: torch.Generator | None
    ) -> Iterator[Tensor]:
        """Block by block the codes, counted from 0 and still as floats: ``clamp(round(x / scale) + offset)``.

        ``offset`` is the zero-point less the first code. A block is the caller's until he asks for the next.
        """
        first, last = code_range(self.bits, symmetric=self.symmetric)
        work: Tensor | None = None
        for tile, step, shift in zip(_tiles(rows), _tiles(scale, rows), _tiles(offset, rows), strict=True):
            if work is None:
                work = torch.empty(tile.numel(), dtype=scale.dtype, device=rows.device)  # the first tile is the largest
            block = work[: tile.numel()].view(tile.shape)
            torch.div(tile, step, out=block)
            if self.rounding == "nearest":
                block.round_()
            else:
                draws = torch.rand(block.shape, generator=generator, dtype=block.dtype, device=block.device)
                below = block.floor()
                torch.add(below, draws < block.sub_(below), out=block)
            yield block.add_(shift).clamp_(0, last - first)

    def _pack(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        payload = torch.empty(self.nbytes_for(x.shape, x.dtype), dtype=torch.uint8, device=x.device)
        if not x.numel():
            return payload
        rows = self._rows(x)
        scale, zero_point = self._parameters(rows, x)
        header = as_bytes(scale) if self._without_zero_point else as_bytes(scale, zero_point.to(torch.int32))
        start = sum(len(part) for part in header)
        torch.cat(header, out=payload[:start])
        in_place = self.bits == 8 and rows.numel() == x.numel()  # bytes are what bits.pack would give
        kind = packing.code_dtype(self.bits)
        codes = payload[start:].view(rows.shape) if in_place else torch.empty(rows.shape, dtype=kind, device=x.device)
        scale, offset = self._columns(rows, scale, zero_point)
        whole: Tensor | None = None
        for block, tile in zip(self._quantized(rows, scale, offset, generator), _tiles(codes), strict=True):
            if whole is None:
                whole = torch.empty(block.numel(), dtype=torch.int32, device=x.device)
            # By way of int32: the straight conversion to bytes is three times slower on a CPU.
            tile.copy_(whole[: block.numel()].view(block.shape).copy_(block))
        if not in_place:
            packing.pack(codes.view(-1)[: x.numel()], self.bits, out=payload[start:])
        return payload

    def _unpack(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        elements, groups = math.prod(shape), self._groups(shape)
        if not elements:
            return torch.empty(shape, dtype=dtype, device=payload.device)
        scale = take_bytes(payload, 0, groups, torch.float32)
        if self._without_zero_point:
            zero_point, start = torch.zeros_like(scale), 4 * groups
        else:
            zero_point, start = take_bytes(payload, 4 * groups, groups, torch.int32).float(), 8 * groups
        codes = payload[start:] if self.bits == 8 else packing.unpack(payload[start:], elements, self.bits)
        rows = self._rows(codes) if self.axis is None else codes.view((shape or (1,))[self._axis_of(shape)], -1)
        scale, offset = self._columns(
            result := torch.empty(rows.shape, dtype=dtype, device=payload.device), scale, zero_point
        )
        limit = self._limit(scale, offset, dtype)
        for tile, out, step, shift in zip(
            _tiles(rows), _tiles(result), _tiles(scale, rows), _tiles(offset, rows), strict=True
        ):
            _restore(out.copy_(tile) if out.dtype == step.dtype else tile.to(step.dtype), out, step, shift, limit)
        return self._shaped(result, shape)

    def _fake(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        if not x.numel():
            return x.clone()
        rows = self._rows(x)
        scale, offset = self._columns(rows, *self._parameters(rows, x))
        limit = self._limit(scale, offset, x.dtype)
        result = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        blocks = self._quantized(rows, scale, offset, generator)
        for block, out, step, shift in zip(
            blocks, _tiles(result), _tiles(scale, rows), _tiles(offset, rows), strict=True
        ):
            _restore(block, out, step, shift, limit)
        return self._shaped(result, tuple(x.shape))

    def _limit(self, scale: Tensor, offset: Tensor, dtype: torch.dtype) -> float | None:
        """The dtype's largest value, where the ends of the grid lie beyond it."""
        first, last = code_range(self.bits, symmetric=self.symmetric)
        reach = torch.maximum(offset, last - first - offset).double() * scale.double()
        largest = torch.finfo(dtype).max
        return largest if float(reach.max()) >= largest else None


def _restore(block: Tensor, out: Tensor, scale: Tensor, offset: Tensor, limit: float | None) -> None:
    """Codes, as floats counted from 0, back to values: ``out = (code - offset) · scale``; overwrites the block."""
    block.sub_(offset)
    if limit is None and block.dtype == out.dtype:
        torch.mul(block, scale, out=out)
        return
    block.mul_(scale)
    out.copy_(block if limit is None else block.clamp_(-limit, limit))


def _tiles(x: Tensor, like: Tensor | None = None) -> Iterator[Tensor]:
    """Cut ``[rows, columns]`` into pieces of about a block, in the order of the elements.

    A column ``[rows, 1]`` is cut as the rows of ``like`` are, and repeated for each piece of a row.
    """
    count, columns = (x if like is None else like).shape
    block = block_of(x.device, count * columns)
    for together in torch.split(x, max(1, block // max(1, columns))):
        if like is None:
            yield from torch.split(together, block, 1)
        else:
            for _ in range(0, columns, block):
                yield together
