"""Tables and pictures of networks side by side, of one network at every precision, and of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from ptq.evaluation.metrics import METRICS
from ptq.report.plots import COLOURS, STYLE
from ptq.report.tables import plain_table
from ptq.training.comparison import UNTRAINED, Compared, Comparison
from ptq.training.precision import Precisions, Score
from ptq.training.record import MEASURES

_KINDS = {UNTRAINED: "quantized after training", "qat": "quantization-aware", "pipeline": "pipeline-trained",
          "ddp": "DDP-trained", "float": "trained in float"}  # fmt: skip
_COLOUR_OF = dict(zip(_KINDS, COLOURS, strict=False))
_MEASURE_TITLES = {"l1": "relative L1", "sqnr": "SQNR (dB)", "cosine": "cosine"}


def _score_label(metric: str) -> str:
    return "Matthews correlation × 100" if metric == "matthews" else f"{METRICS[metric].title} accuracy (%)"


# Networks side by side ------------------------------------------------------------------------------------------


def comparison_tables(comparison: Comparison) -> list[Table]:
    """One table of the networks, and one of the rank correlations where there are enough runs."""
    rows = comparison.rows
    table = plain_table(
        f"{rows[0].n} samples; intervals are 95 %",
        "network", "bits", METRICS[comparison.metric].title, "interval", "in float", "L1 alone", "L1 in all", "bytes",
        "trained, s", "images",
        caption="L1: mean over layers of the relative L1 error of their outputs against the float network, each by"
        " itself and in the whole network",
    )  # fmt: skip
    for row in rows:
        low, high = row.interval
        table.add_row(
            row.name,
            row.bits,
            f"{row.score:.2f}",
            f"{low:.2f} … {high:.2f}",
            f"{row.float_score:.2f}",
            "" if row.l1 is None else f"{row.l1:.4f}",
            "" if row.accumulated_l1 is None else f"{row.accumulated_l1:.4f}",
            f"{row.weight_bytes:,}",
            "" if row.seconds is None else f"{row.seconds:.0f}",
            "" if row.images is None else f"{row.images:,}",
        )
    return [table, *([_correlation_table(comparison)] if comparison.correlations else [])]


def _correlation_table(comparison: Comparison) -> Table:
    table = plain_table(
        "rank correlation of what compression did with the final score, over runs (Spearman; intervals are 95 %)",
        "trained by", "distance", "correlation", "interval", "runs",
        caption="intervals are bootstrapped over runs, and too narrow where these are few",
    )  # fmt: skip
    for training, by_measure in comparison.correlations.items():
        for measure, found in by_measure.items():
            low, high = found.interval
            table.add_row(training, measure, f"{found.value:+.2f}", f"{low:+.2f} … {high:+.2f}", str(found.runs))
    return table


def comparison_picture(comparison: Comparison, title: str) -> Figure:
    """Each network a line: its score with its interval, hollow where it was in float, and its mean layer error."""
    reference, *rows = comparison.rows
    groups = [(bits, list(some)) for bits, some in groupby(rows, key=lambda row: row.bits)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 1.5 + 0.3 * len(rows) + 0.5 * len(groups)), layout="constrained")
        grid = figure.subplots(
            len(groups), 2, sharex="col", sharey="row", squeeze=False,
            width_ratios=(3, 1), height_ratios=[len(some) + 1 for _, some in groups],
        )  # fmt: skip
        for (scores, errors), (bits, some) in zip(grid, groups, strict=True):
            _draw_networks(scores, errors, some, reference)
            scores.set_title(f"{bits}", loc="left", fontsize=10)
        grid[-1][0].set_xlabel(_score_label(comparison.metric))
        grid[-1][1].set_xlabel("mean layer L1")
        used = [kind for kind in _KINDS if any(row.training == kind for row in rows)]
        handles = [
            grid[0][0].plot([], [], "o", color=_COLOUR_OF[kind], markersize=5, label=_KINDS[kind])[0] for kind in used
        ]
        handles += grid[0][0].plot([], [], "o", color="grey", fillstyle="none", label="the same network in float")
        label = f"float: {reference.score:.2f}"
        handles.append(grid[0][0].axvline(reference.score, color="black", linewidth=1, label=label, zorder=1))
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8)
        figure.suptitle(title, x=0.01, ha="left")
    return figure


def _draw_networks(scores: Any, errors: Any, rows: Sequence[Compared], reference: Compared) -> None:
    places = np.arange(len(rows))
    colours = [_COLOUR_OF[row.training] for row in rows]
    scores.axvline(reference.score, color="black", linewidth=1, zorder=1)
    for place, row, colour in zip(places, rows, colours, strict=True):
        scores.plot(row.interval, (place, place), color=colour, linewidth=2.5, alpha=0.4, solid_capstyle="round")
        scores.plot(row.float_score, place, "o", color=colour, fillstyle="none", markersize=6)
        scores.plot(row.score, place, "o", color=colour, markersize=5)
    errors.barh(places, [row.l1 or 0 for row in rows], color=colours, height=0.6)
    scores.set_yticks(places, [row.name for row in rows], fontsize=8)
    scores.set_ylim(len(rows) - 0.4, -0.6)
    for axes in (scores, errors):
        axes.grid(axis="y", visible=False)
    errors.tick_params(axis="y", left=False, labelleft=False)


# One network at every precision ---------------------------------------------------------------------------------

_WAYS = {"weights_only": "weights only", "with_activations": "weights and activations",
         "undequantized": "mistake: running on undequantized codes"}  # fmt: skip


def precision_table(found: Precisions) -> Table:
    """A row for each precision."""
    table = plain_table(
        f"{METRICS[found.metric].title} on {found.n} samples, not smoothed; intervals are 95 %",
        "bits", *_WAYS.values(), "bytes",
        caption="the mistake: weights scaled to [-2^(b-1), 2^(b-1)-1], neither rounded nor brought back to their scale",
    )  # fmt: skip
    for row in found.rows:
        table.add_row(row.name, *(_text_of(getattr(row, way)) for way in _WAYS), f"{row.weight_bytes:,}")
    return table


def _text_of(score: Score | None) -> str:
    return "" if score is None else f"{score.score:.2f} ({score.interval[0]:.2f} … {score.interval[1]:.2f})"


def precision_picture(found: Precisions, title: str) -> Figure:
    """Bars with their intervals: three for each precision."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(6.0, 1.6 + 1.05 * len(found.rows)), 4.6), layout="constrained")
        axes = figure.add_subplot()
        for number, (way, label) in enumerate(_WAYS.items()):
            bars = [(place, getattr(row, way)) for place, row in enumerate(found.rows) if getattr(row, way) is not None]
            # Two bars in the middle where there is no third.
            places = [place + (number - (1 if found.rows[place].undequantized else 0.5)) * 0.28 for place, _ in bars]
            heights = [score.score for _, score in bars]
            # A score may lie outside of a bootstrapped interval by a hair.
            whiskers = [
                [max(0.0, score.score - score.interval[0]) for _, score in bars],
                [max(0.0, score.interval[1] - score.score) for _, score in bars],
            ]
            colour = COLOURS[number] if way != "undequantized" else "#999999"
            axes.bar(places, heights, 0.26, color=colour, label=label, yerr=whiskers, ecolor="#333333", capsize=2,
                     error_kw={"linewidth": 0.8})  # fmt: skip
            for place, height, above in zip(places, heights, whiskers[1], strict=True):
                axes.annotate(f"{height:.1f}", (place, max(height, 0) + above), (0, 2), textcoords="offset points",
                              ha="center", fontsize=6.5)  # fmt: skip
        axes.set_xticks(range(len(found.rows)), [_precision_title(row.name) for row in found.rows])
        axes.grid(axis="x", visible=False)
        axes.set_ylabel(_score_label(found.metric))
        axes.set_title(title, loc="left")
        figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _precision_title(name: str) -> str:
    return f"{name} bits" if name.isdigit() else {"float": "float32"}.get(name, name)


