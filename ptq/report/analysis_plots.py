"""Pictures and tables of an analysis."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter
from rich.table import Table

from ptq.analysis import Analysis, DistanceStudy, Remedies, Sensitivities
from ptq.analysis.errors import LayerAnalysis
from ptq.analysis.grafting import PARTS
from ptq.analysis.measuring import Change
from ptq.analysis.outliers import OUTLIER, Outliers
from ptq.analysis.watching import Watched
from ptq.evaluation.metrics import METRICS
from ptq.report.plots import COLOURS, STYLE
from ptq.report.tables import plain_table
from ptq.sweeping import Alpha

_SHOWN = 9  # scatters
_MARKERS: dict[Alpha, str] = {None: "o", 0.5: "s", "auto": "^", "auto+clip": "v"}
_TITLES: dict[Alpha, str] = {None: "not smoothed", "auto": "α by layer", "auto+clip": "α and clips by layer"}


def layer_errors_figure(analysis: Analysis, title: str) -> Figure:
    """Left: relative L1 error of each layer as a heat map, by itself and in all, split into its parts.

    Right, where it was measured: the change of the loss when only this layer is quantized, or all but this one.
    """
    layers = analysis.layers
    sensitivity = analysis.sensitivities
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        width = 7.4 if sensitivity is None else 12
        figure = Figure(figsize=(width, max(3.2, 1.6 + 0.21 * len(layers))), layout="constrained")
        ratios = [1.0] if sensitivity is None else [1.0, 0.9]
        panels = np.atleast_1d(figure.subplots(1, len(ratios), sharey=True, width_ratios=ratios))
        _draw_heat_map(figure, panels[0], layers)
        if sensitivity is not None:
            _draw_sensitivities(panels[1], sensitivity, [layer.layer for layer in layers])
        figure.suptitle(title, x=0.01, ha="left")
    return figure


def _draw_heat_map(figure: Figure, axes: Any, layers: Sequence[LayerAnalysis]) -> None:
    columns = [(where, part) for where in ("isolated", "accumulated") for part in PARTS]
    errors = np.array([[_l1(layer, where, part) for where, part in columns] for layer in layers])  # [layers, 6]
    smallest, largest = max(1e-5, errors[errors > 0].min(initial=1.0)), max(errors.max(), 1e-4)
    lowest = min(smallest, largest / 2)
    norm = LogNorm(lowest, largest)
    image = axes.imshow(errors, aspect="auto", cmap="cividis_r", norm=norm, interpolation="nearest")
    for (row, column), error in np.ndenumerate(errors):
        dark = norm(max(error, smallest)) > 0.6
        text = "0" if not error else f"{100 * error:.2g}" if error < 1 else f"{100 * error:.0f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=6, color="white" if dark else "black")
    axes.axvline(2.5, color="white", linewidth=3)
    labels = [f"{'alone' if where == 'isolated' else 'in all'}\n{part}" for where, part in columns]
    axes.set_xticks(range(len(columns)), labels, fontsize=7)
    axes.set_yticks(range(len(layers)), [layer.layer for layer in layers], fontsize=7)
    axes.set_title("relative L1 error of the output (%)", fontsize=9)
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=40)
    ticks = [step * 10.0**power for power in range(-6, 3) for step in (1, 2, 5)]
    ticks = [tick for tick in ticks if lowest <= tick <= largest]
    bar.set_ticks(ticks, labels=[f"{100 * tick:g} %" for tick in ticks], fontsize=7)
    bar.minorticks_off()


def _l1(layer: LayerAnalysis, where: str, part: str) -> float:
    value: float = getattr(getattr(layer, where), part).l1
    return value


def _draw_sensitivities(axes: Any, found: Sensitivities, names: Sequence[str]) -> None:
    places = {name: index for index, name in enumerate(names)}
    trials = (
        ("only this layer quantized, against float", "enable", -0.15),
        ("all but this layer, against all quantized", "disable", 0.15),
    )
    for colour, (label, trial, offset) in zip(COLOURS, trials, strict=False):
        changes = [getattr(layer, trial).loss for layer in found.layers]
        rows = [places[layer.layer] + offset for layer in found.layers]
        values = [change.change for change in changes]
        # Few samples have no interval: no bar, rather than one without end.
        bars = np.array([[value - _finite(c.interval[0], value), _finite(c.interval[1], value) - value]
                         for value, c in zip(values, changes, strict=True)]).T  # fmt: skip
        axes.errorbar(values, rows, xerr=bars, fmt="o", color=colour, markersize=3.5, linewidth=1, label=label)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.grid(axis="x", color="#e5e5e5")
    axes.set_xlabel("change of the cross-entropy (95 % interval, paired)")
    axes.set_title(f"sensitivity on {found.samples} samples", fontsize=9)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.06 - 1.2 / max(8, len(names))), ncols=1)


def _finite(value: float, otherwise: float) -> float:
    return value if np.isfinite(value) else otherwise


def remedies_figure(remedies: Remedies, title: str) -> Figure:
    """What each remedy changes, score and loss, with intervals."""
    names = [remedy.name for remedy in remedies.tried]
    rows = range(len(names))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 1.6 + 0.34 * len(names)), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        metric = METRICS[remedies.quantized.evaluation.metric].title
        for axes, what, label in (
            (panels[0], "score", f"change of {metric} (points)"),
            (panels[1], "loss", "change of the cross-entropy (less is better)"),
        ):
            for row, remedy in zip(rows, remedies.tried, strict=True):
                change: Change = getattr(remedy.effect, what)
                better = change.change > 0 if what == "score" else change.change < 0
                colour = "grey" if not change.is_clear else COLOURS[0] if better else COLOURS[1]
                axes.plot(change.interval, (row, row), color=colour, linewidth=1.4)
                axes.plot(change.change, row, "o", color=colour, markersize=5)
            axes.axvline(0, color="black", linewidth=0.8)
            axes.set_xlabel(label)
        panels[0].set_yticks(rows, [textwrap.fill(name, 60) for name in names], fontsize=8)
        panels[0].invert_yaxis()
        gap = remedies.reference.evaluation.score() - remedies.quantized.evaluation.score()
        panels[0].axvline(gap, color="black", linewidth=0.8, linestyle=":", label="back to float")
        panels[0].legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
        figure.suptitle(f"{title} ({remedies.quantized.n} samples; grey: may be nothing)", x=0.01, ha="left")
    return figure


def distances_figure(studies: Sequence[DistanceStudy], title: str) -> Figure:
    """The drop of the score against each of the best distances of the first study, one small picture each."""
    study = studies[0]
    shown = study.correlations[:_SHOWN]
    widths = list(dict.fromkeys(point.bits for point in study.points))
    colours = matplotlib.colormaps["cividis"](np.linspace(0, 0.95, len(widths)))
    columns = min(3, max(1, len(shown)))
    rows = max(1, -(-len(shown) // columns))
    with matplotlib.rc_context({**STYLE, "font.size": 8}):
        figure = Figure(figsize=(9.5, 1.1 + 2.35 * rows), layout="constrained")
        panels = np.atleast_2d(figure.subplots(rows, columns, sharey=True, squeeze=False))
        for axes in panels.flat[len(shown) :]:
            axes.set_visible(False)
        for axes, correlation in zip(panels.flat, shown, strict=False):
            for point in study.points:
                axes.plot(
                    point.distances[correlation.distance],
                    point.drop,
                    _MARKERS.get(point.alpha, "s"),
                    color=colours[widths.index(point.bits)],
                    markersize=5,
                    markeredgecolor="white",
                    markeredgewidth=0.4,
                )
            if all(point.distances[correlation.distance] > 0 for point in study.points):
                axes.set_xscale("log")
                axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_yscale("symlog", linthresh=1)  # a tenth of a point and fifty of them in one picture
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            low, high = correlation.interval
            axes.set_title(f"ρ = {correlation.spearman:.2f} ({low:.2f} … {high:.2f})", fontsize=8)
            axes.set_xlabel(correlation.distance)
        for axes in panels[:, 0]:
            axes.set_ylabel("accuracy drop (points)")
        _add_legend(figure, study, widths, colours)
        figure.suptitle(
            f"{title}: {len(study.points)} networks, {study.samples} samples; ρ: Spearman, 95 % interval",
            x=0.01,
            ha="left",
        )
    return figure


def _add_legend(figure: Figure, study: DistanceStudy, widths: Sequence[str], colours: Any) -> None:
    handles = [
        Line2D([], [], marker="o", linestyle="", color=colour, label=width)
        for width, colour in zip(widths, colours, strict=True)
    ]
    alphas = dict.fromkeys(point.alpha if point.alpha in _MARKERS else 0.5 for point in study.points)
    for alpha in alphas:
        one = sum(isinstance(point.alpha, float) for point in study.points) <= len(widths)
        label = _TITLES.get(alpha, f"α = {alpha:g}" if one and isinstance(alpha, float) else "one α for all layers")
        handles.append(Line2D([], [], marker=_MARKERS[alpha], linestyle="", color="grey", label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=7)


# Tables ---------------------------------------------------------------------------------------------------------


def analysis_tables(analysis: Analysis) -> list[Table]:
    """Everything for the screen, what to do last."""
    tables = [layers_table(analysis), outliers_table(analysis.outliers)]
    tables += [distances_table(study) for study in analysis.distances]
    if analysis.remedies:
        tables.append(remedies_table(analysis.remedies))
    return tables


def layers_table(analysis: Analysis) -> Table:
    found = analysis.sensitivities
    effects = {layer.layer: layer for layer in found.layers} if found else {}
    measured = f"; sensitivity on {found.samples} samples" if found else ""
    notes = []
    if found:
        notes.append(
            "loss: change of the cross-entropy, from float with only this layer quantized, from all quantized without "
            "it; * the 95 % interval leaves out 0"
        )
    if analysis.recipe.refine != "none":
        notes.append("refined weights make up for the rounding of the inputs, so a part alone can err more than both")
    table = plain_table(
        f"relative L1 error in %, by weights and by activations, on {analysis.samples} samples{measured}",
        "layer", "bits", "alone", "weights", "act.", "in all", "weights", "act.", "SQNR dB",
        *(["loss, only this", "loss, all but this"] if found else []),
        caption="; ".join(notes) or None,
    )  # fmt: skip
    for layer in analysis.layers:
        errors = [f"{100 * _l1(layer, where, part):.2f}" for where in ("isolated", "accumulated") for part in PARTS]
        effect = effects.get(layer.layer)
        changes = [effect.enable.loss, effect.disable.loss] if effect else []
        cells = [_signed(change, 4) for change in changes] or [""] * (2 * bool(found))
        table.add_row(layer.layer, layer.bits, *errors, f"{layer.isolated.both.sqnr:.1f}", *cells)
    return table


def _signed(change: Change, digits: int) -> str:
    return f"{'* ' if change.is_clear else ''}{change.change:+.{digits}f}"


def outliers_table(layers: Sequence[Outliers]) -> Table:
    title = f"input channels above {OUTLIER:g} × the median channel"
    if not layers:
        return plain_table("", f"{title}: none in any layer")
    table = plain_table(
        title, "layer", "outliers", "of", "largest (channel: magnitude)", "range they cost", "step finer without"
    )
    for layer in layers:
        largest = ", ".join(f"{channel.channel}: {channel.magnitude:.3g}" for channel in layer.listed[:3])
        cells = largest, f"{100 * layer.share:.0f} %", f"{layer.finer:.2f} ×"
        table.add_row(layer.layer, str(layer.count), str(layer.channels), *cells)
    return table


def remedies_table(remedies: Remedies) -> Table:
    reference, before = remedies.reference, remedies.quantized
    table = plain_table(
        f"remedies, measured on {before.n} samples: float {reference.evaluation.score():.2f}, this network "
        f"{before.evaluation.score():.2f}, loss {reference.loss:.4f} and {before.loss:.4f}",
        "remedy", "score", "change", "95 % interval", "loss", "seconds", "command",
        caption="; ".join(f"not tried: {name} ({reason})" for name, reason in remedies.skipped.items()) or None,
    )  # fmt: skip
    table.columns[0].no_wrap = False
    table.columns[-1].no_wrap, table.columns[-1].justify = False, "left"
    for remedy in remedies.tried:
        score, loss = remedy.effect.score, remedy.effect.loss
        table.add_row(
            remedy.name,
            f"{remedy.answers.evaluation.score():.2f}",
            _signed(score, 2),
            f"{score.interval[0]:+.2f} … {score.interval[1]:+.2f}",
            _signed(loss, 4),
            f"{remedy.seconds:.1f}",
            " && ".join(remedy.commands),
        )
    return table


def distances_table(study: DistanceStudy) -> Table:
    if not study.correlations:
        text = f"which distance predicts the loss of accuracy: no two networks of the {study.source} differ in it"
        return plain_table("", text)
    table = plain_table(
        f"which distance predicts the loss of accuracy: {len(study.points)} networks of the {study.source}, "
        f"{study.samples} samples",
        "distance", "rank correlation", "95 % interval", "within one width", "with the loss",
    )  # fmt: skip
    for correlation in study.correlations:
        low, high = correlation.interval
        others = ("" if x is None else f"{x:.2f}" for x in (correlation.within, correlation.with_loss))
        table.add_row(correlation.distance, f"{correlation.spearman:.2f}", f"{low:.2f} … {high:.2f}", *others)
    return table


def watched_table(watched: Watched) -> Table:
    listed = ", ".join(f"{channel}: {magnitude:.3g}" for channel, magnitude in watched.outlier_channels.items())
    table = plain_table(
        f"{watched.layer}: {watched.kind}, {watched.bits}, {watched.samples} samples",
        "tensor", "shape", "min", "max", "mean", "std", "zeros", "SQNR dB", "L1 error",
        caption=f"input channels above {OUTLIER:g} × the median: {listed or 'none'}",
    )  # fmt: skip
    for tensor in watched.tensors:
        values = (f"{x:.4g}" for x in (tensor.minimum, tensor.maximum, tensor.mean, tensor.std))
        distance = tensor.distance
        errors = ["", ""] if distance is None else [f"{distance.sqnr:.1f}", f"{100 * distance.l1:.2f} %"]
        shape = "×".join(map(str, tensor.shape))
        table.add_row(tensor.name, shape, *values, f"{100 * tensor.zeros:.1f} %", *errors)
    return table
