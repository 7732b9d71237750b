"""``ptq.quantize`` with refinement: one word says how much work goes into it."""

from __future__ import annotations

from typing import Any

from torch import nn

from ptq import channels, quantization
from ptq.batches import Batches
from ptq.calibration import Calibration
from ptq.errors import InputError
from ptq.quantization import Quantized, Scheme
from ptq.refinement.apply import refine as refine_by
from ptq.refinement.steps import steps_of
from ptq.smoothing import smooth
from ptq.smoothing.modules import is_smoothed

# How the step ``alpha`` smooths: nothing at run time, and α only where it lowers the error of a layer.
SMOOTHING: dict[str, Any] = {"alpha": "auto", "clip": True, "explicit": "never"}


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

    ``refine`` says what goes beyond rounding to nearest: ``none``; ``fast``, which smooths with α by layer what isn't
    smoothed yet, refines layer by layer on the unlabelled ``batches``, and learns a small network as a whole for some
    steps; ``best``, which learns the layers of each block together, too, and the whole network for longer; or some of
    their steps alone (``"ranges,bias"``). Where it smoothed, ``.smoothed`` is what the network was made from.
    """
    steps_of(refine)  # before any work is done
    plain = quantization.quantize(model, calibration, weights, activations, **options)
    if refine == "none":
        return plain
    if batches is None:
        raise InputError(f"refine = {refine!r} needs data: give batches=…, without labels if you like")
    bits, smoothed = plain.scheme.bits, None
    if smooths_first(refine, plain.scheme) and not any(is_smoothed(layer) for _, layer in channels.layers_of(model)):
        smoothed = smooth(
            model, calibration, weights=bits.weights, activations=bits.activations, batches=batches, **SMOOTHING
        )
        model, calibration = smoothed.model, smoothed.calibration
    refined = refine_by(model, calibration, plain.scheme, batches, refine, seed=seed, observer=plain.observer)
    refined.smoothed = smoothed
    return refined


def smooths_first(refine: str, scheme: Scheme) -> bool:
    """Whether α is among the steps, and there are bits to choose it for."""
    bits = scheme.bits
    formats, widths = (bits.weight_format, bits.activation_format), (bits.weights, bits.activations)
    return "alpha" in steps_of(refine) and not any(formats) and any(widths)
