"""What compression does to the tensors it carries: one line for each sampled transfer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ptq.errors import InputError
from ptq.training.checkpoints import json_line, read_lines

MEASURES = ("l1", "sqnr", "cosine")


def distortion(sent: Tensor, received: Tensor) -> dict[str, float | None]:
    """Of x that went in and x̂ that came out, as sums in float64.

    ``l1 = Σ|x-x̂| / Σ|x|``; ``sqnr = 10 log10(Σx² / Σ(x-x̂)²)`` in dB; ``cosine = Σxx̂ / √(Σx² Σx̂²)``. None where a
    measure has no value: of zeros, and the SQNR of a tensor that came through unchanged.
    """
    x, found = sent.detach().flatten().double(), received.detach().flatten().double()
    error = x - found
    absolute, square, square_error = float(x.abs().sum()), float(x @ x), float(error @ error)
    norms = math.sqrt(square * float(found @ found))
    return {
        "l1": float(error.abs().sum()) / absolute if absolute else None,
        "sqnr": 10 * math.log10(square / square_error) if square and square_error else None,
        "cosine": float(x @ found) / norms if norms else None,
    }


class Recorder:
    """Writes a line for every ``every``-th step; lines of steps that are trained again replace the old ones."""

    def __init__(self, path: Path, every: int) -> None:
        if every < 1:
            raise InputError(f"record every {every} steps: give at least 1")
        self.path, self.every = path, every

    def wants(self, step: int) -> bool:
        return step % self.every == 0

    def forget_from(self, step: int) -> None:
        """Drop what was recorded from this step on, as a run that goes on from its checkpoint does."""
        lines = read_lines(self.path) if self.path.exists() else []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json_line(line) for line in lines if line["step"] < step), encoding="utf-8")

    def add(self, place: Mapping[str, Any], sent: Tensor, received: Tensor) -> None:
        """``place`` says where: the step, the boundary, the direction."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json_line({**place, "elements": sent.numel(), **distortion(sent, received)}))


def rank_correlation(runs: Sequence[tuple[Sequence[Mapping[str, Any]], float]]) -> dict[str, float | None]:
    """Spearman's correlation over runs of each mean measure, by direction, with the final score.

    A run is its recorded lines and its score; None where fewer than three runs have the measure or all are the same.
    """
    from scipy import stats  # a second to import, which processes that only record would pay too

    result: dict[str, float | None] = {}
    for direction in ("forward", "backward"):
        for measure in MEASURES:
            pairs = []
            for lines, score in runs:
                values = [line[measure] for line in lines if line["direction"] == direction]
                present = [value for value in values if value is not None]
                if present:
                    pairs.append((sum(present) / len(present), score))
            means, scores = [mean for mean, _ in pairs], [score for _, score in pairs]
            varied = len(pairs) >= 3 and len(set(means)) > 1 and len(set(scores)) > 1
            result[f"{direction} {measure}"] = float(stats.spearmanr(means, scores).statistic) if varied else None
    return result
