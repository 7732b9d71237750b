"""Number formats in pictures and tables: error against true bits per element, and how many sets of step and minimum
are reasonable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from ptq.formats.catalog import DISTANCES, FAMILIES, TOTAL_BITS, Comparison, Measured
from ptq.packing import PackedCheckpoint
from ptq.report.plots import COLOURS, STYLE
from ptq.report.tables import plain_table

_GREY = "#666666"
# One colour for each kind of format; its variants differ in line and marker.
_LOOKS = {
    "affine, one scale": (COLOURS[0], "-", "o"),
    "affine, a scale per 64 values": (COLOURS[0], "--", "o"),
    "2 sets of step and minimum": (COLOURS[1], "-", "s"),
    "4 sets": (COLOURS[1], "--", "s"),
    "16 sets": (COLOURS[1], ":", "s"),
    "top-k, 4 bits": (COLOURS[3], "-", "^"),
    "top-k, float": (COLOURS[3], "--", "^"),
    "2 × 2 means, affine": (COLOURS[4], "-", "D"),
    "truncated at 8 deviations": (_GREY, "-", "x"),
    "QSGD (stochastic)": (COLOURS[5], ":", "v"),
    "QSGDinf (stochastic)": (COLOURS[5], "--", "v"),
    "NUQSGD": (COLOURS[5], "-", "v"),
    "TernGrad (stochastic)": (COLOURS[5], "", "*"),
    "AMQ": (COLOURS[2], "--", "P"),
    "ALQ": (COLOURS[2], "-", "P"),
}
_DISTANCES = {
    "l2": "L2:  ‖x - x̂‖ / ‖x‖",
    "l1": "L1:  Σ|x - x̂| / Σ|x|",
    "median": "typical value:  median |x - x̂| / mean |x|",
}
_NAMES = {"normal": "normal", "laplace": "Laplace", "relu": "normal after ReLU"}
_PANELS_A_ROW = 3


def error_against_bits(comparison: Comparison, title: str) -> Figure:
    """Above, one panel for each tensor: relative L2 error against true bits per element. Below, several sets of step
    and minimum against one, at the same bits in all."""
    names = list(comparison.curves)
    rows = -(-len(names) // _PANELS_A_ROW)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 4.3 * rows + 4.3 + 1.1), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=[4.3 * rows + 1.1, 4.3])
        above, below = halves
        panels = above.subplots(rows, _PANELS_A_ROW, sharex=True, sharey=True, squeeze=False)
        for panel, name in zip(panels.flat, names, strict=False):
            _draw_curves(panel, comparison.curves[name], _NAMES.get(name, name))
        for index, panel in enumerate(panels.flat):
            panel.tick_params(labelbottom=index + _PANELS_A_ROW >= len(names))  # nothing stands below it
            if index >= len(names):
                panel.set_axis_off()
        for row in panels:
            row[0].set_ylabel("relative L2 error")
        handles, labels = panels.flat[0].get_legend_handles_labels()
        above.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9)
        above.suptitle(title, x=0.01, ha="left")
        _draw_sets(below, comparison)
    return figure


def _draw_curves(axes: Any, curves: dict[str, list[Measured]], name: str) -> None:
    for place, family in enumerate(FAMILIES):
        rows = sorted(curves.get(family.label, []), key=lambda row: row.bits)
        colour, line, marker = _LOOKS[family.label]
        x, y = [row.bits for row in rows], [max(row.l2, 1e-9) for row in rows]
        style = {"linestyle": line, "marker": marker, "color": colour, "markersize": 4, "linewidth": 1.2}
        axes.plot(x, y, label=family.label, zorder=3 - place / 100, **style)  # the plainest on top
    axes.set_yscale("log")
    axes.set(xlim=(0, 11.2), ylim=(1e-3, 2), title=name, xlabel="true bits per element (header included)")
    axes.set_xticks(range(0, 12, 2))


def _draw_sets(figure: Any, comparison: Comparison) -> None:
    panels = figure.subplots(1, len(DISTANCES))
    for panel, distance in zip(panels, DISTANCES, strict=True):
        for index, (name, rows) in enumerate(comparison.sets.items()):
            one = max(getattr(rows[1], distance), 1e-12)
            counts = list(rows)
            ratios = [max(getattr(rows[count], distance), 1e-12) / one for count in counts]
            colour = COLOURS[index % len(COLOURS)]
            line = "-" if index < len(COLOURS) else "--"
            panel.plot(counts, ratios, "o", linestyle=line, color=colour, markersize=4, label=_NAMES.get(name, name))
            best = comparison.reasonable_sets(name, distance)
            place = (best, ratios[counts.index(best)])
            panel.plot(*place, "o", color=colour, markersize=10, fillstyle="none", markeredgewidth=1.5)
        panel.axhline(1.0, color="black", linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set_xticks(counts, [str(count) for count in counts])
        low, high = (int(np.round(np.log2(limit))) for limit in panel.get_ylim())
        powers = range(low, high + 1, 1 + (high - low) // 8)
        panel.set_yticks([2.0**power for power in powers], [_times(power) for power in powers])
        panel.minorticks_off()
        panel.set(title=_DISTANCES[distance], xlabel="sets of step and minimum")
    panels[0].set_ylabel("error relative to one scale (affine)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9)
    figure.suptitle(
        f"{TOTAL_BITS} bits an element in all, shared by code and set number: below 1× several sets pay "
        "(○ fewest sets within a tenth of the least error)",
        x=0.01,
        ha="left",
    )


def _times(power: int) -> str:
    return f"{2**power}×" if power >= 0 else f"1/{2**-power}×"


def formats_table(rows: Sequence[Measured], what: str) -> Table:
    """What ``ptq formats`` prints."""
    shape = " × ".join(str(size) for size in rows[0].shape) if rows else ""
    table = plain_table(f"{what}, {shape}", "format", "bytes", "bits/element", "L2 error", "L1 error", "median error",
                   caption="bytes and bits with scales, levels and indices; errors relative to the values")  # fmt: skip
    for row in rows:
        table.add_row(
            row.format, f"{row.nbytes:,}", f"{row.bits:.3f}", f"{row.l2:.4f}", f"{row.l1:.4f}", f"{row.median:.4f}"
        )
    return table


def sets_table(comparison: Comparison) -> Table:
    """How many sets of step and minimum are reasonable at 8 bits in all."""
    table = plain_table(f"fewest sets of step and minimum within a tenth of the least error, {TOTAL_BITS} bits in all",
                   "values", "by L2", "by L1", "by median")  # fmt: skip
    for name in comparison.sets:
        table.add_row(_NAMES.get(name, name), *(str(comparison.reasonable_sets(name, kind)) for kind in DISTANCES))
    return table


def packed_table(checkpoint: PackedCheckpoint, file_bytes: int | None = None) -> Table:
    """What ``ptq pack`` prints: each packed weight, what was kept as one line, and the sum."""
    before, after = checkpoint.source_bytes, checkpoint.nbytes
    caption = f"{before:,} bytes → {after:,} ({before / max(1, after):.2f}×)"
    if file_bytes is not None:
        caption += f"; the file has {file_bytes:,}"
    table = plain_table("packed checkpoint", "tensor", "kind", "format", "shape", "bytes", "packed", caption=caption)
    kept = [entry for entry in checkpoint.entries if entry.kind == "kept"]
    for entry in checkpoint.entries:
        if entry.kind != "kept":
            shape = " × ".join(str(size) for size in entry.shape)
            table.add_row(
                entry.name, entry.kind, entry.format, shape, f"{entry.source_bytes:,}", f"{entry.packed_bytes:,}"
            )
    size = sum(entry.packed_bytes for entry in kept)
    table.add_row(f"{len(kept)} others", "kept", "", "", f"{size:,}", f"{size:,}")
    return table
