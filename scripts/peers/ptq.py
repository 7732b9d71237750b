"""This project: rounded to nearest, and smoothed with α and clips by layer and then refined, as README suggests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

REQUIREMENTS = None
EFFORTS = {"rounded": "none", "smoothed, --refine fast": "fast", "smoothed, --refine best": "best"}
RECIPES = dict.fromkeys(EFFORTS, ("W8A8", "W4A8", "W4A4", "W3A3"))


class Network:
    """A quantized network that answers."""

    def __init__(self, quantized: Any) -> None:
        self.quantized = quantized

    def __call__(self, images: Any) -> Any:
        return self.quantized.model(images)


def quantize(model: Any, batches: list[Any], weights: int, activations: int, recipe: str) -> Network:
    import ptq

    effort, calibration = EFFORTS[recipe], ptq.calibrate(model, batches)
    if effort != "none":
        smoothed = ptq.smooth(model, calibration, "auto", weights=weights, activations=activations, clip=True)
        model, calibration = smoothed.model, smoothed.calibration
    return Network(ptq.quantize(model, calibration, weights, activations, refine=effort, batches=batches))


def export(network: Network, batches: list[Any], path: Path) -> None:
    import ptq

    ptq.export(network.quantized, path, batches[0], batches=batches)
