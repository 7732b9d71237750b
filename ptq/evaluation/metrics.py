"""Accuracy with its uncertainty, and answers compared image by image."""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ptq.batches import Batches, calls
from ptq.errors import InputError
from ptq.hooks import evaluating


@dataclass(frozen=True)
class Evaluation:
    """A network's answers over a labelled data set. Accuracies are in percent."""

    predictions: Tensor  # [n], the most likely class
    labels: Tensor  # [n]
    in_top5: Tensor  # [n], bool

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
        low, high = wilson_interval(int(self.correct.sum()), self.n)
        return 100 * low, 100 * high

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
        return {"top1": self.top1, "top5": self.top5, "interval": list(self.interval), "n": self.n}


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


def evaluate(model: nn.Module, labelled_batches: Batches, *, progress: str | None = None) -> Evaluation:
    """Run the model over labelled batches.

    >>> evaluate(model, batches).top1
    91.73

    ``progress`` is the title of a progress bar, if one is wanted.
    """
    predictions, labels, in_top5 = [], [], []
    total = len(labelled_batches) if isinstance(labelled_batches, Sized) else None
    with torch.inference_mode(), evaluating(model):
        bar = tqdm(calls(labelled_batches, model), progress, total, unit="batch", disable=progress is None, leave=False)
        for call in bar:
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
            predictions.append(best[:, 0].clone())
            labels.append(target)
            in_top5.append((best == target[:, None]).any(1))
    if not labels:
        raise InputError("the evaluation data has no batch")
    return Evaluation(torch.cat(predictions), torch.cat(labels), torch.cat(in_top5))
