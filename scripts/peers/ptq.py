"""This project: ``ptq quantize --refine none``, ``fast`` and ``best``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

REQUIREMENTS = None
RECIPES = {f"--refine {effort}": ("W8A8", "W4A8", "W4A4", "W3A3") for effort in ("none", "fast", "best")}


class Network:
    """A quantized network that answers."""

    def __init__(self, quantized: Any) -> None:
        self.quantized = quantized

    def __call__(self, images: Any) -> Any:
        return self.quantized.model(images)


def quantize(model: Any, batches: list[Any], weights: int, activations: int, recipe: str) -> Network:
    import ptq

    effort = recipe.removeprefix("--refine ")
    calibration = ptq.calibrate(model, batches)
    return Network(ptq.quantize(model, calibration, weights, activations, refine=effort, batches=batches))


def export(network: Network, batches: list[Any], path: Path) -> None:
    import ptq

    ptq.export(network.quantized, path, batches[0], batches=batches)
