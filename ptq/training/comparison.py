"""Networks that reach the same bits in different ways, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from torch import nn

from ptq import channels
from ptq.batches import limited
from ptq.calibration import Calibration, calibrate
from ptq.evaluation import evaluate, layer_errors
from ptq.formats import format as read_format
from ptq.quantization import Quantized, Scheme
from ptq.quantization.apply import quantize_by
from ptq.tasks import Task


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A network to compare: quantized already, or float and to be quantized after a calibration of its own."""

    model: nn.Module
    quantized: Quantized | None = None
    calibration: Calibration | None = None
    reference: nn.Module | None = None  # whose layers the errors are against: of a smoothed network, the original
    seconds: float | None = None  # that training it took


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One row. Scores are in percent, sizes in bytes; ``layers`` is the isolated L1 of each layer."""

    name: str
    bits: str
    score: float
    interval: tuple[float, float]
    n: int
    float_score: float  # of the same network before it was quantized
    l1: float | None  # mean over layers, isolated
    accumulated_l1: float | None
    layers: dict[str, float]
    weight_bytes: int
    seconds: float | None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "interval": list(self.interval)}


def weight_bytes(model: nn.Module, quantized: Quantized | None = None) -> int:
    """Bytes of all parameters and buffers, quantized weights at their bits with a float32 scale per channel.

    Weights in a number format take what the format's packed form takes.
    """
    total: int = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
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
    return total


def compare(
    task: Task,
    scheme: Scheme,
    candidates: Mapping[str, Candidate],
    *,
    images: int | None = None,
    error_batches: int = 8,
) -> list[Compared]:
    """Every candidate at the bits of the scheme, and the task's own network in float, on the same images.

    The layers' errors are against the float network that the quantized one was made from: the one it was trained
    from (QAT), or the trained one itself (pipeline, DDP); of a smoothed one give the original as ``reference``.
    """
    labelled = limited(task.evaluation, images)
    reference = evaluate(task.model, labelled, metric=task.metric)
    rows = [
        Compared(
            name="float",
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
        )
    ]
    for name, candidate in candidates.items():
        quantized = candidate.quantized
        if quantized is None:
            statistics = candidate.calibration or calibrate(candidate.model, task.calibration)
            quantized = quantize_by(scheme, candidate.model, statistics)
        answers = evaluate(quantized.model, labelled, metric=task.metric)
        errors = layer_errors(
            candidate.reference or candidate.model, quantized.model, task.calibration, max_batches=error_batches
        )
        accumulated = [error.accumulated.l1 for error in errors.values() if error.accumulated is not None]
        rows.append(
            Compared(
                name=name,
                bits=str(quantized.scheme.bits),
                score=answers.score(),
                interval=answers.score_interval(),
                n=answers.n,
                float_score=evaluate(candidate.model, labelled, metric=task.metric).score(),
                l1=fmean(error.isolated.l1 for error in errors.values()),
                accumulated_l1=fmean(accumulated) if accumulated else None,
                layers={layer: error.isolated.l1 for layer, error in errors.items()},
                weight_bytes=weight_bytes(quantized.model, quantized),
                seconds=candidate.seconds,
            )
        )
    return rows
