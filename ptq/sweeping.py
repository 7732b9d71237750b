"""α swept: one calibration, then smooth, quantize and evaluate for each α and each number of bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from tqdm import tqdm

from ptq.batches import Batches, limited
from ptq.calibration import Calibration
from ptq.errors import InputError
from ptq.evaluation import evaluate, layer_errors
from ptq.quantization import Bits, Scheme
from ptq.quantization.apply import quantize_by
from ptq.smoothing import ALPHAS, checked_alpha, smooth

_ERROR_BATCHES = 2


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Top-1 in percent with its 95 % interval."""

    top1: float
    interval: tuple[float, float]
    n: int


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One quantized network of a sweep; ``alpha`` is None for the one without smoothing."""

    bits: str
    alpha: float | None
    accuracy: Accuracy
    changed: int  # answers that differ from the float network's
    layer_l1: dict[str, float]  # relative L1 error of each layer by itself


@dataclass
class Sweep:
    """The points of a sweep so far, and what they were measured on."""

    model_fingerprint: str
    data_fingerprint: str
    images: int | None = None  # only the first ones of the evaluation data, or all
    reference: Accuracy | None = None  # the float network
    points: list[SweepPoint] = field(default_factory=list)

    @property
    def measured_on(self) -> tuple[str, str, int | None]:
        return self.model_fingerprint, self.data_fingerprint, self.images

    def find(self, bits: str, alpha: float | None) -> SweepPoint | None:
        return next((point for point in self.points if (point.bits, point.alpha) == (bits, alpha)), None)

    def curve(self, bits: str) -> list[SweepPoint]:
        """The smoothed points of one number of bits, by ascending α."""
        return sorted((p for p in self.points if p.bits == bits and p.alpha is not None), key=lambda p: p.alpha or 0.0)

    def best(self, bits: str) -> SweepPoint:
        """The α with the highest accuracy; of equal ones that with the smallest mean layer error."""
        return max(self.curve(bits), key=lambda p: (p.accuracy.top1, -sum(p.layer_l1.values())))

    @property
    def bits(self) -> list[str]:
        return list(dict.fromkeys(point.bits for point in self.points))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "sweep", "schema": 1, "observer": "max", **asdict(self)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Sweep:
        try:
            return cls(
                content["model_fingerprint"],
                content["data_fingerprint"],
                content["images"],
                _accuracy(content["reference"]) if content["reference"] else None,
                [SweepPoint(**{**point, "accuracy": _accuracy(point["accuracy"])}) for point in content["points"]],
            )
        except (KeyError, TypeError) as error:
            raise InputError(f"the sweep file is incomplete ({error}): delete it and sweep again") from error


def _accuracy(content: dict[str, Any]) -> Accuracy:
    return Accuracy(top1=content["top1"], interval=tuple(content["interval"]), n=content["n"])


def check_plan(alphas: Sequence[float], bits: Sequence[str], images: int | None) -> None:
    """Refuse what can't be swept."""
    if not alphas:
        raise InputError("no α to sweep: give at least one from 0 to 1")
    limited((), images)
    for alpha in alphas:
        checked_alpha(alpha)
    for text in bits:
        Bits.parse(text)


def sweep(
    model: nn.Module,
    calibration: Calibration,
    batches: Batches,
    labelled_batches: Batches,
    alphas: Sequence[float] = ALPHAS,
    weights: int | None = 4,
    activations: int | None = 4,
    *,
    bits: Sequence[str] | None = None,
    images: int | None = None,
    resume: Sweep | None = None,
    on_point: Callable[[Sweep], None] | None = None,
    progress: bool = False,
) -> Sweep:
    """Measure accuracy and layer errors for each α, without smoothing, and in float.

    ``bits`` sweeps several widths (``["W8A8", "W4A4"]``) in place of ``weights`` and ``activations``. Points that
    ``resume`` has are not measured again; ``on_point`` is called after each new one, with all there is so far.
    Ranges are the calibration's maxima, which smoothing rescales exactly: the data is not run through again.
    """
    widths = [Bits.parse(text) for text in bits] if bits else [Bits(weights, activations)]
    check_plan(alphas, [str(width) for width in widths], images)
    calibration.check(model)
    result = Sweep(calibration.model_fingerprint, calibration.data_fingerprint, images)
    if resume is not None and resume.measured_on == result.measured_on:
        result = resume
    labelled_batches = limited(labelled_batches, images)
    plan = [(alpha, width) for alpha in (None, *alphas) for width in widths if not result.find(str(width), alpha)]
    if not plan and result.reference is not None:
        return result
    float_answers = evaluate(model, labelled_batches, progress="float" if progress else None)
    result.reference = Accuracy(top1=float_answers.top1, interval=float_answers.interval, n=float_answers.n)
    smoothed_alpha, source, statistics = None, model, calibration
    for alpha, width in tqdm(plan, "sweep", unit="point", disable=not progress):
        if alpha != smoothed_alpha:
            smoothed = smooth(model, calibration, alpha)
            smoothed_alpha, source, statistics = alpha, smoothed.model, smoothed.calibration
        quantized = quantize_by(Scheme(bits=width), source, statistics, observer="max").model
        answers = evaluate(quantized, labelled_batches)
        errors = layer_errors(model, quantized, batches, max_batches=_ERROR_BATCHES, accumulated=False)
        result.points.append(
            SweepPoint(
                bits=str(width),
                alpha=alpha,
                accuracy=Accuracy(top1=answers.top1, interval=answers.interval, n=answers.n),
                changed=answers.against(float_answers).changed,
                layer_l1={name: error.isolated.l1 for name, error in errors.items()},
            )
        )
        if on_point is not None:
            on_point(result)
    return result
