"""A random sample of the rows that a layer multiplies its weight with, bounded whatever the number of batches.

A row is the patch ``[C, k]`` that one output position of a convolution reads, k being the number of its taps; one
token of a Linear and one input pixel of a transposed convolution, with k = 1. Which samples of the stream and which
positions of a map are taken depends on a seed, the samples' indices and the map's shape alone: not on how the stream
is cut into batches, nor on their order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ptq import channels

BLOCK = 8  # consecutive samples that are kept or left together
BLOCKS = 16  # kept
CAPACITY = BLOCK * BLOCKS  # samples
BUDGET = 2**18  # elements for each layer, unless one row of each sample needs more
MOST_ROWS = 16  # of one sample
_LARGEST = torch.finfo(torch.float16).max


class SampleReservoir:
    """Decides which samples of a stream are kept, for all layers alike: a uniform random choice of whole blocks.

    Block i holds the samples 8i … 8i + 7 and has the priority ``hash(seed, i)``; kept are the 16 blocks of the lowest
    priorities among those seen so far. Each has one of 16 slots, 8 places each, and leaves it to the block that
    drives it out.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._slots: dict[int, int] = {}  # block → slot
        self._worst: list[tuple[int, int]] = []  # a heap of (-priority, block): first who goes next
        self._indices: list[int | None] = [None] * CAPACITY  # place → index of the sample in the stream

    def pick(self, first_index: int, samples: int) -> list[tuple[int, int]]:
        """What to store of a batch that starts at this index of the stream: (place, index in the batch), ascending.

        Whatever was stored at such a place before is to be overwritten.
        """
        end = first_index + samples
        blocks = range(first_index // BLOCK, -(-end // BLOCK))
        for block in blocks:
            self._admit(block)
        picks = []
        for block in blocks:  # only now: a block may have been driven out by a later one of the same batch
            slot = self._slots.get(block)
            if slot is None:
                continue
            for index in range(max(first_index, block * BLOCK), min(end, (block + 1) * BLOCK)):
                place = slot * BLOCK + index % BLOCK
                self._indices[place] = index
                picks.append((place, index - first_index))
        return picks

    def expect(self, samples: int) -> None:
        """So many samples will come for sure: what they would drive out need not be stored in the meantime."""
        for block in range(samples // BLOCK):
            self._admit(block)

    def held(self) -> dict[int, int]:
        """Index in the stream → place, for all samples that are kept, in the order of the stream."""
        return dict(sorted((index, place) for place, index in enumerate(self._indices) if index is not None))

    def kept(self, indices: Iterable[int]) -> set[int]:
        """Of samples that several reservoirs keep, each from its part of a stream, those that one would have kept."""
        indices = set(indices)
        blocks = sorted({index // BLOCK for index in indices}, key=lambda block: priority(self.seed, block))[:BLOCKS]
        return {index for index in indices if index // BLOCK in blocks}

    def _admit(self, block: int) -> None:
        if block in self._slots:
            return
        entry = (-priority(self.seed, block), block)
        if len(self._slots) < BLOCKS:
            self._slots[block] = len(self._slots)
            heapq.heappush(self._worst, entry)
        elif entry > self._worst[0]:
            _, driven_out = heapq.heapreplace(self._worst, entry)
            slot = self._slots[block] = self._slots.pop(driven_out)
            self._indices[slot * BLOCK : (slot + 1) * BLOCK] = [None] * BLOCK


class RowSample:
    """The sampled rows of one layer, as float16 in a buffer that is allocated once.

    Each of the reservoir's places has ``J = clamp(budget // (128 · C · k), 1, 16)`` rows, from as many random output
    positions: the same ones for all samples with maps of one shape.
    """

    def __init__(self, layer: channels.Layer, budget: int = BUDGET, seed: int = 0) -> None:
        self.seed = seed
        self.channels = channels.input_channels(layer)
        self._windows = windows_of(layer)
        self._padding_mode = "zeros" if isinstance(layer, nn.Linear) else layer.padding_mode
        self._tokens = isinstance(layer, nn.Linear)
        self.taps = math.prod(window.taps for window in self._windows)
        self.rows_per_sample = min(max(budget // (CAPACITY * self.channels * self.taps), 1), MOST_ROWS)
        # The order in which an input has its elements: gathering and storing then move whole runs.
        row = (self.rows_per_sample, self.channels)
        shape = row if self._tokens else (self.channels, self.rows_per_sample * self.taps)
        self._buffer = torch.empty(CAPACITY, *shape, dtype=torch.float16, device=layer.weight.device)
        # Memory for the first plan. Small tensors that stayed behind in the middle of a forward pass would split the
        # blocks that its activations are about to reuse, and slow the network itself down.
        size = self.rows_per_sample * self.taps
        self._memory = torch.empty(size, dtype=torch.int64), torch.empty(size, dtype=torch.bool)
        self._stored: list[_Plan | None] = [None] * CAPACITY  # how the rows at each place were taken
        self._plans: dict[tuple[int, ...], _Plan] = {}

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def store(
        self,
        x: Tensor,
        picks: Sequence[tuple[int, int]],
        axis: int,
        *,
        mask: Tensor | None = None,
        samples: int | None = None,
    ) -> None:
        """Keep rows of the picked samples of an input whose channels lie along ``axis``.

        ``mask`` says which tokens of a Linear's input ``[N, T, C]`` are valid, ``[N, T]``; an input of another shape
        has nothing to do with it. ``samples`` is the size of the batch, for layers that see each sample as several
        (windows, frames). A layer that runs more than once in a batch keeps the rows of the last time.
        """
        if not picks or not x.numel():
            return
        x = x.detach()
        if axis % x.dim() == 0:  # unbatched: one sample
            x = x.unsqueeze(0)
        several = len(x) // samples if samples and len(x) % samples == 0 else 1
        valid = mask if self._tokens and mask is not None and x.dim() == 3 and mask.shape == x.shape[:2] else None
        if self._tokens and valid is None:
            x, several = x.reshape(len(x) // several, -1, self.channels), 1  # [N, T, C]
        for place, entry, count in _runs(picks):
            chosen = slice(entry * several, (entry + count) * several, several)
            found = x[chosen]
            if len(found) < count:  # an input with fewer samples than the batch
                self._stored[place : place + count] = [None] * count
            if not len(found):
                continue
            if valid is not None:
                self._store_valid_tokens(found, valid[chosen], place)
            elif self._tokens:
                self._store_tokens(found, place)
            else:
                self._store_patches(found, place)

    def rows(self, order: Sequence[int]) -> Tensor:
        """The rows at these places, one after the other: ``[R, C, k]``, float16."""
        found = [torch.empty(0, self.channels, self.taps, dtype=torch.float16)]
        for plan, places in groupby(order, lambda place: self._stored[place]):
            if plan is not None:
                found.append(self._rows_at(list(places), plan).cpu())
        return torch.cat(found)

    def count(self, place: int) -> int:
        """How many rows there are at a place."""
        plan = self._stored[place]
        return plan.rows if plan is not None else 0

    def _rows_at(self, places: list[int], plan: _Plan) -> Tensor:
        """The rows at places of one plan."""
        # What float16 can't hold became Inf.
        stored = self._buffer[places].clamp_(-_LARGEST, _LARGEST)
        if self._tokens:
            return stored[:, : plan.rows].reshape(-1, self.channels, 1)
        patches = stored[:, :, : len(plan.index)]
        if plan.outside is not None:
            patches.masked_fill_(plan.outside, 0)
        patches = patches.reshape(len(places), self.channels, plan.rows, self.taps)
        return patches.transpose(1, 2).flatten(0, 1)

    def _store_tokens(self, x: Tensor, place: int) -> None:
        plan = self._plan((x.shape[1],))
        self._buffer[place : place + len(x), : plan.rows] = x.index_select(1, plan.index)
        self._stored[place : place + len(x)] = [plan] * len(x)

    def _store_valid_tokens(self, x: Tensor, valid: Tensor, place: int) -> None:
        for tokens, tokens_valid in zip(x, valid, strict=True):
            indices = tokens_valid.nonzero().flatten()
            plan = self._plan((len(indices),))
            self._buffer[place, : plan.rows] = tokens[indices[plan.index]]
            self._stored[place] = plan
            place += 1

    def _store_patches(self, x: Tensor, place: int) -> None:
        if self._padding_mode != "zeros":
            ends = [end for window in reversed(self._windows) for end in window.padding]
            x = F.pad(x, ends, self._padding_mode)
        plan = self._plan(tuple(x.shape[2:]))
        # Gathering takes half the time of advanced indexing or of index_select along the last axis.
        patches = x.flatten(2).gather(2, plan.index.expand(len(x), self.channels, -1))  # [n, C, J·k]
        self._buffer[place : place + len(x), :, : len(plan.index)] = patches
        self._stored[place : place + len(x)] = [plan] * len(x)

    def _plan(self, sizes: tuple[int, ...]) -> _Plan:
        plan = self._plans.get(sizes)
        if plan is None:
            windows = self._windows
            if self._padding_mode != "zeros":  # the map is padded already
                windows = [window.without_padding() for window in windows]
            plan = _plan(tuple(windows), sizes, self.rows_per_sample, self.seed, self._buffer.device)
            if not self._plans and self._buffer.device.type == "cpu":
                plan = plan.moved_to(*self._memory)
            self._plans[sizes] = plan
        return plan


@dataclass(frozen=True)
class _Window:
    """What one output position reads along one axis."""

    taps: int = 1
    stride: int = 1
    dilation: int = 1
    padding: tuple[int, int] = (0, 0)  # before, after

    def outputs(self, size: int) -> int:
        return max(0, (size + sum(self.padding) - self.dilation * (self.taps - 1) - 1) // self.stride + 1)

    def reads(self, outputs: Tensor) -> Tensor:
        """Where these output positions read, counted without padding: ``[positions, taps]``."""
        first = outputs * self.stride - self.padding[0]
        return first[:, None] + self.dilation * torch.arange(self.taps)

    def without_padding(self) -> _Window:
        return _Window(self.taps, self.stride, self.dilation)


@dataclass(frozen=True, eq=False)
class _Plan:
    """Which elements of a map of one shape the rows are made of."""

    rows: int  # J, or all positions of a map that has fewer
    index: Tensor  # [J · k], into the flattened map
    outside: Tensor | None  # [J · k], true where the index stands for padding; None where it never does

    def moved_to(self, index: Tensor, outside: Tensor) -> _Plan:
        """The same plan in memory that is there already."""
        size = len(self.index)
        outside_moved = None if self.outside is None else outside[:size].copy_(self.outside)
        return _Plan(self.rows, index[:size].copy_(self.index), outside_moved)


def priority(seed: int, block: int) -> int:
    """A 64-bit hash of both: the lower, the sooner is the block kept."""
    return _mixed(_mixed(seed) + block)


def _mixed(x: int) -> int:
    """One step of splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _positions(outputs: Sequence[int], count: int, seed: int) -> Tensor:
    """Random positions of a map, ascending, none twice: a function of the map's shape and the seed."""
    state = _mixed(seed)
    for size in outputs:
        state = _mixed(state + size)
    generator = torch.Generator().manual_seed(state)
    return torch.randperm(math.prod(outputs), generator=generator)[:count].sort().values


@lru_cache(maxsize=256)  # networks repeat their layers
def _plan(windows: tuple[_Window, ...], sizes: tuple[int, ...], count: int, seed: int, device: torch.device) -> _Plan:
    outputs = [window.outputs(size) for window, size in zip(windows, sizes, strict=True)]
    chosen = _positions(outputs, count, seed)
    rows = len(chosen)
    index = torch.zeros(rows, 1, dtype=torch.int64)  # [J, taps so far]
    outside = torch.zeros(rows, 1, dtype=torch.bool)
    for window, size, output in zip(windows, sizes, torch.unravel_index(chosen, outputs), strict=True):
        reads = window.reads(output)[:, None]  # [J, 1, taps]
        outside = (outside[:, :, None] | (reads < 0) | (reads >= size)).flatten(1)
        index = (index[:, :, None] * size + reads.clamp(0, size - 1)).flatten(1)
    return _Plan(rows, index.flatten().to(device), outside.flatten().to(device) if bool(outside.any()) else None)


def windows_of(layer: channels.Layer) -> list[_Window]:
    if isinstance(layer, nn.Linear):
        return [_Window()]
    if layer.transposed:
        return [_Window() for _ in layer.kernel_size]
    reach = [dilation * (taps - 1) for taps, dilation in zip(layer.kernel_size, layer.dilation, strict=True)]
    if layer.padding == "same":
        padding = [(total // 2, total - total // 2) for total in reach]
    elif isinstance(layer.padding, str):  # "valid"
        padding = [(0, 0) for _ in reach]
    else:
        padding = [(size, size) for size in layer.padding]
    geometry = zip(layer.kernel_size, layer.stride, layer.dilation, padding, strict=True)
    return [_Window(*of_axis) for of_axis in geometry]


def _runs(picks: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Picks in which place and index both go up by one, together: (first place, first index, length)."""
    start, length = picks[0], 0
    for place, index in picks:
        if (place, index) != (start[0] + length, start[1] + length):
            yield *start, length
            start, length = (place, index), 0
        length += 1
    yield *start, length
