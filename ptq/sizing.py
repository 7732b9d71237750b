"""How much calibration data is enough: one pass, looked at after each of several numbers of batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from torch import nn
from tqdm import tqdm

from ptq.batches import Batches, limited
from ptq.calibration import Calibration, calibrate_in_steps
from ptq.errors import InputError
from ptq.evaluation import evaluate
from ptq.quantization import Bits, Scheme
from ptq.quantization.apply import quantize_by
from ptq.smoothing import checked_alpha, smooth
from ptq.sweeping import Accuracy


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How far ranges still are from those of the largest calibration, as a share of these."""

    batches: int
    tensors_median: float  # over layers, of the range of the whole input
    tensors_max: float
    channels_median: float  # over all channels of all layers, of the largest value
    channels_max: float


@dataclass(frozen=True, kw_only=True)
class SizePoint:
    """One quantized network; ``alpha`` is None for the one without smoothing."""

    batches: int
    samples: int
    bits: str
    alpha: float | None
    accuracy: Accuracy


@dataclass(frozen=True, kw_only=True)
class SizeStudy:
    """Accuracy and range drift against the number of calibration batches."""

    observer: str
    reference: Accuracy  # the float network
    drifts: list[Drift]
    points: list[SizePoint]

    def curve(self, bits: str, alpha: float | None) -> list[SizePoint]:
        return [point for point in self.points if (point.bits, point.alpha) == (bits, alpha)]

    @property
    def bits(self) -> list[str]:
        return list(dict.fromkeys(point.bits for point in self.points))

    @property
    def alphas(self) -> list[float | None]:
        return list(dict.fromkeys(point.alpha for point in self.points))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "calibration sizes", "schema": 1, **asdict(self)}


def calibration_sizes(
    model: nn.Module,
    batches: Batches,
    labelled_batches: Batches,
    sizes: Sequence[int],
    bits: Sequence[str] = ("W8A8", "W4A4"),
    alpha: float = 0.5,
    *,
    observer: str = "max",
    metric: str = "top1",
    images: int | None = None,
    progress: bool = False,
) -> SizeStudy:
    """Calibrate on ever more batches, in one pass, and measure what that changes, with and without smoothing."""
    checked_alpha(alpha)
    widths = [Bits.parse(text) for text in bits]
    if len(set(sizes)) < 2:
        raise InputError(f"sizes {', '.join(map(str, sizes)) or 'none'}: give at least two, as 50,200,1500")
    labelled_batches = limited(labelled_batches, images)
    calibrations = calibrate_in_steps(model, batches, sorted(set(sizes)), observer, progress=progress)
    points = []
    plan = [(calibration, a, width) for calibration in calibrations for a in (None, alpha) for width in widths]
    for calibration, a, width in tqdm(plan, "measure", unit="network", disable=not progress):
        source, statistics = model, calibration
        if a is not None:
            with_histograms = batches if observer != "max" else None
            smoothed = smooth(model, calibration, a, batches=with_histograms)
            source, statistics = smoothed.model, smoothed.calibration
        answers = evaluate(quantize_by(Scheme(bits=width), source, statistics).model, labelled_batches, metric=metric)
        points.append(
            SizePoint(
                batches=calibration.batches,
                samples=calibration.samples,
                bits=str(width),
                alpha=a,
                accuracy=Accuracy.of(answers),
            )
        )
    return SizeStudy(
        observer=observer,
        reference=Accuracy.of(evaluate(model, labelled_batches, metric=metric)),
        drifts=[_drift(calibration, calibrations[-1]) for calibration in calibrations],
        points=points,
    )


def _drift(calibration: Calibration, largest: Calibration) -> Drift:
    """``|r - r_largest| / r_largest``; what never leaves zero has none."""
    tensors, by_channel = [], []
    for name, layer in calibration.layers.items():
        reference = largest.layers[name]
        low, high = layer.range("max", 8)
        last_low, last_high = reference.range("max", 8)
        if last_high > last_low:
            tensors.append(1 - (high - low) / (last_high - last_low))
        alive = reference.activation_absmax > 0
        by_channel += (1 - layer.activation_absmax[alive] / reference.activation_absmax[alive]).tolist()
    return Drift(
        batches=calibration.batches,
        tensors_median=median(tensors or [0.0]),
        tensors_max=max(tensors, default=0.0),
        channels_median=median(by_channel or [0.0]),
        channels_max=max(by_channel, default=0.0),
    )
