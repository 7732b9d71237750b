"""Accuracy with its uncertainty, and answers compared image by image."""

from __future__ import annotations

import math
from collections.abc import Callable, Sized
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from ptq import distributed
from ptq.batches import Batches, calls
from ptq.errors import InputError
from ptq.hooks import evaluating

RESAMPLES = 1000  # of the bootstrap


@dataclass(frozen=True)
class Evaluation:
    """A network's answers over a labelled data set. Scores are in percent."""

    predictions: Tensor  # [n], the most likely class
    labels: Tensor  # [n]
    in_top5: Tensor  # [n], bool
    metric: str = "top1"  # the one that the task is judged by

    def __post_init__(self) -> None:
        checked_metric(self.metric)

    @property
    def n(self) -> int:
        return len(self.labels)

    @property
    def correct(self) -> Tensor:
        return self.predictions == self.labels

    @property
    def top1(self) -> float:
        return 100 * int(self.correct.sum()) / self.n

    @property
    def top5(self) -> float:
        return 100 * int(self.in_top5.sum()) / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of top-1."""
        return _wilson_percent(self.correct)

    @property
    def matthews(self) -> float:
        """The Matthews correlation of labels and answers: 100 is all right, 0 is chance or one answer for all."""
        return 100 * matthews_correlation(*self._counted_pairs())

    def score(self, metric: str | None = None) -> float:
        """The metric of that name; the task's own if none is named."""
        return METRICS[checked_metric(metric or self.metric)].score(self)

    def score_interval(self, metric: str | None = None) -> tuple[float, float]:
        """The 95 % interval of ``score(metric)``."""
        return METRICS[checked_metric(metric or self.metric)].interval(self)

    def _counted_pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The distinct pairs (label, answer) and how often each occurs."""
        pairs = torch.stack([self.labels, self.predictions]).long().numpy()  # [2, n]
        (labels, predictions), counts = np.unique(pairs, axis=1, return_counts=True)
        return labels, predictions, counts

    def _matthews_interval(self) -> tuple[float, float]:
        """Percentiles of a bootstrap with a fixed seed.

        Drawing n samples with replacement is drawing how often each distinct pair (label, answer) occurs, from a
        multinomial.
        """
        labels, predictions, counts = self._counted_pairs()
        generator = np.random.default_rng(0)
        share = counts / self.n
        draws = [generator.multinomial(self.n, share) for _ in range(RESAMPLES)]
        scores = [100 * matthews_correlation(labels, predictions, draw) for draw in draws]
        low, high = np.percentile(scores, (2.5, 97.5))
        return float(low), float(high)

    def against(self, reference: Evaluation) -> Paired:
        """What changed from a reference network to this one, on the same images."""
        if not torch.equal(self.labels, reference.labels):
            raise InputError("the two evaluations don't cover the same images: evaluate both on the same data")
        return Paired(
            changed=int((self.predictions != reference.predictions).sum()),
            lost=int((reference.correct & ~self.correct).sum()),
            gained=int((~reference.correct & self.correct).sum()),
        )

    def to_json(self) -> dict[str, Any]:
        content = {"top1": self.top1, "top5": self.top5, "interval": list(self.interval), "n": self.n}
        if self.metric in content:
            return {**content, "metric": self.metric}
        own = {self.metric: self.score(), f"{self.metric}_interval": list(self.score_interval())}
        return {**content, "metric": self.metric, **own}


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A way to judge answers, in percent, with its 95 % interval."""

    title: str
    score: Callable[[Evaluation], float]
    interval: Callable[[Evaluation], tuple[float, float]]


METRICS: dict[str, Metric] = {
    "top1": Metric(title="top-1", score=lambda answers: answers.top1, interval=lambda answers: answers.interval),
    "top5": Metric(
        title="top-5",
        score=lambda answers: answers.top5,
        interval=lambda answers: _wilson_percent(answers.in_top5),
    ),
    "matthews": Metric(
        title="Matthews",
        score=lambda answers: answers.matthews,
        interval=lambda answers: answers._matthews_interval(),
    ),
}


