"""The picture of a grid: results along one axis, a line for each combination of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ptq.grid.collect import Collected, Columns, varying
from ptq.report.plots import COLOURS, STYLE

_STYLES = ("-", "--", ":", "-.")
_REPEATED = "seed"  # runs that differ in it alone measure the same thing: their mean is drawn, and their spread


def results_against(collected: Collected) -> Figure | None:
    """The first score of the table against the axis with the most numbers; None where nothing can be drawn."""
    if not collected.scores:
        return None
    score = collected.scores[0]
    rows = [row for row in collected.rows if row.get(score) is not None]
    axes = [axis for axis in varying(rows, collected.axes) if axis != _REPEATED] or [collected.axes[0]]
    along = max(axes, key=lambda axis: len({row[axis] for row in rows if _is_number(row[axis])}))
    others = [axis for axis in axes if axis != along]
    ticks = _ordered({row[along] for row in rows})
    series = list(dict.fromkeys(tuple(row[axis] for axis in others) for row in rows))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.6 + 0.2 * min(len(series), 16)), layout="constrained")
        drawing = figure.add_subplot()
        for index, values in enumerate(series):
            mine = [row for row in rows if tuple(row[axis] for axis in others) == values]
            label = ", ".join(f"{axis} {value}" for axis, value in zip(others, values, strict=True))
            _draw(drawing, mine, along, score, ticks, index, label)
        floats = {row["float"] for row in rows if row.get("float") is not None}
        if score == "score" and len(floats) == 1:
            drawing.axhline(*floats, color="black", linewidth=1, label=f"float: {next(iter(floats)):.2f}", zorder=1)
        drawing.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
        drawing.set_xlabel(along)
        drawing.set_ylabel(f"{rows[0].get('metric', 'score') if score == 'score' else score} (%)")
        repeated = len({str(row[_REPEATED]) for row in rows}) if _REPEATED in collected.axes else 1
        note = f", mean and range over {repeated} seeds" if repeated > 1 else ""
        drawing.set_title(f"{collected.name}: {len(rows)} runs{note}", loc="left")
        if drawing.get_legend_handles_labels()[1]:
            figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _draw(
    drawing: Any, rows: Sequence[Columns], along: str, score: str, ticks: list[Any], index: int, label: str
) -> None:
    by_tick = {tick: [row[score] for row in rows if row[along] == tick] for tick in ticks}
    places = [place for place, tick in enumerate(ticks) if by_tick[tick]]
    values = [by_tick[ticks[place]] for place in places]
    means = [sum(some) / len(some) for some in values]
    spread = [
        [mean - min(some) for mean, some in zip(means, values, strict=True)],
        [max(some) - mean for mean, some in zip(means, values, strict=True)],
    ]
    drawing.errorbar(
        places,
        means,
        yerr=spread if any(map(any, spread)) else None,
        marker="o",
        markersize=4,
        capsize=3,
        color=COLOURS[index % len(COLOURS)],
        linestyle=_STYLES[index // len(COLOURS) % len(_STYLES)],
        label=label or None,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _ordered(values: set[Any]) -> list[Any]:
    """Texts first, as "none" is before any number, then numbers, ascending."""
    return sorted(values, key=lambda value: (_is_number(value), value if _is_number(value) else 0, str(value)))
