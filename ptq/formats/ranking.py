"""Which part of the sorted tensor does each element fall into, without sorting it.

The definition is a stable ascending sort cut at given ranks: equal values are told apart by their index. Small tensors
are sorted. In large ones a sample brackets each border: one pass of comparisons says which elements lie below, between
and above the brackets, and only those inside one, some percent, are looked at again. Where that doesn't serve, because
the borders are many or so many values are equal that a bracket holds them all, a radix selection does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ptq.formats.radix import Integers, parts_by_radix
from ptq.formats.tensors import BLOCK

MAX_PARTS = 128
_SORT_BELOW = 65536  # elements; below, samples and tables cost more than the sort
_SAMPLE = 131_072
_DEVIATIONS = 4  # of the sample's rank, to each side of a border
_MOST_BRACKETS = 3  # with more, comparing with each costs as much as a histogram


@dataclass(frozen=True)
class Parts:
    """The part of each element and the extremes of each part."""

    part: Tensor  # uint8, [n]
    low: Tensor  # [parts]; 0 for an empty part
    high: Tensor  # [parts]


def even_borders(count: int, parts: int) -> list[int]:
    """The ranks at which ``tensor_split`` begins each part but the first.

    >>> even_borders(10, 4)  # 3, 3, 2 and 2 elements
    [3, 6, 8]
    """
    size, longer = divmod(count, parts)
    return [index * size + min(index, longer) for index in range(1, parts)]


def split_by_rank(x: Tensor, borders: Sequence[int], ends: tuple[Tensor, Tensor]) -> Parts:
    """Split a flat tensor of finite values as a stable ascending sort, cut at these ascending ranks, would.

    ``ends`` are its smallest and its largest value, which the caller knows from looking for NaN.
    """
    if not _is_large(x):
        return _by_sorting(x, borders)
    edges = [0, *borders, len(x)]
    part, values = _selected(x, borders)
    values = {**values, 0: float(ends[0]), len(x) - 1: float(ends[1])}
    filled = [(start, end - 1) if end > start else None for start, end in itertools.pairwise(edges)]
    low, high = ([values[pair[end]] if pair else 0.0 for pair in filled] for end in (0, 1))
    return Parts(part, torch.tensor(low, dtype=x.dtype), torch.tensor(high, dtype=x.dtype))


def largest(x: Tensor, count: int) -> Tensor:
    """0 where a flat tensor has its ``count`` largest |x|, ties to the lowest index, and 1 elsewhere; uint8."""
    if not _is_large(x):
        return _by_sorting(-x.abs(), [count]).part
    return _selected(x, [count], by_size=True)[0]


def _is_large(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype != torch.float64 and len(x) >= _SORT_BELOW


def _selected(x: Tensor, borders: Sequence[int], *, by_size: bool = False) -> tuple[Tensor, dict[int, float]]:
    """The part of each element, and the values on both sides of each border; with ``by_size`` those of ``-|x|``."""
    inner = np.unique([border for border in borders if 0 < border < len(x)]).astype(np.int64)
    if len(inner) == len(borders) and 0 < len(inner) <= _MOST_BRACKETS:
        found = _by_brackets(x, inner, by_size=by_size)
        if found is not None:
            return found
    ranks = np.unique(np.concatenate([inner - 1, inner]))
    return parts_by_radix(x, np.asarray(borders, dtype=np.int64), ranks, by_size=by_size)


def _by_sorting(x: Tensor, borders: Sequence[int]) -> Parts:
    values, order = torch.sort(x, stable=True)
    edges = [0, *borders, len(x)]
    sizes = torch.tensor(edges, device=x.device).diff()
    part = torch.empty(len(x), dtype=torch.uint8, device=x.device)
    part[order] = torch.arange(len(sizes), dtype=torch.uint8, device=x.device).repeat_interleave(sizes)
    if not len(x):
        return Parts(part, x.new_zeros(len(sizes)), x.new_zeros(len(sizes)))
    starts, ends = torch.tensor(edges[:-1], device=x.device), torch.tensor(edges[1:], device=x.device) - 1
    low, high = values[starts.clamp(max=len(x) - 1)], values[ends.clamp(min=0)]
    return Parts(part, torch.where(sizes > 0, low, 0), torch.where(sizes > 0, high, 0))


def _by_brackets(x: Tensor, borders: Integers, *, by_size: bool) -> tuple[Tensor, dict[int, float]] | None:
    """As the radix selection, or None where a border isn't in its bracket or a bracket isn't small."""
    brackets = _brackets(x, borders, by_size=by_size)
    if brackets is None:
        return None
    part = torch.empty(len(x), dtype=torch.uint8)
    reached, passed = np.zeros_like(borders), np.zeros_like(borders)  # elements at or above the low end, above the high
    places, codes = [], []
    above = np.empty(BLOCK, dtype=np.bool_)
    for number, (block, out) in enumerate(zip(torch.split(x, BLOCK), torch.split(part, BLOCK), strict=True)):
        # How many ends of brackets an element has reached: 2j in part j, 2j + 1 in bracket j.
        values, code, flags = _ordered(block, by_size=by_size), out.numpy(), above[: len(block)]
        code.fill(0)
        for index, (low, high) in enumerate(brackets):
            np.add(code, np.greater_equal(values, low, out=flags).view(np.uint8), out=code)
            reached[index] += np.count_nonzero(flags)
            np.add(code, np.greater(values, high, out=flags).view(np.uint8), out=code)
            passed[index] += np.count_nonzero(flags)
        inside = np.flatnonzero((code & 1).view(np.bool_))
        places.append(inside + number * BLOCK)
        codes.append(code[inside])
        np.right_shift(code, 1, out=code)
    below = len(x) - reached
    if not ((below < borders) & (borders < len(x) - passed)).all():
        return None
    return part, _settle(x, part, np.concatenate(places), np.concatenate(codes), borders - below, borders, by_size)


def _brackets(x: Tensor, borders: Integers, *, by_size: bool) -> list[tuple[np.float32, np.float32]] | None:
    """The values between which each border lies, almost surely, by a sample; None where they overlap or hold much."""
    sample = np.sort(_ordered(x[:: max(1, len(x) // _SAMPLE)], by_size=by_size))
    share = borders / len(x)
    reach = _DEVIATIONS * np.sqrt(len(sample) * share * (1 - share)) + 4
    first = np.floor(share * len(sample) - reach).astype(np.int64)
    last = np.ceil(share * len(sample) + reach).astype(np.int64)
    low = np.where(first >= 0, sample[np.maximum(first, 0)], -np.inf).astype(np.float32)
    high = np.where(last < len(sample), sample[np.minimum(last, len(sample) - 1)], np.inf).astype(np.float32)
    held = np.searchsorted(sample, high, side="right") - np.searchsorted(sample, low, side="left")
    if (low[1:] <= high[:-1]).any() or held.sum() > len(sample) // 4:
        return None
    return list(zip(low, high, strict=True))


def _settle(
    x: Tensor,
    part: Tensor,
    places: Integers,
    codes: npt.NDArray[np.uint8],
    ranks: Integers,
    borders: Integers,
    by_size: bool,
) -> dict[int, float]:
    """Give the elements inside the brackets their parts; returns the values on both sides of each border."""
    found: dict[int, float] = {}
    for index, (rank, border) in enumerate(zip(ranks.tolist(), borders.tolist(), strict=True)):
        members = places[codes == 2 * index + 1]
        values = _ordered(x[torch.from_numpy(members)], by_size=by_size)
        before, at = np.partition(values, (rank - 1, rank))[rank - 1 : rank + 1]
        found[border - 1], found[border] = float(before), float(at)
        ties = np.flatnonzero(values == at)
        after = values > at
        after[ties[rank - int(np.count_nonzero(values < at)) :]] = True
        part.numpy()[members] = index + after
    return found


def _ordered(x: Tensor, *, by_size: bool) -> npt.NDArray[np.float32]:
    """The float32 values whose ascending order is asked for."""
    values = x.float()
    result: npt.NDArray[np.float32] = (-values.abs() if by_size else values).numpy()
    return result
