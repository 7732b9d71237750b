"""What there is to compare at equal bits: the task's network quantized after training, and baselines of a folder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from torch import nn

from ptq.calibration import Calibration, calibrate
from ptq.errors import InputError, MismatchError
from ptq.quantization import Bits, Quantized, Scheme
from ptq.refinement import refine as refine_network
from ptq.smoothing import ALPHAS, Smoothed, sampled_errors, smooth
from ptq.sweeping import Sweep
from ptq.tasks import Task
from ptq.tasks.checkpoints import load_weights
from ptq.training.baselines import Baseline, baselines_in
from ptq.training.checkpoints import Folder


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A network to compare: quantized already, or float and to be quantized as the scheme says."""

    name: str
    scheme: Scheme
    model: nn.Module  # before it was quantized
    calibration: Calibration  # of that model
    quantized: Quantized | None = None
    reference: nn.Module | None = None  # whose layers the errors are against: of a smoothed network, the original
    baseline: Baseline | None = None  # how it was trained, if it was


def best_alpha(model: nn.Module, calibration: Calibration, bits: Bits, sweep: Sweep | None = None) -> tuple[float, str]:
    """One α for all layers, and how it was chosen.

    The most accurate one of a sweep of this network at these bits; else the one with the least mean relative L1 error
    of the layers on the calibration's sample, which needs no labels.
    """
    if sweep is not None and sweep.model_fingerprint == calibration.model_fingerprint and sweep.curve(str(bits)):
        alpha = sweep.best(str(bits)).alpha
        assert isinstance(alpha, float)
        return alpha, "the most accurate of the sweep"
    errors = {
        alpha: fmean(
            sampled_errors(
                model, calibration, bits.weights, bits.activations, smooth(model, calibration, alpha)
            ).values()
        )
        for alpha in ALPHAS
    }
    return min(errors, key=errors.__getitem__), "the least layer error"


def post_training(
    task: Task, calibration: Calibration, bits: Bits, alpha: float, refine: str = "none"
) -> list[Candidate]:
    """The task's network not smoothed, smoothed by one α, and by layer with clipped ranges; and that one refined."""
    scheme = Scheme(bits=bits)

    def smoothed_candidate(name: str, smoothed: Smoothed, quantized: Quantized | None = None) -> Candidate:
        return Candidate(
            name=name,
            scheme=scheme,
            model=smoothed.model,
            calibration=smoothed.calibration,
            quantized=quantized,
            reference=task.model,
        )

    one = smooth(task.model, calibration, alpha, batches=task.calibration, proof_batches=1)
    by_layer = smooth(
        task.model,
        calibration,
        "auto",
        weights=bits.weights,
        activations=bits.activations,
        clip=True,
        batches=task.calibration,
        proof_batches=1,
    )
    candidates = [
        Candidate(name="PTQ, not smoothed", scheme=scheme, model=task.model, calibration=calibration),
        smoothed_candidate(f"PTQ, α = {alpha:g}", one),
        smoothed_candidate("PTQ, α by layer, clipped", by_layer),
    ]
    if refine != "none":
        refined = refine_network(by_layer.model, by_layer.calibration, scheme, task.calibration, refine)
        candidates.append(smoothed_candidate(f"PTQ, α by layer, clipped, refined {refine}", by_layer, refined))
    return candidates


def trained(
    task: Task,
    calibration: Calibration,
    smoothed: Smoothed | None,
    folder: Path,
    bits: Sequence[Bits],
    say: Callable[[str], None] = lambda message: None,
) -> list[Candidate]:
    """The baselines under a folder at these bits; networks that were trained in float are calibrated and quantized.

    A quantization-aware one takes part at the bits that it was trained for. ``smoothed`` is what it may have begun
    from. What can't take part is said.
    """
    candidates = []
    for name, baseline in baselines_in(folder).items():
        try:
            if baseline.training == "qat":
                found = [_quantization_aware(task, calibration, smoothed, folder, name, baseline)]
                if found[0].scheme.bits not in bits:
                    say(f"{folder / name}: trained for {found[0].scheme.bits}, which is not compared: left out")
                    found = []
            else:
                found = _trained_in_float(task, folder, name, baseline, bits)
        except (InputError, MismatchError) as error:
            say(f"{error}: left out")
            continue
        candidates += found
    return candidates


def _quantization_aware(
    task: Task, calibration: Calibration, smoothed: Smoothed | None, folder: Path, name: str, baseline: Baseline
) -> Candidate:
    path = folder / name / "quantized.safetensors"
    sources = [(task.model, calibration)] + ([(smoothed.model, smoothed.calibration)] if smoothed else [])
    for model, statistics in sources:
        try:
            quantized = Quantized.load(path, model, statistics)
        except MismatchError:
            continue
        return Candidate(
            name=name,
            scheme=quantized.scheme,
            model=model,
            calibration=statistics,
            quantized=quantized,
            reference=task.model,
            baseline=baseline,
        )
    raise MismatchError(f"{path}: was trained from another network than this folder's")


def _trained_in_float(task: Task, folder: Path, name: str, baseline: Baseline, bits: Sequence[Bits]) -> list[Candidate]:
    model = copy.deepcopy(task.model)
    load_weights(model, Folder(folder / name).weights)
    model.eval()
    statistics = calibrate(model, task.calibration)
    title = f"{name}, trained here" if baseline.training == "float" else name
    return [
        Candidate(name=title, scheme=Scheme(bits=width), model=model, calibration=statistics, baseline=baseline)
        for width in bits
    ]
