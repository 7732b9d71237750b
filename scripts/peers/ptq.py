"""This project: rounded to nearest, and smoothed with α and clips by layer and then refined, as README suggests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

REQUIREMENTS = None
EFFORTS = {"rounded": "none", "smoothed, --refine fast": "fast", "smoothed, --refine best": "best"}
RECIPES = dict.fromkeys(EFFORTS, ("W8A8", "W4A8", "W4A4", "W3A3", "W4A4-8", "W3A3-8"))


class Network:
    """A quantized network that answers."""

    def __init__(self, quantized: Any) -> None:
        self.quantized = quantized

    def __call__(self, images: Any) -> Any:
        return self.quantized.model(images)


def quantize(model: Any, batches: list[Any], bits: Any, recipe: str) -> Network:
    import ptq

    effort, calibration = EFFORTS[recipe], ptq.calibrate(model, batches)
    if effort != "none":
        smoothed = ptq.smooth(model, calibration, "auto", weights=bits.weights, activations=bits.activations, clip=True)
        model, calibration = smoothed.model, smoothed.calibration
    options = {"refine": effort, "batches": batches, "first_last": bits.outer}
    return Network(ptq.quantize(model, calibration, bits.weights, bits.activations, **options))


def export(network: Network, batches: list[Any], path: Path) -> None:
    import ptq

    ptq.export(network.quantized, path, batches[0], batches=batches)
