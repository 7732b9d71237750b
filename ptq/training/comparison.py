"""Networks that reach the same bits in different ways, side by side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from ptq import channels
from ptq.batches import limited
from ptq.evaluation import evaluate, layer_errors
from ptq.formats import format as read_format
from ptq.quantization import Quantized
from ptq.quantization.apply import quantize_by
from ptq.quantization.modules import ZERO_POINT
from ptq.smoothing.modules import NOTES
from ptq.storage import write_json
from ptq.tasks import Task
from ptq.training.baselines import baselines_in
from ptq.training.candidates import Candidate
from ptq.training.record import RankCorrelation, rank_correlations, recorded_lines

KIND, SCHEMA = "comparison", 1
UNTRAINED = "ptq"  # a network that was quantized without training for it


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One row. Scores are in percent, sizes in bytes; ``layers`` is the isolated L1 of each layer."""

    name: str
    training: str  # "ptq", or how it was trained: one of ptq.training.baselines.KINDS
    bits: str
    score: float
    interval: tuple[float, float]
    n: int
    float_score: float  # of the same network before it was quantized
    l1: float | None  # mean over layers, isolated
    accumulated_l1: float | None
    layers: dict[str, float]
    weight_bytes: int
    seconds: float | None  # that training took
    images: int | None  # that it saw, counted each time

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "interval": list(self.interval)}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rows, the float network first, and how recorded distances rank the compressed trainings."""

    task: str
    metric: str
    rows: list[Compared]
    correlations: dict[str, dict[str, RankCorrelation]]  # training → direction and measure → with the final score

    def save(self, path: Path) -> dict[str, Any]:
        """Write it; returns what was written."""
        content = {
            "kind": KIND,
            "schema": SCHEMA,
            "task": self.task,
            "metric": self.metric,
            "rows": [row.to_json() for row in self.rows],
            "correlations": {
                training: {measure: found.to_json() for measure, found in by_measure.items()}
                for training, by_measure in self.correlations.items()
            },
        }
        write_json(path, content)
        return content


def weight_bytes(model: nn.Module, quantized: Quantized | None = None) -> int:
    """Bytes of all parameters and buffers, quantized weights at their bits with a float32 scale per channel.

    Zero-points of weights, where there are any, take the bits of the weights. Weights in a number format take what the
    format's packed form takes. Notes that smoothing left on a layer, to measure its errors in the original scale, are
    not counted: the network runs without them.
    """
    total: int = sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in model.state_dict().items()
        if NOTES not in name.split(".")
    )
    if quantized is None:
        return total
    for name, layer in channels.layers_of(model):
        bits = quantized.bits.get(name)
        if bits is None:
            continue
        plain = layer.weight.numel() * layer.weight.element_size()
        if bits.weight_format:
            total += read_format(bits.weight_format).nbytes_for(tuple(layer.weight.shape)) - plain
        elif bits.weights is not None:  # its scales are buffers, and counted already
            total += -(-layer.weight.numel() * bits.weights // 8) - plain
            if hasattr(layer, ZERO_POINT):
                zero_points = layer.get_buffer(ZERO_POINT)
                total -= zero_points.numel() * zero_points.element_size()
                total += -(-zero_points.numel() * bits.weights // 8) if bool(zero_points.any()) else 0
    return total


def compare(
    task: Task, candidates: Iterable[Candidate], *, images: int | None = None, error_batches: int = 8
) -> list[Compared]:
    """Every candidate in few bits, and the task's own network in float, on the same images.

    The layers' errors are against the float network that the quantized one was made from: the one it was trained
    from (QAT), or the trained one itself (pipeline, DDP); of a smoothed one give the original as ``reference``.
    """
    labelled = limited(task.evaluation, images)
    reference = evaluate(task.model, labelled, metric=task.metric)
    rows = [
        Compared(
            name="float",
            training=UNTRAINED,
            bits="float",
            score=reference.score(),
            interval=reference.score_interval(),
            n=reference.n,
            float_score=reference.score(),
            l1=None,
            accumulated_l1=None,
            layers={},
            weight_bytes=weight_bytes(task.model),
            seconds=None,
            images=None,
        )
    ]
    before: dict[nn.Module, float] = {task.model: reference.score()}
    for candidate in candidates:
        if candidate.model not in before:
            before[candidate.model] = evaluate(candidate.model, labelled, metric=task.metric).score()
        quantized = candidate.quantized or quantize_by(candidate.scheme, candidate.model, candidate.calibration)
        answers = evaluate(quantized.model, labelled, metric=task.metric)
        errors = layer_errors(
            candidate.reference or candidate.model, quantized.model, task.calibration, max_batches=error_batches
        )
        accumulated = [error.accumulated.l1 for error in errors.values() if error.accumulated is not None]
        baseline = candidate.baseline
        rows.append(
            Compared(
                name=candidate.name,
                training=baseline.training if baseline else UNTRAINED,
                bits=str(quantized.scheme.bits),
                score=answers.score(),
                interval=answers.score_interval(),
                n=answers.n,
                float_score=before[candidate.model],
                l1=fmean(error.isolated.l1 for error in errors.values()),
                accumulated_l1=fmean(accumulated) if accumulated else None,
                layers={layer: error.isolated.l1 for layer, error in errors.items()},
                weight_bytes=weight_bytes(quantized.model, quantized),
                seconds=baseline.seconds if baseline else None,
                images=baseline.images if baseline else None,
            )
        )
    return rows


def correlations_in(folder: Path) -> dict[str, dict[str, RankCorrelation]]:
    """Over the baselines under a folder, by kind of training: which recorded distance ranks their final scores."""
    runs: dict[str, list[tuple[list[dict[str, Any]], float]]] = {}
    for name, baseline in baselines_in(folder).items():
        runs.setdefault(baseline.training, []).append((recorded_lines(folder / name), baseline.score))
    found = {training: rank_correlations(of_kind) for training, of_kind in runs.items()}
    present = {
        training: {measure: value for measure, value in by_measure.items() if value is not None}
        for training, by_measure in found.items()
    }
    return {training: by_measure for training, by_measure in present.items() if by_measure}
