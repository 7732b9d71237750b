"""This project: rounded to nearest, and refined, with one word for how much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

REQUIREMENTS = None
WIDTHS = ("W8A8", "W4A8", "W4A4", "W3A3", "W4A4-8", "W3A3-8")
LIKE_OTHERS = ", image rounded, weights symmetric"  # as all others do; in 8 bits they always are
RECIPES = {"rounded": WIDTHS} | {
    f"--refine {effort}{grids}": WIDTHS[1:] if grids else WIDTHS
    for effort in ("fast", "best")
    for grids in ("", LIKE_OTHERS)
}


class Network:
    """A quantized network that answers."""

    def __init__(self, quantized: Any) -> None:
        self.quantized = quantized

    def __call__(self, images: Any) -> Any:
        return self.quantized.model(images)


def quantize(model: Any, batches: list[Any], bits: Any, recipe: str) -> Network:
    import ptq

    alike = recipe.endswith(LIKE_OTHERS)
    effort = recipe.removesuffix(LIKE_OTHERS).split()[-1] if "--refine" in recipe else "none"
    calibration = ptq.calibrate(model, batches)
    options = {"refine": effort, "batches": batches, "first_last": bits.outer}
    options |= {"diffuse_image": not alike, "symmetric_weights": alike}
    return Network(ptq.quantize(model, calibration, bits.weights, bits.activations, **options))


def export(network: Network, batches: list[Any], path: Path) -> None:
    import ptq

    ptq.export(network.quantized, path, batches[0], batches=batches)
