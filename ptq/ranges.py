"""From statistics to a clipping range ``(low, high)`` for a number of bits: max, percentile, entropy, mse."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ptq.errors import InputError
from ptq.formats import affine
from ptq.observers import Histogram

PERCENTILE = 99.99
_CANDIDATES = 100


def percentile_range(histogram: Histogram, low: float, high: float, bits: int) -> tuple[float, float]:
    """Cut ``(100 - 99.99) %`` of the values off each end, to the edge of a bin; zero stays inside."""
    cumulative = histogram.counts.cumsum(0).double()
    total, edges = cumulative[-1], histogram.edges
    outside = total * (100 - PERCENTILE) / 100
    first = int(torch.searchsorted(cumulative, outside, right=True))
    last = int(torch.searchsorted(cumulative, total - outside))
    return min(0.0, max(low, float(edges[first]))), max(0.0, min(high, float(edges[last + 1])))


def mse_range(histogram: Histogram, low: float, high: float, bits: int) -> tuple[float, float]:
    """The share of the range, from 1/100 to all of it, whose quantizer has the least squared error."""
    used = histogram.counts.nonzero().flatten()
    counts, points = histogram.counts[used].double(), _points(histogram)[used]
    ratios = torch.arange(1, _CANDIDATES + 1, dtype=torch.float64) / _CANDIDATES
    scale, zero_point = affine.affine_parameters(ratios * low, ratios * high, bits)
    restored = affine.fake(points, scale.double()[:, None], zero_point.double()[:, None], *affine.code_range(bits))
    errors = ((restored - points) ** 2 * counts).sum(1)  # [ratios]
    best = float(ratios[int(errors.argmin())])
    return best * low, best * high


def entropy_range(histogram: Histogram, low: float, high: float, bits: int) -> tuple[float, float]:
    """The clip whose quantized distribution is nearest in Kullback-Leibler divergence (TensorRT's calibrator).

    For each candidate clip: P are the counts inside, the ones outside added to the outermost bins; Q spreads what
    falls into one of the 2^bits levels evenly over the bins that were not empty; the clip with the least
    ``Σ P log(P/Q)`` wins. The bin of zero takes its neighbour's count first: after a ReLU it says nothing about
    the shape of the rest.
    """
    counts, points = histogram.counts.double().clone(), _points(histogram)
    zero = len(counts) // 2
    counts[zero] = counts[zero + 1]
    best = (torch.inf, low, high)
    for candidate in range(_CANDIDATES, 0, -1):
        clip_low, clip_high = low * candidate / _CANDIDATES, high * candidate / _CANDIDATES
        inside = (points >= clip_low) & (points <= clip_high)
        kept = inside.nonzero().flatten()
        if len(kept) < 2**bits:
            break  # every bin has a level of its own from here on: the divergence can't tell clips apart
        reference = counts[kept].clone()
        raw = reference.clone()
        reference[0] += counts[: kept[0]].sum()
        reference[-1] += counts[kept[-1] + 1 :].sum()
        level = torch.arange(len(kept)) * 2**bits // len(kept)
        filled = (raw > 0).double()
        mass = torch.zeros(2**bits, dtype=torch.float64).index_add_(0, level, raw)
        bins = torch.zeros(2**bits, dtype=torch.float64).index_add_(0, level, filled)
        spread = (mass / bins.clamp(min=1))[level] * filled
        both = (reference > 0) & (spread > 0)
        p, q = reference / reference.sum(), spread / spread.sum()
        lost = p[(reference > 0) & (spread == 0)].sum()  # an empty outermost bin that received the outliers
        divergence = float((p[both] * (p[both] / q[both]).log()).sum() + lost * 1e3)
        if divergence < best[0]:
            best = (divergence, clip_low, clip_high)
    return best[1], best[2]


def _points(histogram: Histogram) -> Tensor:
    """Where a bin's values stand: its centre, but zero for the bin that starts there and holds ReLU's zeros."""
    points = histogram.centers
    points[len(points) // 2] = 0.0
    return points


HISTOGRAM_RANGES: dict[str, Callable[[Histogram, float, float, int], tuple[float, float]]] = {
    "percentile": percentile_range,
    "entropy": entropy_range,
    "mse": mse_range,
}
OBSERVERS = ("max", *HISTOGRAM_RANGES)


def checked_observer(name: str) -> str:
    if name not in OBSERVERS:
        raise InputError(f"observer {name!r} is unknown: choose one of {', '.join(OBSERVERS)}")
    return name
