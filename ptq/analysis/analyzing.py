"""Everything there is to say about a quantized network: which layer, which channel, why, and what to do."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ptq.analysis.errors import LayerAnalysis, analyze_layers
from ptq.analysis.frames import frame
from ptq.analysis.outliers import Outliers, outliers
from ptq.analysis.prediction import DistanceStudy, distances_of_grid, distances_of_sweep
from ptq.analysis.recipes import Kitchen, Recipe
from ptq.analysis.remedies import Remedies, try_remedies
from ptq.analysis.sensitivity import Sensitivities, sensitivities
from ptq.analysis.subsets import after, count_samples
from ptq.batches import Batches
from ptq.calibration import Calibration
from ptq.quantization import Quantized
from ptq.smoothing import Smoothed
from ptq.sweeping import Sweep

SAMPLES = 512
BUDGET = 60.0
_SHARE = 3  # at most one of so many labelled samples tells the layers' sensitivity, the others judge the remedies


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What ``analyze`` found; what needs labels is None without them.

    ``to_json`` gives the content of analysis.json, ``kind`` "analysis", ``schema`` 1::

        network          bits, scheme (as in quantized.safetensors), observer, alpha, refine, calibration_batches
        budget           seconds allowed for each of the four measurements
        seconds          measurement → seconds taken
        layers           samples; layers: a list, in the order of execution, of
                         layer, kind, bits, isolated, accumulated; the last two: both, weights, activations → l1, sqnr
                         (dB), cosine, max; null where infinite
        outliers         a list, costliest first, of layer, channels, count, median, share, finer, bits and
                         listed: channel, magnitude, times_median, share
        sensitivities    null, or samples, seconds, reference and quantized (metric, score, interval, loss, n), and
                         layers: layer, enable, disable; each loss and score → change, interval
        remedies         null, or samples, reference, quantized, tried (best first) and skipped (name → reason);
                         tried: name, commands, metric, score, interval, loss, n, change (loss, score → change,
                         interval), clear, seconds
        distances        a list of source ("grid", "sweep"), metric, samples,
                         points: bits, alpha, distances (name → value, larger is worse), drop, loss_increase;
                         correlations (best first): distance, spearman, interval, within, with_loss
    """

    recipe: Recipe
    budget: float
    seconds: dict[str, float]
    samples: int  # that the layers' errors come from
    layers: list[LayerAnalysis]
    outliers: list[Outliers]
    sensitivities: Sensitivities | None = None
    remedies: Remedies | None = None
    distances: list[DistanceStudy] = field(default_factory=list)

    @property
    def title(self) -> str:
        """``W4A4``, and how it was smoothed and refined."""
        alpha = self.recipe.alpha
        smoothed = f"smoothed α = {alpha:g}" if isinstance(alpha, (int, float)) else f"smoothed {alpha}"
        parts = [
            str(self.recipe.scheme.bits),
            smoothed if alpha is not None else "",
            "refined" * (self.recipe.refine != "none"),
        ]
        return ", ".join(filter(None, parts))

    def to_json(self) -> dict[str, Any]:
        recipe = self.recipe
        return {
            "kind": "analysis",
            "schema": 1,
            "network": {
                "bits": str(recipe.scheme.bits),
                "scheme": recipe.scheme.to_json(),
                "observer": recipe.observer,
                "alpha": recipe.alpha,
                "refine": recipe.refine,
                "calibration_batches": recipe.batches,
            },
            "budget": self.budget,
            "seconds": self.seconds,
            "layers": {"samples": self.samples, "layers": [layer.to_json() for layer in self.layers]},
            "outliers": [layer.to_json() for layer in self.outliers],
            "sensitivities": self.sensitivities.to_json() if self.sensitivities else None,
            "remedies": self.remedies.to_json() if self.remedies else None,
            "distances": [study.to_json() for study in self.distances],
        }

    def to_frame(self) -> Any:
        """A DataFrame with one row for each layer: its errors, and its sensitivity where it was measured."""
        effects = {layer.layer: layer.to_json() for layer in self.sensitivities.layers} if self.sensitivities else {}
        return frame([{**layer.to_json(), **effects.get(layer.layer, {})} for layer in self.layers])


def analyze(
    model: nn.Module,
    quantized: Quantized,
    calibration: Calibration,
    batches: Batches,
    labelled_batches: Batches | None = None,
    *,
    smoothed: Smoothed | None = None,
    sweep: Sweep | None = None,
    max_batches: int = 8,
    samples: int = SAMPLES,
    budget: float = BUDGET,
    remedies: bool = True,
    distances: bool = True,
    metric: str = "top1",
    where: str = "",
    progress: bool = False,
) -> Analysis:
    """Explain a quantized network.

    >>> analysis = analyze(model, quantized, calibration, batches, labelled_batches)
    >>> analysis.to_frame()               # one row for each layer
    >>> analysis.remedies.tried[0].name   # what helps most

    ``model`` and ``calibration`` are those before smoothing; ``smoothed`` is what the network was quantized from, if
    it was. ``budget`` are the seconds each of the four measurements may take (building the remedies comes on top):
    the layers' errors on up to ``max_batches`` batches, their sensitivity on up to ``samples`` labelled samples, but
    no more than a third of them, the remedies on the others, and the distances. A ``sweep`` adds its points to these.
    """
    seconds: dict[str, float] = {}
    start = time.monotonic()

    def took(measurement: str) -> None:
        nonlocal start
        seconds[measurement] = round(time.monotonic() - start, 3)
        start = time.monotonic()

    recipe = Recipe.of(calibration, quantized, smoothed)
    layers, used = analyze_layers(
        model, quantized.model, batches, max_batches=max_batches, budget=budget, progress=progress
    )
    took("layers")
    found = None
    tried = None
    studies = [distances_of_sweep(sweep)] if sweep and sweep.reference and sweep.points else []
    kitchen = Kitchen(model, calibration, batches)
    if labelled_batches is not None:
        known = count_samples(labelled_batches)
        most = samples if known is None else max(1, min(samples, known // _SHARE))
        found = sensitivities(
            model, quantized.model, labelled_batches, samples=most, budget=budget, metric=metric, progress=progress
        )
        took("sensitivities")
        validation = after(labelled_batches, found.samples)
        if remedies:
            tried = try_remedies(
                model,
                quantized.model,
                recipe,
                kitchen,
                validation,
                sensitivities=found,
                where=where,
                budget=budget,
                metric=metric,
                progress=progress,
            )
            took("remedies")
        if distances:
            studies.insert(
                0, distances_of_grid(model, kitchen, validation, budget=budget, metric=metric, progress=progress)
            )
            took("distances")
    return Analysis(
        recipe=recipe,
        budget=budget,
        seconds=seconds,
        samples=used,
        layers=layers,
        outliers=outliers(smoothed.calibration if smoothed else calibration),
        sensitivities=found,
        remedies=tried,
        distances=studies,
    )
