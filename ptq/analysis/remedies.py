"""What could be done about the loss of a quantized network, each tried on this very network."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from tqdm import tqdm

from ptq import distributed
from ptq.analysis.frames import frame
from ptq.analysis.measuring import Answers, answers
from ptq.analysis.recipes import Kitchen, Recipe
from ptq.analysis.sensitivity import Effect, Sensitivities
from ptq.batches import Batches, limited
from ptq.errors import PtqError
from ptq.quantization import Bits, Scheme
from ptq.ranges import HISTOGRAM_RANGES

_MORE_BITS = 3  # layers that get more of them
_COMBINED = "smooth by layer, clip and refine"


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One thing done differently, and what it changes, from the analysed network to the remedied one."""

    name: str
    commands: list[str]
    answers: Answers
    effect: Effect
    seconds: float  # to apply it

    def to_json(self) -> dict[str, Any]:
        effect = self.effect.to_json()
        clear = self.effect.score.is_clear or self.effect.loss.is_clear
        content = {"name": self.name, "commands": self.commands, **self.answers.to_json()}
        return {**content, "change": effect, "clear": clear, "seconds": self.seconds}


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """The remedies that were tried, the best first: by the score, then by the loss."""

    reference: Answers  # the float network
    quantized: Answers  # the analysed network
    tried: list[Remedy]
    skipped: dict[str, str]  # name → why it wasn't tried

    def to_json(self) -> dict[str, Any]:
        return {
            "samples": self.quantized.n,
            "reference": self.reference.to_json(),
            "quantized": self.quantized.to_json(),
            "tried": [remedy.to_json() for remedy in self.tried],
            "skipped": self.skipped,
        }

    def to_frame(self) -> Any:
        """A DataFrame with one row for each remedy."""
        return frame([remedy.to_json() for remedy in self.tried])


def try_remedies(
    model: nn.Module,
    quantized: nn.Module,
    current: Recipe,
    kitchen: Kitchen,
    labelled_batches: Batches,
    *,
    sensitivities: Sensitivities | None = None,
    where: str = "",
    budget: float = 60.0,
    metric: str = "top1",
    progress: bool = False,
) -> Remedies:
    """Build each remedy and measure it on as many samples as all of them can be measured on in ``budget`` seconds.

    The time to build them comes on top. ``where`` is appended to the commands (``--run FOLDER``).
    """
    skipped: dict[str, str] = {}
    plan = dict(_candidates(current, kitchen, sensitivities, skipped))
    before = answers(quantized, labelled_batches, metric, seconds=budget / (len(plan) + 2))
    same_samples = limited(labelled_batches, before.n)
    reference = answers(model, same_samples, metric)

    def tried_out(candidate: tuple[str, Recipe]) -> Remedy | str:
        """The remedy, or why it can't be had."""
        name, recipe = candidate
        start = time.monotonic()
        try:
            remedied = kitchen.build(recipe).model
        except PtqError as error:
            return str(error)
        seconds = time.monotonic() - start
        after = answers(remedied, same_samples, metric)
        return Remedy(
            name=name,
            commands=recipe.commands(current, where),
            answers=after,
            effect=Effect.between(before, after),
            seconds=seconds,
        )

    # A process has whole remedies: most of the time goes into building them.
    found = distributed.shared_out(tqdm(plan.items(), "remedies", disable=not progress), tried_out)
    skipped |= {name: reason for name, reason in zip(plan, found, strict=True) if isinstance(reason, str)}
    tried = [remedy for remedy in found if isinstance(remedy, Remedy)]
    tried.sort(key=lambda remedy: (-remedy.effect.score.change, remedy.effect.loss.change))
    return Remedies(reference=reference, quantized=before, tried=tried, skipped=skipped)


def _candidates(
    current: Recipe, kitchen: Kitchen, sensitivities: Sensitivities | None, skipped: dict[str, str]
) -> Iterator[tuple[str, Recipe]]:
    """One change of the current recipe each, and one of the changes that usually give most together."""
    names = {None: "no smoothing", 0.5: "smooth, α = 0.5", "auto": "smooth, α by layer"}
    for alpha, name in {**names, "auto+clip": "smooth, α and clipped ranges by layer"}.items():
        if alpha != current.alpha:
            yield name, replace(current, alpha=alpha)
    bits = current.scheme.bits
    for observer in ("max", *HISTOGRAM_RANGES):
        if observer == current.observer:
            continue
        name = f"ranges by {observer}"
        if bits.activations is None or bits.activation_format:
            skipped[name] = "the activations have no calibrated range"
        elif current.alpha == "auto+clip":
            skipped[name] = "the ranges were searched layer by layer"
        else:
            yield name, replace(current, observer=observer)
    yield from _more_bits(current, sensitivities)
    if isinstance(kitchen.batches, Sized) and len(kitchen.batches) <= current.batches:
        skipped["more calibration data"] = f"all {current.batches} batches are used"
    else:
        batches = 2 * current.batches
        yield f"calibrate on {batches} batches in place of {current.batches}", replace(current, batches=batches)
    if current.refine == "none":
        yield "refine fast", replace(current, refine="fast")
        if current.alpha != "auto+clip":
            yield _COMBINED, replace(current, alpha="auto+clip", refine="fast")


def _more_bits(current: Recipe, sensitivities: Sensitivities | None) -> Iterator[tuple[str, Recipe]]:
    """The most sensitive layers, and the first and the last one, at 8 bits; at 16 where they have 8 already."""
    scheme, bits = current.scheme, current.scheme.bits
    widths = [width for width in (bits.weights, bits.activations) if width is not None]
    if bits.weight_format or bits.activation_format or not widths:
        return
    more = 8 if min(widths) < 8 else 16
    wider = Bits(bits.weights and more, bits.activations and more)
    if sensitivities is not None:
        chosen: dict[tuple[str, ...], str] = {}
        for by, reason in (("disable", "regained without them"), ("enable", "lost by them alone")):
            layers = sensitivities.most(_MORE_BITS, by)
            chosen.setdefault(tuple(sorted(layers)), f"{wider} for {', '.join(layers)} (most {reason})")
        for layers_, name in chosen.items():
            yield name, replace(current, scheme=_with_overrides(scheme, layers_, wider))
    if scheme.first_last is None:
        yield f"first and last layer at {more} bits", replace(current, scheme=replace(scheme, first_last=more))


def _with_overrides(scheme: Scheme, layers: Sequence[str], bits: Bits) -> Scheme:
    return replace(scheme, overrides=(*scheme.overrides, *((layer, bits) for layer in layers)))
