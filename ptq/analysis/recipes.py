"""A road from a float network to a quantized one: as something to build, and as the commands that build it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from ptq.batches import Batches
from ptq.calibration import Calibration, calibrate
from ptq.quantization import Bits, Quantized, Scheme
from ptq.quantization.apply import quantize_by
from ptq.ranges import HISTOGRAM_RANGES
from ptq.refinement import refine as refine_network
from ptq.smoothing import Explicit, Smoothed, smooth
from ptq.sweeping import AUTO, Alpha


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a network is calibrated, smoothed, quantized and refined."""

    scheme: Scheme
    observer: str = "max"
    batches: int = 200  # of the calibration
    alpha: Alpha = None  # a number; "auto" or "auto+clip", by layer; "equalize"; None: not smoothed
    explicit: Explicit = "allow"  # where smoothing can't be folded
    refine: str = "none"

    @classmethod
    def of(cls, calibration: Calibration, quantized: Quantized, smoothed: Smoothed | None) -> Recipe:
        """The recipe of a network that is there already."""
        statistics = smoothed.calibration if smoothed else calibration
        alpha: Alpha = smoothed.alpha if smoothed else None
        if alpha == "auto" and any(
            layer.activation_clip != 1 or layer.weight_clip != 1 for layer in statistics.layers.values()
        ):
            alpha = "auto+clip"
        return cls(
            scheme=quantized.scheme,
            observer=quantized.observer,
            batches=calibration.batches,
            alpha=alpha,
            explicit=smoothed.explicit if smoothed else "allow",
            refine=quantized.refine,
        )

    def commands(self, current: Recipe, where: str = "") -> list[str]:
        """What to run in a folder whose network was made by the ``current`` recipe; ``where`` names the folder."""
        lines = []
        calibrated_anew = (self.batches, self.observer) != (current.batches, current.observer)
        if calibrated_anew:
            lines.append(f"ptq calibrate --batches {self.batches} --observer {self.observer}")
        if self.alpha is not None and (calibrated_anew or self.alpha != current.alpha):
            how = self.alpha if isinstance(self.alpha, str) else f"{self.alpha:g}"
            if how in AUTO:
                how = f"auto --bits {self.scheme.bits}{' --clip' if self.alpha == 'auto+clip' else ''}"
            lines.append(f"ptq smooth --alpha {how}{' --explicit never' if self.explicit == 'never' else ''}")
        lines.append(" ".join(["ptq quantize", *scheme_options(self.scheme), *self._quantize_options]))
        return [f"{line} {where}".strip() for line in lines]

    @property
    def _quantize_options(self) -> Iterator[str]:
        yield "--no-smooth" if self.alpha is None else "--smooth"
        yield f"--refine {self.refine}"


def scheme_options(scheme: Scheme) -> Iterator[str]:
    """The options of ``ptq quantize`` that say this scheme."""
    bits, default = scheme.bits, Scheme()
    if bits.weight_format or bits.activation_format:
        yield f"--weights {_width(bits.weights)} --activations {_width(bits.activations)}"
    else:
        yield f"--bits {_shorthand(bits)}"
    for option, text in (("weight-format", bits.weight_format), ("activation-format", bits.activation_format)):
        if text:
            yield f"--{option} {shlex.quote(text)}"
    if scheme.first_last is not None:
        yield f"--first-last {scheme.first_last}"
    patterns = () if scheme.include == default.include else scheme.include
    for option, values in (("include", patterns), ("exclude", scheme.exclude)):
        yield from (f"--{option} {shlex.quote(value)}" for value in values)
    for pattern, width in scheme.overrides:
        yield f"--override {shlex.quote(f'{pattern}={_shorthand(width)}')}"
    if scheme.symmetric_activations:
        yield "--symmetric"
    if scheme.symmetric_weights:
        yield "--symmetric-weights"
    if not scheme.fold_batchnorm:
        yield "--keep-batchnorm"
    if not scheme.diffuse_image:
        yield "--no-diffuse"


def _width(bits: int | None) -> str:
    return "float" if bits is None else str(bits)


def _shorthand(bits: Bits) -> str:
    return f"W{_width(bits.weights)}A{_width(bits.activations)}"


@dataclass
class Kitchen:
    """Builds recipes; a calibration that several of them need is made once."""

    model: nn.Module
    calibration: Calibration  # the one that is there
    batches: Batches
    _calibrations: dict[tuple[int, bool], Calibration] = field(default_factory=dict)

    @cached_property
    def _has_histograms(self) -> bool:
        return all(layer.histogram is not None for layer in self.calibration.layers.values())

    def build(self, recipe: Recipe) -> Quantized:
        calibration, model = self._calibrated(recipe), self.model
        scheme = recipe.scheme
        if recipe.alpha is not None:
            smoothed = smooth(
                model,
                calibration,
                "auto" if recipe.alpha in AUTO else recipe.alpha,  # type: ignore[arg-type]
                weights=scheme.bits.weights,
                activations=scheme.bits.activations,
                clip=recipe.alpha == "auto+clip",
                explicit=recipe.explicit,
                batches=self.batches if recipe.observer in HISTOGRAM_RANGES else None,
            )
            model, calibration = smoothed.model, smoothed.calibration
        if recipe.refine == "none":
            return quantize_by(scheme, model, calibration, recipe.observer)
        return refine_network(model, calibration, scheme, self.batches, recipe.refine, observer=recipe.observer)

    def _calibrated(self, recipe: Recipe) -> Calibration:
        needs_histograms = recipe.observer in HISTOGRAM_RANGES
        if recipe.batches == self.calibration.batches and (self._has_histograms or not needs_histograms):
            return self.calibration
        key = recipe.batches, needs_histograms
        if key not in self._calibrations:
            observer = recipe.observer if needs_histograms else "max"
            self._calibrations[key] = calibrate(self.model, self.batches, observer, recipe.batches)
        return self._calibrations[key]
