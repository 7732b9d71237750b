"""Radix selection: which part of the sorted tensor each element falls into, by histograms of the floats' bits.

A histogram of the upper 16 bits says in which bin each border lies; every other bin belongs to one part as a whole.
Within the few border bins a second histogram, of the lower 16 bits, has one bin for each float there is, so that only
ties remain, and ties are cut in the order of their indices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ptq.formats.tensors import BLOCK

_BINS = 65536
_COUNTED = 8 * BLOCK  # elements counted at once: each time a table of all bins is cleared and added
_BORDER, _TIED = 255, 254  # mark bins that a border goes through

Integers = npt.NDArray[np.int64]


def parts_by_radix(
    x: Tensor, borders: Integers, ranks: Integers, *, by_size: bool = False
) -> tuple[Tensor, dict[int, float]]:
    """The part of each element, and the values at the ranks asked for; with ``by_size`` those of ``-|x|``."""
    zero = 0 if by_size else _BINS // 2  # the bin of 0.0, and below its place in ascending order
    zero_place = int(np.flatnonzero(zero == _ASCENDING)[0])
    counts = _histogram(x, by_size=by_size)
    ends = np.cumsum(counts)
    begins = ends - counts
    inner = borders[(borders > 0) & (borders < len(x))]
    bins = np.unique(np.searchsorted(ends, np.concatenate([ranks, inner]), side="right"))
    values: dict[int, float] = {}
    zeros = _zeros(x) if zero_place in bins else []
    tied = _Tied(zero, int(begins[zero_place]), zeros) if zeros and sum(zeros) == counts[zero_place] else None
    if tied:  # after ReLU half of all: they are cut by index while looking up, without being collected
        bins = bins[bins != zero_place]
        values = {int(rank): 0.0 for rank in ranks if begins[zero_place] <= rank < ends[zero_place]}
    table = np.searchsorted(borders, begins, side="right").astype(np.uint8)  # bin → part
    table[bins] = _BORDER
    part = _look_up(x, table, borders, tied, by_size=by_size)
    if len(bins):
        places = np.flatnonzero(part.numpy() == _BORDER)
        at_borders = x[torch.from_numpy(places)].float()
        keys = _keys(-at_borders.abs() if by_size else at_borders + 0.0).numpy()
        values.update(_settle_borders(part.numpy(), places, keys, borders, ranks, bins, begins))
    return part, values


@dataclass(frozen=True)
class _Tied:
    """A bin whose elements are all the same."""

    bin: int
    begin: int  # rank of the first
    counts: list[int]  # in each block


def _histogram(x: Tensor, *, by_size: bool) -> Integers:
    """How many elements each bin has, bins in ascending order."""
    counts = torch.zeros(_BINS, dtype=torch.int64)
    for upper in _upper_halves(x, _COUNTED, by_size=by_size):
        counts += torch.bincount(upper, minlength=_BINS)
    ascending: Integers = counts.numpy()[_ASCENDING]
    return ascending


def _zeros(x: Tensor) -> list[int]:
    """How many zeros each block has; the very smallest floats fall into their bin too, and are none."""
    return [len(block) - int(np.count_nonzero(block.float().numpy())) for block in torch.split(x, BLOCK)]


def _look_up(
    x: Tensor, table: npt.NDArray[np.uint8], borders: Integers, tied: _Tied | None, *, by_size: bool
) -> Tensor:
    """The part of each element by its bin; tied ones take their ranks in the order of their indices."""
    lookup = torch.empty(_BINS, dtype=torch.uint8)
    lookup[torch.from_numpy(_ASCENDING)] = torch.from_numpy(table)
    part = torch.empty(len(x), dtype=torch.uint8)
    begin = tied.begin if tied else 0
    blocks = zip(_upper_halves(x, BLOCK, by_size=by_size), torch.split(part, BLOCK), strict=True)
    for number, (upper, out) in enumerate(blocks):
        if tied is None:
            torch.index_select(lookup, 0, upper, out=out)
            continue
        end = begin + tied.counts[number]
        crossed = bool(((borders > begin) & (borders < end)).any())
        lookup[tied.bin] = _TIED if crossed else int(np.searchsorted(borders, begin, side="right"))
        torch.index_select(lookup, 0, upper, out=out)
        if crossed:
            here = out.numpy()
            here[here == _TIED] = np.searchsorted(borders, np.arange(begin, end), side="right")
        begin = end
    return part


def _settle_borders(
    part: npt.NDArray[np.uint8],
    places: Integers,
    keys: npt.NDArray[np.int32],
    borders: Integers,
    ranks: Integers,
    bins: Integers,
    begins: Integers,
) -> dict[int, float]:
    """Give the elements of the border bins their parts; returns the values at the ranks asked for."""
    values: dict[int, float] = {}
    for index, members, lower in _by_bin(places, keys, bins):
        begin = int(begins[index])
        end = begin + len(members)
        wanted, crossing = (among[(among >= begin) & (among < end)] for among in (ranks, borders))
        base = np.searchsorted(borders, begin, side="left")  # the part of what comes before every border in here
        if (first := int(lower[0])) == lower.min() == lower.max():  # one value alone, as ReLU's zeros
            _cut_ties(part, members, begin, borders)
            values.update({int(rank): _value(index, first) for rank in wanted})
            continue
        counts = np.bincount(lower, minlength=_BINS)
        ends = np.cumsum(counts) + begin
        found = np.searchsorted(ends, wanted, side="right")
        values.update({int(rank): _value(index, int(low)) for rank, low in zip(wanted, found, strict=True)})
        cuts = np.searchsorted(ends, crossing, side="right")  # the lower half that each border goes through
        part[members] = base + np.searchsorted(cuts, lower, side="right")
        for low in np.unique(cuts):
            _cut_ties(part, members[lower == low], int(ends[low] - counts[low]), borders)
    return values


def _by_bin(
    places: Integers, keys: npt.NDArray[np.int32], bins: Integers
) -> Iterator[tuple[int, Integers, npt.NDArray[np.int32]]]:
    """The elements of each border bin: their places, ascending, and the lower halves of their keys."""
    uppers = (keys >> 16) + _BINS // 2
    counts = np.bincount(uppers, minlength=_BINS)[bins]
    crowded = int(bins[counts.argmax()])  # by itself: there may be millions of equal values in it
    chosen = uppers == crowded
    yield crowded, places[chosen], keys[chosen] & 0xFFFF
    places, keys, uppers = places[~chosen], keys[~chosen], uppers[~chosen]
    order = np.argsort(uppers.astype(np.uint16), kind="stable")  # a radix sort
    places, keys = places[order], keys[order]
    start = 0
    for index, count in zip(bins, counts, strict=True):
        if index != crowded:
            yield int(index), places[start : start + count], keys[start : start + count] & 0xFFFF
            start += count


def _cut_ties(part: npt.NDArray[np.uint8], places: Integers, begin: int, borders: Integers) -> None:
    """Equal elements, in the order of their indices, take the ranks from ``begin`` on."""
    edges = np.clip(borders - begin, 0, len(places))
    for number, (start, end) in enumerate(zip([0, *edges], [*edges, len(places)], strict=True)):
        part[places[start:end]] = number


def _upper_halves(x: Tensor, size: int, *, by_size: bool) -> Iterator[Tensor]:
    """Block by block the upper 16 bits of the floats, as signed numbers counted from 0; the buffers are reused."""
    values = torch.empty(min(size, len(x)))
    halves = torch.empty(len(values), dtype=torch.int32)
    for block in torch.split(x, size):
        value, half = values[: len(block)], halves[: len(block)]
        if by_size:  # the bits of -|x| but for its sign: below half of the bins, as those of negative numbers
            torch.abs(block, out=value) if block.dtype == value.dtype else value.copy_(block).abs_()
            yield torch.bitwise_right_shift(value.view(torch.int32), 16, out=half)
        else:
            torch.add(block, 0.0, out=value)  # makes -0.0 the 0.0 that it equals
            yield torch.bitwise_right_shift(value.view(torch.int32), 16, out=half).add_(_BINS // 2)


# The order of the bins above by the values in them: negative floats are the larger the smaller their bits are.
_ASCENDING = np.concatenate([np.arange(_BINS // 2)[::-1], np.arange(_BINS // 2, _BINS)])


def _keys(values: Tensor) -> Tensor:
    """Integers in the order of the floats: the bits of a negative number, but for its sign, are turned over."""
    bits = values.view(torch.int32)
    return ((bits >> 31) & 0x7FFFFFFF).bitwise_xor_(bits)


def _value(upper: int, lower: int) -> float:
    key = ((upper - _BINS // 2) << 16) | lower
    bits = key if key >= 0 else (key ^ 0x7FFFFFFF) & 0xFFFFFFFF
    return float(np.array([bits & 0xFFFFFFFF], dtype=np.uint32).view(np.float32)[0])
