"""Fewer values: averages over small windows on the way out, spread again on the way in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ptq.errors import InputError
from ptq.formats.base import Format, _checked
from ptq.formats.raw import Raw
from ptq.formats.tensors import bounds, checked_choice, working_dtype

MODES = ("nearest", "bilinear")
_LINEAR = ("linear", "bilinear", "trilinear")


@dataclass(frozen=True, kw_only=True)
class Downsample(Format):
    """Means of ``factor × factor`` windows, coded by the format after ``+``, upsampled nearest or bilinear.

    Windows lie over the axes after the first two, as with torch's pools, and over the last axis of a vector or a
    matrix; at a border that the factor doesn't divide, a window is the part of it that exists. The gradient is the
    transpose of both steps.
    """

    name: ClassVar[str] = "downsample"
    factor: int = 2
    mode: str = field(default="nearest", metadata={"choices": MODES})
    then: Format = field(default_factory=Raw)

    def __post_init__(self) -> None:
        checked_choice(self.mode, MODES, "mode")
        if isinstance(self.factor, bool) or not isinstance(self.factor, int) or self.factor < 1:
            raise InputError(f"factor = {self.factor}: choose a whole number from 1 up")

    def nbytes_for(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        return self.then.nbytes_for(self._small(tuple(shape)), dtype)

    def _axes(self, shape: tuple[int, ...]) -> int:
        if len(shape) > 5:
            raise InputError(f"downsample takes tensors of up to 5 axes, this has {len(shape)}")
        return min(len(shape), max(1, len(shape) - 2))

    def _small(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        axes = self._axes(shape)
        return (*shape[: len(shape) - axes], *(-(-size // self.factor) for size in shape[len(shape) - axes :]))

    def _down(self, x: Tensor) -> Tensor:
        if not x.numel() or not x.dim() or self.factor == 1:
            return x.reshape(self._small(tuple(x.shape)))
        means = x.to(working_dtype(x.dtype))
        for axis in range(x.dim() - self._axes(tuple(x.shape)), x.dim()):
            means = self._means(means, axis)
        return means.to(x.dtype)

    def _means(self, x: Tensor, axis: int) -> Tensor:
        """Means of windows along one axis; axis after axis they are the means of the whole windows."""
        missing = -x.shape[axis] % self.factor
        after = x.dim() - 1 - axis
        windows = torch.unflatten(functional.pad(x, (0, 0) * after + (0, missing)), axis, (-1, self.factor))
        present = torch.full((windows.shape[axis],), self.factor, dtype=x.dtype, device=x.device)
        present[-1] -= missing
        # Divided before they are added, so that the sum can't overflow.
        return (windows / present.reshape(-1, *(1 for _ in range(after + 1)))).sum(axis + 1)

    def _up(self, small: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not small.numel() or not shape or self.factor == 1:
            return small.reshape(shape)
        axes = self._axes(shape)
        ends = shape[len(shape) - axes :]
        maps = small.to(working_dtype(small.dtype)).reshape(1, -1, *small.shape[small.dim() - axes :])
        mode = "nearest" if self.mode == "nearest" else _LINEAR[axes - 1]
        large = functional.interpolate(maps, scale_factor=self.factor, mode=mode)
        for axis, size in enumerate(ends, start=2):
            large = large.narrow(axis, 0, size)
        return large.reshape(shape).to(small.dtype)

    def _pack(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        bounds(x)
        return self.then._pack(self._down(x), generator)

    def _unpack(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._up(self.then._unpack(payload, self._small(shape), dtype), shape)

    def fake(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """``decode(encode(x))``, bit for bit; autograd transposes the averages and the upsampling."""
        bounds(_checked(x, generator))
        return self._up(self.then.fake(self._down(x), generator), tuple(x.shape))
