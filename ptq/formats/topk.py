"""The largest values and where they stand; the rest is zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ptq.errors import InputError
from ptq.formats import bits as packing
from ptq.formats.affine import Affine
from ptq.formats.base import Format, _checked
from ptq.formats.ranking import largest
from ptq.formats.raw import Raw
from ptq.formats.tensors import BLOCK, as_bytes, bounds, take_bytes


@dataclass(frozen=True, kw_only=True)
class TopK(Format):
    """The ``k = max(1, ⌊ratio · n⌋)`` largest |x|, ties to the lowest index, coded by the format after ``+``.

    Indices take ``min(4k, ⌈n/8⌉)`` bytes, as int32 or as a bitmap, and none where k = n. The gradient passes at the
    kept positions, also where their value is zero.
    """

    name: ClassVar[str] = "topk"
    ratio: float = 0.1
    then: Format = field(default_factory=Raw)

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise InputError(f"ratio = {self.ratio}: choose above 0 and up to 1")
        if isinstance(self.then, Affine) and self.then.axis is not None:
            raise InputError(f"topk+{self.then}: the kept values have no axes; use affine without axis, or with group")

    def kept(self, count: int) -> int:
        """``max(1, ⌊ratio · n⌋)``, and 0 of nothing."""
        return min(count, max(1, int(self.ratio * count)))

    def nbytes_for(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        count = math.prod(shape)
        return self._index_bytes(count) + self.then.nbytes_for((self.kept(count),), dtype)

    def _index_bytes(self, count: int) -> int:
        kept = self.kept(count)
        return 0 if kept == count else min(4 * kept, packing.packed_length(count, 1))

    def _marks(self, x: Tensor) -> Tensor:
        """0 where a value is kept and 1 elsewhere; uint8, flat."""
        bounds(x)
        flat = x.reshape(-1)
        kept = self.kept(len(flat))
        if kept == len(flat):
            return torch.zeros(len(flat), dtype=torch.uint8, device=x.device)
        return largest(flat, kept)

    def _pack(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        marks, flat = self._marks(x), x.reshape(-1)
        places = _places_of(marks, 0)
        payload = self.then._pack(flat.index_select(0, places), generator)
        size = self._index_bytes(len(flat))
        if not size:
            return payload
        index = as_bytes(places.to(torch.int32))[0] if size == 4 * len(places) else _bitmap(marks)
        return torch.cat([index, payload])

    def _unpack(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        kept, size = self.kept(count), self._index_bytes(count)
        values = self.then._unpack(payload[size:], (kept,), dtype)
        if not size:
            return values.reshape(shape)
        if size == 4 * kept:
            places = take_bytes(payload, 0, kept, torch.int32).to(torch.int64)
        else:
            places = _places_of(_marks_of(payload[:size], count), 0)
        return torch.zeros(count, dtype=dtype, device=payload.device).index_copy_(0, places, values).reshape(shape)

    def fake(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """``decode(encode(x))``, bit for bit; the gradient passes at the kept positions."""
        places = _places_of(self._marks(_checked(x, generator)), 0)
        values = self.then.fake(x.reshape(-1).index_select(0, places), generator)
        return torch.zeros_like(x).reshape(-1).index_copy(0, places, values).reshape(x.shape)


def _bitmap(marks: Tensor) -> Tensor:
    """One bit an element, set where the mark is 0, the first element in the lowest bit."""
    if marks.device.type == "cpu":
        return torch.from_numpy(np.packbits(marks.numpy() == 0, bitorder="little"))
    bits = torch.nn.functional.pad((marks == 0).to(torch.uint8), (0, -len(marks) % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=marks.device)).sum(1, dtype=torch.uint8)


def _marks_of(bitmap: Tensor, count: int) -> Tensor:
    """``_bitmap`` undone."""
    if bitmap.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(~bitmap.numpy(), count=count, bitorder="little"))
    bits = (bitmap[:, None] >> torch.arange(8, dtype=torch.uint8, device=bitmap.device)) & 1
    return 1 - bits.flatten()[:count]


def _places_of(marks: Tensor, mark: int) -> Tensor:
    """Ascending indices of the bytes that have this value."""
    if marks.device.type != "cpu":
        return (marks == mark).nonzero().flatten()
    # Block by block, numpy's is twice as fast as torch's.
    blocks = [np.flatnonzero(block.numpy() == mark) for block in torch.split(marks, BLOCK)]
    return torch.from_numpy(np.concatenate([block + number * BLOCK for number, block in enumerate(blocks)]))