def checked_metric(name: str) -> str:
    if name not in METRICS:
        raise InputError(f"no metric {name!r}: give {', '.join(METRICS)}")
    return name


@dataclass(frozen=True)
class Paired:
    """How many images changed their answer; of these, right became wrong (lost) and wrong became right (gained)."""

    changed: int
    lost: int
    gained: int


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion: right also near 0 and 1, where accuracies live.

    ``(p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)``
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p = successes / n
    centre = p + z * z / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (centre - spread) / (1 + z * z / n)), min(1.0, (centre + spread) / (1 + z * z / n))


def _wilson_percent(successes: Tensor) -> tuple[float, float]:
    low, high = wilson_interval(int(successes.sum()), len(successes))
    return 100 * low, 100 * high


def matthews_correlation(labels: NDArray[np.int64], predictions: NDArray[np.int64], counts: NDArray[np.int64]) -> float:
    """The Matthews correlation of pairs (label, answer) that occur ``counts`` times, for any number of classes.

    ``(n Σ right - Σ t_k p_k) / √((n² - Σ t_k²) (n² - Σ p_k²))``, where t_k of the n labels and p_k of the answers are
    class k; 0 where all labels or all answers are one class.
    """
    classes = int(max(labels.max(), predictions.max())) + 1
    n = int(counts.sum())
    right = int(counts[labels == predictions].sum())
    of_labels = np.bincount(labels, counts, classes)  # t
    of_predictions = np.bincount(predictions, counts, classes)  # p
    spread = (n**2 - of_labels @ of_labels) * (n**2 - of_predictions @ of_predictions)
    return float((n * right - of_labels @ of_predictions) / math.sqrt(spread)) if spread > 0 else 0.0


def evaluate(
    model: nn.Module, labelled_batches: Batches, *, metric: str = "top1", progress: str | None = None
) -> Evaluation:
    """Run the model over labelled batches.

    >>> evaluate(model, batches).top1
    91.73

    ``metric`` is what the task is judged by (``Evaluation.score``); the other metrics can be read as well.
    ``progress`` is the title of a progress bar, if one is wanted.
    """
    checked_metric(metric)  # before any work is done
    answers: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # batch → predictions, labels, whether in the top 5
    total = len(labelled_batches) if isinstance(labelled_batches, Sized) else None
    with torch.inference_mode(), evaluating(model):
        bar = tqdm(calls(labelled_batches, model), progress, total, unit="batch", disable=progress is None, leave=False)
        for number, call in enumerate(bar):
            if not distributed.is_mine(number):
                continue
            if call.labels is None:
                raise InputError("a batch without labels can't be evaluated: give tuples (inputs, labels)")
            logits = call.logits(model).cpu()
            if logits.dim() != 2 or len(logits) != len(call.labels):
                raise InputError(
                    f"logits of shape {tuple(logits.shape)} for {len(call.labels)} labels: a classifier's "
                    "[samples, classes] is needed"
                )
            if call.labels.numel() and not 0 <= int(call.labels.min()) <= int(call.labels.max()) < logits.shape[1]:
                raise InputError(
                    f"labels from {int(call.labels.min())} to {int(call.labels.max())}, but the model has "
                    f"{logits.shape[1]} classes: the data and the model don't belong together"
                )
            best = logits.topk(min(5, logits.shape[1])).indices  # [n, 5]
            target = call.labels.cpu().long()
            answers[number] = best[:, 0].clone(), target, (best == target[:, None]).any(1)
    all_answers = {number: found for share in distributed.exchanged(answers) for number, found in share.items()}
    if not all_answers:
        raise InputError("the evaluation data has no batch")
    in_order = [all_answers[number] for number in sorted(all_answers)]
    predictions, labels, in_top5 = (torch.cat(parts) for parts in zip(*in_order, strict=True))
    return Evaluation(predictions, labels, in_top5, metric)
