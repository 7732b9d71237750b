"""A network's answers with their losses, and what changes from one network to another on the same samples."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ptq import distributed
from ptq.batches import Batches, Call, calls
from ptq.errors import InputError
from ptq.evaluation import Evaluation
from ptq.hooks import evaluating

_Z = NormalDist().inv_cdf(0.975)
_RESAMPLES = 500
Item = TypeVar("Item")


def within(seconds: float, items: Iterable[Item]) -> Iterator[Item]:
    """The items until the time is over; one at least."""
    end = time.monotonic() + seconds
    for item in items:
        yield item
        if time.monotonic() > end:
            return


@dataclass(frozen=True)
class Answers:
    """The answers of a network and the cross-entropy of each."""

    losses: Tensor  # [n], float64
    evaluation: Evaluation

    @property
    def loss(self) -> float:
        return float(self.losses.mean())

    @property
    def n(self) -> int:
        return len(self.losses)

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, metric: str) -> Answers:
        logits, labels = logits.cpu().double(), labels.cpu().long()
        best = logits.topk(min(5, logits.shape[1])).indices  # [n, 5]
        evaluation = Evaluation(best[:, 0].clone(), labels, (best == labels[:, None]).any(1), metric)
        return cls(functional.cross_entropy(logits, labels, reduction="none"), evaluation)

    @classmethod
    def joined(cls, parts: Sequence[Answers]) -> Answers:
        if not parts:
            raise InputError("the labelled data has no batch")
        evaluations = [part.evaluation for part in parts]
        together = Evaluation(
            torch.cat([answers.predictions for answers in evaluations]),
            torch.cat([answers.labels for answers in evaluations]),
            torch.cat([answers.in_top5 for answers in evaluations]),
            evaluations[0].metric,
        )
        return cls(torch.cat([part.losses for part in parts]), together)

    def to_json(self) -> dict[str, Any]:
        score, interval = self.evaluation.score(), self.evaluation.score_interval()
        metric = self.evaluation.metric
        return {"metric": metric, "score": score, "interval": list(interval), "loss": self.loss, "n": self.n}


def answers_to(call: Call, logits: Tensor, metric: str) -> Answers:
    """Refuses a batch without labels, and what isn't a classifier's output."""
    if call.labels is None:
        raise InputError("a batch without labels tells no loss: give tuples (inputs, labels)")
    if logits.dim() != 2 or len(logits) != len(call.labels):
        raise InputError(
            f"logits of shape {tuple(logits.shape)} for {len(call.labels)} labels: a classifier's [samples, classes] "
            "is needed"
        )
    return Answers.of(logits, call.labels, metric)


def answers(model: nn.Module, labelled_batches: Batches, metric: str = "top1", *, seconds: float = math.inf) -> Answers:
    """Run a model over labelled batches, until the time is over; over one batch at least.

    torchrun's processes share the batches.
    """
    with torch.inference_mode(), evaluating(model):
        run = within(seconds, calls(labelled_batches, model))
        return Answers.joined(distributed.shared_out(run, lambda call: answers_to(call, call.logits(model), metric)))


@dataclass(frozen=True)
class Change:
    """A difference measured on the same samples, with its 95 % interval."""

    change: float
    interval: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        ends = [end if math.isfinite(end) else None for end in self.interval]
        return {"change": self.change, "interval": ends}

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return not self.interval[0] <= 0 <= self.interval[1]


def loss_change(before: Answers, after: Answers) -> Change:
    """The mean d̄ of the samples' differences in loss, ``d̄ ± 1.96 s/√n`` with s their standard deviation."""
    differences = after.losses - before.losses
    mean = float(differences.mean())
    if len(differences) < 2:
        return Change(mean, (-math.inf, math.inf))
    spread = _Z * float(differences.std()) / math.sqrt(len(differences))
    return Change(mean, (mean - spread, mean + spread))


def score_change(before: Answers, after: Answers) -> Change:
    """The change of the score in points: for top-1 with ``paired_interval``, for others with a paired bootstrap."""
    first, second = before.evaluation, after.evaluation
    change = second.score() - first.score()
    if first.metric == "top1":
        paired = second.against(first)
        low, high = paired_interval(paired.lost, paired.gained, first.n)
        return Change(change, (100 * low, 100 * high))
    generator = np.random.default_rng(0)
    draws = (torch.from_numpy(generator.integers(first.n, size=first.n)) for _ in range(_RESAMPLES))
    changes = [_drawn(second, draw).score() - _drawn(first, draw).score() for draw in draws]
    low, high = np.percentile(changes, (2.5, 97.5))
    return Change(change, (float(low), float(high)))


def _drawn(evaluation: Evaluation, draw: Tensor) -> Evaluation:
    predictions, labels, in_top5 = evaluation.predictions[draw], evaluation.labels[draw], evaluation.in_top5[draw]
    return Evaluation(predictions, labels, in_top5, evaluation.metric)


def paired_interval(lost: int, gained: int, n: int) -> tuple[float, float]:
    """The 95 % interval of the difference of two paired proportions (Agresti and Min, 2005).

    Wald's interval with half an observation added to each of the four cells, so that it has a width also where
    nothing changed: ``d ± 1.96 √(b + c - (c - b)²/m) / m`` with b = lost + ½, c = gained + ½, m = n + 2 and
    d = (c - b)/m.
    """
    b, c, m = lost + 0.5, gained + 0.5, n + 2
    centre = (c - b) / m
    spread = _Z * math.sqrt(b + c - (c - b) ** 2 / m) / m
    return centre - spread, centre + spread
