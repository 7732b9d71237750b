"""Scores as text: one metric, one way to write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ptq.evaluation.metrics import METRICS


@dataclass(frozen=True, kw_only=True)
class Score:
    """A network's score with its 95 % interval over n samples."""

    name: str
    metric: str
    score: float
    interval: tuple[float, float]
    n: int
    second: float | None = None  # top-5, or top-1 where the metric is another
    changed: int | None = None  # answers that differ from the float network's
    lost: int | None = None  # of these, right became wrong
    gained: int | None = None

    @classmethod
    def of_network(cls, row: Mapping[str, Any]) -> Score:
        """A row of evaluation.json."""
        metric = row["metric"]
        paired = row["against_float"] or {}
        low, high = row["interval"] if metric == "top1" else row[f"{metric}_interval"]
        return cls(
            name=row["name"],
            metric=metric,
            score=row[metric],
            interval=(low, high),
            n=row["n"],
            second=row["top5"] if metric == "top1" else row["top1"],
            changed=paired.get("changed"),
            lost=paired.get("lost"),
            gained=paired.get("gained"),
        )

    @property
    def text(self) -> str:
        return score_text(self.score, self.metric)

    @property
    def interval_text(self) -> str:
        return f"{self.interval[0]:.2f} … {self.interval[1]:.2f}"

    @property
    def differs(self) -> bool:
        """Whether the answers that changed say more than chance: McNemar's ``(lost - gained)² > 3.84 (lost + gained)``.

        Without pairs nothing is claimed.
        """
        if self.lost is None or self.gained is None:
            return False
        return (self.lost - self.gained) ** 2 > 3.84 * (self.lost + self.gained)


def score_text(score: float, metric: str) -> str:
    return f"{score:.2f}" if metric == "matthews" else f"{score:.2f}\u00a0%"


def metric_title(metric: str) -> str:
    return "Matthews correlation × 100" if metric == "matthews" else f"{METRICS[metric].title} accuracy"


def networks(evaluation: Mapping[str, Any]) -> list[Score]:
    return [Score.of_network(row) for row in evaluation["networks"]]