# A training -----------------------------------------------------------------------------------------------------


def training_picture(
    epochs: Sequence[Mapping[str, Any]], recorded: Sequence[Mapping[str, Any]], metric: str, title: str
) -> Figure:
    """The training curve and, below it, what compression did to the tensors that travelled, against the step."""
    measures = [measure for measure in MEASURES if any(line[measure] is not None for line in recorded)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 1.9 * (2 + len(measures)) + 0.6), layout="constrained")
        panels = figure.subplots(2 + len(measures), 1, sharex=True)
        steps = [line["step"] for line in epochs]
        panels[0].plot(steps, [line["loss"] for line in epochs], "o-", color="black", markersize=3)
        panels[0].set(ylabel="training loss", ylim=(0, None))
        panels[0].set_title(title, loc="left")
        scored = [(line["step"], line["score"]) for line in epochs if line.get("score") is not None]
        panels[1].plot(*zip(*scored, strict=True), "o-", color="black", markersize=3) if scored else None
        panels[1].set_ylabel(_score_label(metric).replace(" accuracy", "\naccuracy"))
        for panel, measure in zip(panels[2:], measures, strict=True):
            for colour, (place, line) in zip(COLOURS, _curves(recorded, measure).items(), strict=False):
                panel.plot(*line, ".-", color=colour, markersize=3, linewidth=1, label=place)
            panel.set_ylabel(_MEASURE_TITLES[measure])
        if measures:
            panels[2].legend(fontsize=8, ncols=3, loc="best")
        panels[-1].set_xlabel("step")
    return figure


def _curves(lines: Sequence[Mapping[str, Any]], measure: str) -> dict[str, tuple[list[int], list[float]]]:
    """For each boundary and direction: steps, and the mean over micro-batches, tensors and processes."""
    found: dict[str, dict[int, list[float]]] = {}
    several = len({line.get("boundary") for line in lines}) > 1
    for line in lines:
        if line[measure] is None:
            continue
        where = "gradients of the replicas"
        if "boundary" in line:
            what = "activations forward" if line["direction"] == "forward" else "gradients backward"
            where = f"{what}, boundary {line['boundary']}" if several else what
        found.setdefault(where, {}).setdefault(line["step"], []).append(line[measure])
    return {
        where: (sorted(by_step), [float(np.mean(by_step[step])) for step in sorted(by_step)])
        for where, by_step in sorted(found.items())
    }
