"""Accuracy and range drift against the amount of calibration data."""

from __future__ import annotations

from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rich.table import Table

from ptq.report.plots import COLOURS, STYLE, score_label
from ptq.report.tables import plain_table
from ptq.sizing import SizeStudy


def calibration_sizes(study: SizeStudy, title: str) -> Figure:
    """Left: accuracy with its interval; right: how far ranges are from those of the largest calibration."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.4), layout="constrained")
        accuracy, drift = figure.subplots(1, 2)
        for colour, bits in zip(COLOURS, study.bits, strict=False):
            for alpha in study.alphas:
                _draw_accuracy(accuracy, study, bits, alpha, colour)
        score = study.reference.score
        accuracy.axhline(score, color="black", linewidth=1, label=f"float: {score:.2f} %")
        accuracy.set(ylabel=score_label(study.reference), title="accuracy")
        _draw_drift(drift, study)
        for axes in (accuracy, drift):
            axes.set_xscale("log")
            sizes = [drift.batches for drift in study.drifts]
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
            axes.set_xlabel("calibration batches")
            axes.legend(fontsize=8)
        figure.suptitle(title, x=0.01, ha="left")
    return figure


def _draw_accuracy(axes: Any, study: SizeStudy, bits: str, alpha: float | None, colour: str) -> None:
    curve = study.curve(bits, alpha)
    sizes = [point.batches for point in curve]
    label = f"{bits}, {'not smoothed' if alpha is None else f'α = {alpha:g}'}"
    style = "o--" if alpha is None else "o-"
    axes.plot(sizes, [point.accuracy.score for point in curve], style, color=colour, markersize=4, label=label)
    lows, highs = zip(*(point.accuracy.interval for point in curve), strict=True)
    axes.fill_between(sizes, lows, highs, color=colour, alpha=0.1, linewidth=0)


def _draw_drift(axes: Any, study: SizeStudy) -> None:
    sizes = [drift.batches for drift in study.drifts]
    for colour, what in zip(COLOURS, ("tensors", "channels"), strict=False):
        for part, style in (("median", "o-"), ("max", "o:")):
            values = [100 * getattr(drift, f"{what}_{part}") for drift in study.drifts]
            axes.plot(sizes, values, style, color=colour, markersize=4, label=f"{what}, {part}")
    axes.set(ylabel=f"range missing, of that at {sizes[-1]} batches (%)", title="range drift")
    axes.set_ylim(bottom=0)


def sizes_table(study: SizeStudy) -> Table:
    table = plain_table(
        f"float {study.reference.score:.2f} on {study.reference.n} samples; ranges by {study.observer}",
        "batches", "range missing, median", "max",
        *(f"{bits} {'none' if alpha is None else f'α={alpha:g}'}" for bits in study.bits for alpha in study.alphas),
    )  # fmt: skip
    for drift in study.drifts:
        scores = [
            f"{point.accuracy.score:.2f}"
            for bits in study.bits
            for alpha in study.alphas
            for point in study.curve(bits, alpha)
            if point.batches == drift.batches
        ]
        missing = (f"{100 * value:.1f} %" for value in (drift.tensors_median, drift.tensors_max))
        table.add_row(str(drift.batches), *missing, *scores)
    return table
