"""What compression does to the tensors it carries: one line for each sampled transfer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ptq.errors import InputError
from ptq.training.checkpoints import json_line, read_lines

MEASURES = ("l1", "sqnr", "cosine")
PATTERNS = ("boundaries-*.jsonl", "gradients-*.jsonl")  # the files of a run, one for each process
FEWEST_RUNS = 4  # that a correlation is stated for
RESAMPLES = 2000  # of the bootstrap


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


@dataclass(frozen=True, kw_only=True)
class RankCorrelation:
    """Spearman's correlation of a mean measure with the final score over some runs, and its 95 % interval."""

    value: float
    interval: tuple[float, float]
    runs: int

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "interval": list(self.interval), "runs": self.runs}


def recorded_lines(folder: Path) -> list[dict[str, Any]]:
    """What the processes of a run recorded in its folder, if they did."""
    return [line for pattern in PATTERNS for path in sorted(folder.glob(pattern)) for line in read_lines(path)]


def rank_correlations(runs: Sequence[tuple[Sequence[Mapping[str, Any]], float]]) -> dict[str, RankCorrelation | None]:
    """Spearman's correlation over runs of each mean measure, by direction (``"forward l1"``), with the final score.

    A run is its recorded lines and its score. None where fewer than FEWEST_RUNS have the measure or all are the same.
    """
    result = {}
    for direction in ("forward", "backward"):
        for measure in MEASURES:
            pairs = []
            for lines, score in runs:
                values = [line[measure] for line in lines if line["direction"] == direction]
                present = [value for value in values if value is not None]
                if present:
                    pairs.append((sum(present) / len(present), score))
            result[f"{direction} {measure}"] = spearman(*zip(*pairs, strict=True)) if pairs else None
    return result


def spearman(first: Sequence[float], second: Sequence[float]) -> RankCorrelation | None:
    """Pearson's correlation of the ranks, ties sharing theirs; the interval are percentiles of a bootstrap over pairs.

    Resamples in which either side is all the same have no correlation and are left out.
    """
    from scipy import stats  # a second to import, which processes that only record would pay too

    pairs = np.array([first, second], dtype=float)  # [2, runs]
    count = pairs.shape[1]
    if count < FEWEST_RUNS or (np.ptp(pairs, axis=1) == 0).any():
        return None
    drawn = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    drawn[0] = np.arange(count)  # the runs themselves
    ranks = stats.rankdata(pairs[:, drawn], axis=2)  # [2, resamples, runs]
    ranks -= ranks.mean(axis=2, keepdims=True)
    norms = np.sqrt((ranks**2).sum(axis=2).prod(axis=0))
    varied = norms > 0
    values = (ranks[0] * ranks[1]).sum(axis=1)[varied] / norms[varied]
    low, high = np.percentile(values[1:], (2.5, 97.5))
    return RankCorrelation(value=float(values[0]), interval=(float(low), float(high)), runs=count)
