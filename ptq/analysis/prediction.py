"""Which distance between tensors tells how much accuracy is lost: rank correlations over many quantized networks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import nn
from tqdm import tqdm

from ptq import distributed
from ptq.analysis.frames import frame
from ptq.analysis.measuring import Answers, answers
from ptq.analysis.recipes import Kitchen, Recipe
from ptq.batches import Batches, limited
from ptq.evaluation import LayerError, layer_errors
from ptq.quantization import Bits, Scheme
from ptq.sweeping import Alpha, Sweep

Floats = NDArray[np.float64]
WIDTHS = ("W8A8", "W8A6", "W6A6", "W5A5", "W8A4", "W4A8", "W4A4", "W3A4", "W3A3")
SMOOTHINGS: tuple[Alpha, ...] = (None, 0.5, "auto")
_RESAMPLES = 2000
_SILENCE = 150.0  # dB, in place of the infinite SQNR of a layer without error
_ENOUGH = 5  # points of one width that are worth a correlation of their own


@dataclass(frozen=True, kw_only=True)
class DistancePoint:
    """One quantized network: its distances, larger is worse, and what it loses."""

    bits: str
    alpha: Alpha
    distances: dict[str, float]
    drop: float  # of the score, in points
    loss_increase: float | None  # of the mean cross-entropy


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """Spearman's rank correlation of one distance with the drop of the score, with its 95 % interval."""

    distance: str
    spearman: float
    interval: tuple[float, float]
    within: float | None  # the mean over bit widths of the correlation among networks of that width alone
    with_loss: float | None  # the same correlation with the increase of the loss


@dataclass(frozen=True, kw_only=True)
class DistanceStudy:
    """Distances and drops over many networks; correlations with the best predictor first."""

    source: str  # where the networks come from
    metric: str
    samples: int
    points: list[DistancePoint]
    correlations: list[Correlation]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_frame(self) -> Any:
        """A DataFrame with one row for each network."""
        return frame([asdict(point) for point in self.points])


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Pearson's correlation of the ranks, equal values sharing their mean rank; nan where one is constant."""
    return float(_rank_correlations(np.array([x], float), np.array([y], float))[0])


def _rank_correlations(x: Floats, y: Floats) -> Floats:
    """Of each row of x with the row of y."""
    first, second = (rankdata(values, axis=1) for values in (x, y))
    first, second = (ranks - ranks.mean(1, keepdims=True) for ranks in (first, second))
    with np.errstate(invalid="ignore"):
        found: Floats = (first * second).sum(1) / np.sqrt((first**2).sum(1) * (second**2).sum(1))
    return found


