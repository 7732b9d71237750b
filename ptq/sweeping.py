"""α swept: one calibration, then smooth, quantize and evaluate for each α and each number of bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from ptq.batches import Batches, limited
from ptq.calibration import Calibration
from ptq.errors import InputError
from ptq.evaluation import Evaluation, evaluate
from ptq.quantization import Bits, Scheme
from ptq.quantization.apply import quantize_by
from ptq.racing import Race, Shuffled, Stretch, check_race, hold
from ptq.smoothing import ALPHAS, Form, Smoothed, checked_alpha, sampled_errors, smooth

Alpha: TypeAlias = float | str | None  # a number; "auto" or "auto+clip", by layer; None: not smoothed
AUTO = ("auto", "auto+clip")
MEMORY = 2**30  # bytes that the images of a race, and its networks, may take


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """The score by the task's metric, in percent, with its 95 % interval."""

    metric: str
    score: float
    interval: tuple[float, float]
    n: int

    @classmethod
    def of(cls, answers: Evaluation) -> Accuracy:
        return cls(metric=answers.metric, score=answers.score(), interval=answers.score_interval(), n=answers.n)


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One quantized network of a sweep."""

    bits: str
    alpha: Alpha
    accuracy: Accuracy
    changed: int  # answers that differ from the float network's
    layer_l1: dict[str, float]  # relative L1 error of each layer by itself, on the calibration's sample


@dataclass
class Sweep:
    """The points of a sweep so far, and what they were measured on."""

    model_fingerprint: str
    data_fingerprint: str
    images: int | None = None  # only the first ones of the evaluation data, or all
    form: str = "fold"
    reference: Accuracy | None = None  # the float network
    points: list[SweepPoint] = field(default_factory=list)
    races: dict[str, Race] = field(default_factory=dict)  # by bits

    @property
    def measured_on(self) -> tuple[str, str, int | None, str]:
        return self.model_fingerprint, self.data_fingerprint, self.images, self.form

    def find(self, bits: str, alpha: Alpha) -> SweepPoint | None:
        return next((point for point in self.points if (point.bits, point.alpha) == (bits, alpha)), None)

    def curve(self, bits: str) -> list[SweepPoint]:
        """The points of one number of bits with one α for all layers, ascending."""
        points = ((point.alpha, point) for point in self.points if point.bits == bits)
        numbered = [(alpha, point) for alpha, point in points if isinstance(alpha, (int, float))]
        return [point for _, point in sorted(numbered, key=lambda pair: pair[0])]

    def best(self, bits: str) -> SweepPoint:
        """The one α with the highest accuracy; of equal ones that with the smallest mean layer error."""
        return max(self.curve(bits), key=lambda p: (p.accuracy.score, -sum(p.layer_l1.values())))

    @property
    def bits(self) -> list[str]:
        return list(dict.fromkeys(point.bits for point in self.points))

    def to_json(self) -> dict[str, Any]:
        races = {bits: race.to_json() for bits, race in self.races.items()}
        return {"kind": "sweep", "schema": 3, "observer": "max", **asdict(replace(self, races={})), "races": races}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Sweep:
        try:
            return cls(
                content["model_fingerprint"],
                content["data_fingerprint"],
                content["images"],
                content["form"],
                _accuracy(content["reference"]) if content["reference"] else None,
                [SweepPoint(**{**point, "accuracy": _accuracy(point["accuracy"])}) for point in content["points"]],
                {bits: Race.from_json(race) for bits, race in content.get("races", {}).items()},
            )
        except (KeyError, TypeError) as error:
            raise InputError(f"the sweep file is incomplete ({error}): delete it and sweep again") from error


def _accuracy(content: dict[str, Any]) -> Accuracy:
    return Accuracy(**{**content, "interval": tuple(content["interval"])})


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
    auto: bool = False,
    form: Form = "fold",
    metric: str = "top1",
    images: int | None = None,
    race: bool = False,
    resume: Sweep | None = None,
    on_point: Callable[[Sweep], None] | None = None,
    progress: bool = False,
) -> Sweep:
    """Measure accuracy and layer errors for each α, without smoothing, and in float.

    ``bits`` sweeps several widths (``["W8A8", "W4A4"]``) in place of ``weights`` and ``activations``; ``auto`` adds α
    by layer, without and with clipped ranges. With ``race`` the α compete on growing shares of the images, and only
    the winner of each width is measured on all of them (``Sweep.races``). Points that ``resume`` has are not measured
    again; ``on_point`` is called after each new one, with all there is so far. Every smoothed network is proven
    equivalent on the first of ``batches``. Ranges are the calibration's maxima, which smoothing rescales exactly, and
    layer errors come from its sample: the calibration data is not run through again.
    """
    widths = [Bits.parse(text) for text in bits] if bits else [Bits(weights, activations)]
    check_plan(alphas, [str(width) for width in widths], images)
    if race:
        check_race(alphas, metric)
    calibration.check(model)
    result = Sweep(calibration.model_fingerprint, calibration.data_fingerprint, images, form)
    if resume is not None and resume.measured_on == result.measured_on:
        result = resume
    labelled_batches = limited(labelled_batches, images)
    measured: dict[str, Sequence[float]] = {str(width): alphas for width in widths}
    answered: dict[str, Evaluation | None] = {}  # by the winners of races
    if race:
        data = Shuffled(labelled_batches, MEMORY)
        for width in widths:
            contest = _contest(result, str(width), alphas, data)
            make = partial(_smoothed_and_quantized, model, calibration, width, form, batches)
            contenders = _Contenders(make, metric, keep=len(alphas) * _bytes_of(model) <= MEMORY)
            for _ in tqdm(hold(contest, data, contenders.right), f"race at {width}", disable=not progress):
                if on_point is not None:
                    on_point(result)
            measured[str(width)] = [contest.winner]
            answered[str(width)] = contenders.evaluation(contest.winner, len(data))
    candidates: list[Alpha] = [None, *alphas, *(AUTO if auto else ())]
    plan = [
        (alpha, width)
        for alpha in candidates
        for width in widths
        if (alpha not in alphas or alpha in measured[str(width)]) and not result.find(str(width), alpha)
    ]
    if not plan and result.reference is not None:
        return result
    float_answers = evaluate(model, labelled_batches, metric=metric, progress="float" if progress else None)
    result.reference = Accuracy.of(float_answers)
    smoothed: Smoothed | None = None
    for alpha, width in tqdm(plan, "sweep", unit="point", disable=not progress):
        if alpha is None or isinstance(alpha, str) or smoothed is None or smoothed.alpha != alpha:
            smoothed = _smoothed(model, calibration, alpha, width, form, batches)
        source, statistics = (smoothed.model, smoothed.calibration) if smoothed else (model, calibration)
        quantized = quantize_by(Scheme(bits=width), source, statistics, observer="max").model
        known = answered.get(str(width)) if alpha in measured[str(width)] else None
        answers = known or evaluate(quantized, labelled_batches, metric=metric)
        result.points.append(
            SweepPoint(
                bits=str(width),
                alpha=alpha,
                accuracy=Accuracy.of(answers),
                changed=answers.against(float_answers).changed,
                layer_l1=sampled_errors(model, calibration, width.weights, width.activations, smoothed),
            )
        )
        if on_point is not None:
            on_point(result)
    return result


def _contest(result: Sweep, bits: str, alphas: Sequence[float], data: Shuffled) -> Race:
    """The race of the result, or a new one if that was about something else."""
    contest = result.races.get(bits)
    if contest is None or (contest.contenders, contest.images) != (tuple(alphas), len(data)):
        contest = result.races[bits] = Race(tuple(alphas), len(data))
    return contest


@dataclass
class _Contenders:
    """The networks of a race, made when they are first asked; kept where they are small enough."""

    make: Callable[[float], nn.Module]
    metric: str
    keep: bool
    networks: dict[float, nn.Module] = field(default_factory=dict)
    answers: dict[float, list[tuple[NDArray[np.int64], Evaluation]]] = field(default_factory=dict)

    def right(self, alpha: float, stretch: Stretch) -> NDArray[np.bool_]:
        network = self.networks[alpha] if alpha in self.networks else self.make(alpha)
        if self.keep:
            self.networks[alpha] = network
        found = evaluate(network, stretch.batches, metric=self.metric)
        self.answers.setdefault(alpha, []).append((stretch.indices, found))
        return (found.correct if self.metric == "top1" else found.in_top5).numpy()

    def evaluation(self, alpha: float, images: int) -> Evaluation | None:
        """Of all images in the order of the data, if all were answered here and not in a race that was interrupted."""
        parts = self.answers.get(alpha, [])
        if sum(len(indices) for indices, _ in parts) < images:
            return None
        order = torch.from_numpy(np.argsort(np.concatenate([indices for indices, _ in parts])))
        predictions, labels, in_top5 = (
            torch.cat([getattr(part, name) for _, part in parts])[order]
            for name in ("predictions", "labels", "in_top5")
        )
        return Evaluation(predictions, labels, in_top5, self.metric)


def _bytes_of(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def _smoothed_and_quantized(
    model: nn.Module, calibration: Calibration, width: Bits, form: Form, batches: Batches, alpha: float
) -> nn.Module:
    smoothed = smooth(model, calibration, alpha, form=form, batches=batches, proof_batches=1)
    return quantize_by(Scheme(bits=width), smoothed.model, smoothed.calibration, observer="max").model


def _smoothed(
    model: nn.Module, calibration: Calibration, alpha: Alpha, width: Bits, form: Form, batches: Batches
) -> Smoothed | None:
    if alpha is None:
        return None
    if not isinstance(alpha, str):
        return smooth(model, calibration, alpha, form=form, batches=batches, proof_batches=1)
    return smooth(
        model,
        calibration,
        "auto",
        form=form,
        weights=width.weights,
        activations=width.activations,
        clip=alpha == "auto+clip",
        batches=batches,
        proof_batches=1,
    )
