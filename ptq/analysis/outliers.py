"""Channels that are much larger than the others of their tensor, and what they cost these."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ptq.calibration import Calibration, LayerStatistics

OUTLIER = 2.0  # times the median channel: costs that one a bit
_LISTED = 16


@dataclass(frozen=True, kw_only=True)
class OutlierChannel:
    """One channel of a layer's input."""

    channel: int
    magnitude: float  # max |x|
    times_median: float
    share: float  # of the range, that only this channel and the larger ones need


@dataclass(frozen=True, kw_only=True)
class Outliers:
    """The outlier channels of one layer's input, largest first."""

    layer: str
    channels: int  # of the input
    count: int  # of its outliers
    listed: list[OutlierChannel]
    median: float  # max |x| of the median channel
    share: float  # of the range that the outliers cost: 1 - range without them / range
    finer: float  # how many times finer the step would be without them: range / range without them

    @property
    def bits(self) -> float:
        """The bits that the other channels lose: log2(finer)."""
        return math.log2(self.finer)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "bits": self.bits}


def outliers(calibration: Calibration) -> list[Outliers]:
    """The layers whose inputs have outlier channels, those that lose most first."""
    found = (layer_outliers(name, layer) for name, layer in calibration.layers.items())
    return sorted((layer for layer in found if layer is not None), key=lambda layer: -layer.finer)


def layer_outliers(name: str, statistics: LayerStatistics) -> Outliers | None:
    """Channels with ``max |x|`` above twice that of the median channel that isn't always zero.

    The range is ``max(0, max_c maximum_c) - min(0, min_c minimum_c)``, as the quantizer has it.
    """
    magnitudes = statistics.activation_absmax
    alive = magnitudes[magnitudes > 0]
    if not len(alive):
        return None
    median = float(alive.median())
    largest_first = magnitudes.argsort(descending=True)
    indices = [int(c) for c in largest_first if float(magnitudes[c]) > OUTLIER * median]
    if not indices:
        return None
    # The range that is left without the k largest channels, for k = 0, 1, …
    low, high = statistics.minimum[largest_first].flip(0), statistics.maximum[largest_first].flip(0)
    widths = (high.cummax(0).values.clamp(min=0) - low.cummin(0).values.clamp(max=0)).flip(0)  # [C]
    left = [float(widths[k]) for k in range(1, len(indices) + 1)]  # the median channel is never among them
    whole = float(widths[0])
    listed = [
        OutlierChannel(
            channel=channel,
            magnitude=float(magnitudes[channel]),
            times_median=float(magnitudes[channel]) / median,
            share=1 - rest / whole,
        )
        for channel, rest in list(zip(indices, left, strict=True))[:_LISTED]
    ]
    return Outliers(
        layer=name,
        channels=len(magnitudes),
        count=len(indices),
        listed=listed,
        median=median,
        share=1 - left[-1] / whole,
        finer=whole / left[-1],
    )