def bootstrap_interval(x: Sequence[float], y: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile interval of ``spearman`` over resampled points."""
    draws = np.random.default_rng(seed).integers(len(x), size=(_RESAMPLES, len(x)))
    found = _rank_correlations(np.array(x, float)[draws], np.array(y, float)[draws])
    found = found[np.isfinite(found)]
    if not len(found):
        return -1.0, 1.0
    low, high = np.percentile(found, (2.5, 97.5))
    return float(low), float(high)


def correlations(points: Sequence[DistancePoint]) -> list[Correlation]:
    """How well each distance ranks the networks by their drop, the best first; none where no network loses more."""
    drops = [point.drop for point in points]
    losses = [point.loss_increase for point in points]
    if len(set(drops)) < 2:
        return []
    found = []
    for name in points[0].distances:
        values = [point.distances[name] for point in points]
        if len(set(values)) < 2:
            continue
        known = [loss for loss in losses if loss is not None]
        found.append(
            Correlation(
                distance=name,
                spearman=spearman(values, drops),
                interval=bootstrap_interval(values, drops),
                within=_within_widths(points, name),
                with_loss=spearman(values, known) if len(known) == len(values) and len(set(known)) > 1 else None,
            )
        )
    return sorted(found, key=lambda correlation: -correlation.spearman)


def _within_widths(points: Sequence[DistancePoint], name: str) -> float | None:
    found = []
    for bits in dict.fromkeys(point.bits for point in points):
        same = [point for point in points if point.bits == bits]
        values, drops = [point.distances[name] for point in same], [point.drop for point in same]
        if len(same) >= _ENOUGH and len(set(values)) > 1 and len(set(drops)) > 1:
            found.append(spearman(values, drops))
    return sum(found) / len(found) if found else None


def distances_of_sweep(sweep: Sweep) -> DistanceStudy:
    """The points of a sweep: it has each layer's relative L1 error by itself, on the calibration's sample."""
    assert sweep.reference is not None
    points = [
        DistancePoint(
            bits=point.bits,
            alpha=point.alpha,
            distances=dict(_over_layers("isolated L1", point.layer_l1.values())),
            drop=sweep.reference.score - point.accuracy.score,
            loss_increase=None,
        )
        for point in sweep.points
    ]
    reference = sweep.reference
    return DistanceStudy(
        source="sweep",
        metric=reference.metric,
        samples=reference.n,
        points=points,
        correlations=correlations(points),
    )


def distances_of_grid(
    model: nn.Module,
    kitchen: Kitchen,
    labelled_batches: Batches,
    *,
    widths: Sequence[str] = WIDTHS,
    alphas: Sequence[Alpha] = SMOOTHINGS,
    error_samples: int = 64,
    budget: float = 60.0,
    metric: str = "top1",
    progress: bool = False,
) -> DistanceStudy:
    """Quantize to each width with each smoothing, and measure all distances and the drop.

    All networks are measured on the samples that fit into ``budget`` seconds; building them comes on top.
    """
    plan = [(width, alpha) for alpha in alphas for width in widths]
    reference = answers(model, labelled_batches, metric, seconds=budget / (2 * len(plan)))
    same_samples = limited(labelled_batches, reference.n)
    unlabelled = limited(kitchen.batches, error_samples)
    base = Recipe(scheme=Scheme(), batches=kitchen.calibration.batches)

    def point(network: tuple[str, Alpha]) -> DistancePoint:
        width, alpha = network
        quantized = kitchen.build(replace(base, scheme=Scheme(bits=Bits.parse(width)), alpha=alpha)).model
        errors = layer_errors(model, quantized, unlabelled)
        return _point(width, alpha, errors, reference, answers(quantized, same_samples, metric))

    points = distributed.shared_out(tqdm(plan, "distances", unit="network", disable=not progress), point)
    return DistanceStudy(
        source="grid", metric=metric, samples=reference.n, points=points, correlations=correlations(points)
    )


def _point(
    bits: str, alpha: Alpha, errors: Mapping[str, LayerError], reference: Answers, found: Answers
) -> DistancePoint:
    distances: dict[str, float] = {}
    for where in ("isolated", "accumulated"):
        found_there = [getattr(error, where) for error in errors.values()]
        distances |= dict(_over_layers(f"{where} L1", (distance.l1 for distance in found_there)))
        noise = (-min(_SILENCE, distance.sqnr) for distance in found_there)
        distances |= dict(_over_layers(f"{where} -SQNR", noise))
        distances |= dict(_over_layers(f"{where} 1-cosine", (1 - distance.cosine for distance in found_there)))
        distances |= dict(_over_layers(f"{where} max", (distance.max for distance in found_there)))
    return DistancePoint(
        bits=bits,
        alpha=alpha,
        distances=distances,
        drop=reference.evaluation.score() - found.evaluation.score(),
        loss_increase=found.loss - reference.loss,
    )


def _over_layers(name: str, values: Iterable[float]) -> list[tuple[str, float]]:
    """Mean, worst and last of the layers' values."""
    listed = list(values)
    return [
        (f"{name}, mean", sum(listed) / len(listed)),
        (f"{name}, worst", max(listed)),
        (f"{name}, last layer", listed[-1]),
    ]
