"""``ptq.quantize`` with refinement: one word says how much work goes into it."""

from __future__ import annotations

from typing import Any

from torch import nn

from ptq import quantization
from ptq.batches import Batches
from ptq.calibration import Calibration
from ptq.errors import InputError
from ptq.quantization import Quantized
from ptq.refinement.apply import refine as refine_by
from ptq.refinement.steps import steps_of


def quantize(
    model: nn.Module,
    calibration: Calibration,
    weights: int | None = 8,
    activations: int | None = 8,
    *,
    refine: str = "none",
    batches: Batches | None = None,
    seed: int = 0,
    **options: Any,
) -> Quantized:
    """Quantize a copy of the model; ``options`` are those of ``ptq.quantization.quantize``.

    ``refine`` says what follows rounding to nearest: ``none``; ``fast``, which refines layer by layer on the
    unlabelled ``batches``, and learns a small network as a whole for some steps; ``best``, which learns the layers of
    each block together, too, and the whole network for longer; or some of their steps alone (``"ranges,bias"``).
    """
    steps_of(refine)  # before any work is done
    plain = quantization.quantize(model, calibration, weights, activations, **options)
    if refine == "none":
        return plain
    if batches is None:
        raise InputError(f"refine = {refine!r} needs data: give batches=…, without labels if you like")
    return refine_by(model, calibration, plain.scheme, batches, refine, seed=seed, observer=plain.observer)
