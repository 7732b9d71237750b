"""Streaming statistics: collect, merge, compute. Memory is O(channels + bins), whatever the number of batches.

Both collectors are exact under merging: batches, their order and the number of processes that share them don't
change a bit of the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from ptq.channels import activation_maximum, activation_range

BINS = 4096  # half of them below zero
_HALF = BINS // 2
_SMALLEST_EXPONENT = -126  # 2^126 is the largest power of two that float32 can still multiply by
# Elements per step: the work buffers stay in a core's cache, and torch does not wake its other threads, which would
# only wait while the counting goes on.
_BLOCK = 32768
_COPIES = 2  # interleaved counters


class ChannelRange:
    """Per-channel minimum and maximum of everything collected.

    Both are allocated beforehand and updated in place: small tensors that stayed behind in the middle of a forward
    pass would split the blocks that its activations are about to reuse, and slow the network itself down.
    """

    def __init__(self, channels: int, device: torch.device | None = None) -> None:
        self.minimum = torch.full((channels,), torch.inf, device=device)  # [C]
        self.maximum = torch.full((channels,), -torch.inf, device=device)  # [C]

    def split(self, counts: list[int]) -> list[ChannelRange]:
        """Ranges of so many channels each that are parts of this one."""
        parts = []
        for minimum, maximum in zip(torch.split(self.minimum, counts), torch.split(self.maximum, counts), strict=True):
            part = ChannelRange(0)
            part.minimum, part.maximum = minimum, maximum
            parts.append(part)
        return parts

    @property
    def is_finite(self) -> Tensor:
        """Whether each channel saw finite values alone, ``[C]``; one that saw none did."""
        return (self.minimum > -torch.inf) & (self.maximum < torch.inf)  # false for NaN too

    @property
    def finite(self) -> bool:
        return bool(self.is_finite.all())

    def collect(self, x: Tensor, axis: int, *, rectified: bool = False) -> tuple[Tensor, Tensor]:
        """Add a tensor; returns the minimum and the maximum of this tensor alone.

        ``rectified`` promises that nothing in it is below zero. Once every channel has seen a zero, the minimum is
        known then and not looked for; NaN and Inf show in the maximum. (A GPU would wait for the answer whether it
        is known, which costs more than looking.)
        """
        if rectified and not x.is_cuda and not self.minimum.any():
            minimum, maximum = self.minimum, activation_maximum(x.detach(), axis).to(self.maximum)
        else:
            minimum, maximum = (bound.to(self.minimum) for bound in activation_range(x.detach(), axis))
        torch.minimum(self.minimum, minimum, out=self.minimum)
        torch.maximum(self.maximum, maximum, out=self.maximum)
        return minimum, maximum

    def merge(self, other: ChannelRange) -> None:
        torch.minimum(self.minimum, other.minimum, out=self.minimum)
        torch.maximum(self.maximum, other.maximum, out=self.maximum)


@dataclass
class Histogram:
    """Counts over bins ``[j · 2^k, (j+1) · 2^k)`` for ``-2048 ≤ j < 2048``, k as small as the data allows.

    Widths are powers of two and edges multiples of them, so a wider histogram's bins are unions of a narrower
    one's: growing and merging move whole counts, and the result depends on the data alone.
    """

    exponent: int = _SMALLEST_EXPONENT  # k
    counts: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64))

    @property
    def width(self) -> float:
        return math.ldexp(1.0, self.exponent)

    @property
    def edges(self) -> Tensor:
        """The 4097 bin edges, float64."""
        return torch.arange(-_HALF, _HALF + 1, dtype=torch.float64) * self.width

    @property
    def centers(self) -> Tensor:
        return self.edges[:-1] + self.width / 2

    def collect(self, x: Tensor, minimum: float, maximum: float) -> None:
        """Add a tensor whose smallest and largest element are known."""
        self._widen(_exponent_for(max(-minimum, maximum)))
        flat = x.reshape(-1).float()
        # Consecutive equal values (ReLU's zeros) would wait for each other's increment: neighbours therefore count
        # in separate copies. Work buffers are reused from block to block; codes fit into 16 bits.
        offsets = _offsets(flat.device)[: len(flat)]
        scaled, index = torch.empty_like(offsets, dtype=torch.float32), torch.empty_like(offsets)
        inverse_width = math.ldexp(1.0, -self.exponent)
        counts = torch.zeros(_COPIES * BINS, dtype=torch.int64, device=flat.device)
        for block in torch.split(flat, _BLOCK):
            if len(block) < len(offsets):
                scaled, index, offsets = (buffer[: len(block)] for buffer in (scaled, index, offsets))
            torch.mul(block, inverse_width, out=scaled)  # exact: a power of two
            if minimum < 0:
                scaled.floor_()  # the conversion to integers truncates, which is floor only from zero up
            index.copy_(scaled).add_(offsets)
            counts += torch.bincount(index, minlength=_COPIES * BINS)
        self.counts += counts.view(_COPIES, BINS).sum(0).cpu()

    def merge(self, other: Histogram) -> None:
        self._widen(other.exponent)
        self.counts += other._counts_at(self.exponent)

    def _widen(self, exponent: int) -> None:
        if exponent > self.exponent:
            self.counts = self._counts_at(exponent)
            self.exponent = exponent

    def _counts_at(self, exponent: int) -> Tensor:
        places = (torch.arange(-_HALF, _HALF) >> min(exponent - self.exponent, 62)) + _HALF
        return torch.zeros_like(self.counts).index_add_(0, places, self.counts)


@lru_cache
def _offsets(device: torch.device) -> Tensor:
    """What turns a bin's signed index into its place in the copy of the counters that an element uses."""
    return (torch.arange(_BLOCK, dtype=torch.int16, device=device) % _COPIES) * BINS + _HALF


def _exponent_for(absmax: float) -> int:
    """The smallest k with ``absmax < 2048 · 2^k``."""
    _, exponent = math.frexp(absmax)  # absmax = m · 2^exponent, m < 1
    return max(exponent - int(math.log2(_HALF)), _SMALLEST_EXPONENT) if absmax > 0 else _SMALLEST_EXPONENT
