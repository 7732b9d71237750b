"""Pictures of a sweep, drawn in one style: labelled axes, units, colours that everybody can tell apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from ptq.storage import replacing
from ptq.sweeping import Accuracy, Alpha, Sweep

# Okabe and Ito's palette, without its yellow, which vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
STYLE: Any = {
    "figure.dpi": 150,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "ptq",
}


def save(figure: Figure, path: Path) -> None:
    with replacing(path) as partial:
        # No date and no software version inside: the same numbers give the same file.
        figure.savefig(partial, format="png", metadata={"Software": None})


def score_label(accuracy: Accuracy | None) -> str:
    """What an axis with scores is called."""
    return "Matthews correlation × 100" if accuracy and accuracy.metric == "matthews" else "top-1 accuracy (%)"


# α that isn't a number: how its line is drawn, and what it is called in short and at length.
_LINES: dict[Alpha, tuple[str, str, str]] = {
    None: ("--", "none", "none: not smoothed"),
    "auto": (":", "by layer", "by layer: α chosen for each"),
    "auto+clip": ("-.", "clipped", "clipped: with α and ranges by layer"),
}


def alpha_sweep(sweep: Sweep, title: str) -> Figure:
    """Accuracy against α: one curve for each number of bits, and lines for what has no α or one for each layer."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.4 + 0.22 * len(sweep.bits)), layout="constrained")
        axes = figure.add_subplot()
        for colour, bits in zip(_cycle(len(sweep.bits)), sweep.bits, strict=True):
            _draw_curve(axes, sweep, bits, colour)
        if sweep.reference is not None:
            label = f"float: {sweep.reference.score:.2f}"
            axes.axhline(sweep.reference.score, color="black", linewidth=1, label=label, zorder=1)
        for alpha, (style, _, name) in _LINES.items():
            if any(point.alpha == alpha for point in sweep.points):
                axes.plot([], [], color="grey", linestyle=style, label=name)
        axes.set_xlabel("α  (0: weights stay as they are, 1: activations become even)")
        axes.set_ylabel(score_label(sweep.reference))
        axes.set_xlim(-0.02, 1.02)
        axes.set_title(title, loc="left")
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def _draw_curve(axes: Any, sweep: Sweep, bits: str, colour: str) -> None:
    curve = sweep.curve(bits)
    alphas = [point.alpha for point in curve]
    best = sweep.best(bits)
    scores = [f"best α = {best.alpha:g}: {best.accuracy.score:.2f}"]
    for alpha, (style, name, _) in _LINES.items():
        point = sweep.find(bits, alpha)
        if point is not None:
            axes.axhline(point.accuracy.score, color=colour, linestyle=style, linewidth=1.2)
            scores.append(f"{name} {point.accuracy.score:.2f}")
    label = f"{bits}, {', '.join(scores)}"
    axes.plot(alphas, [point.accuracy.score for point in curve], "o-", color=colour, markersize=3.5, label=label)
    lows, highs = zip(*(point.accuracy.interval for point in curve), strict=True)
    axes.fill_between(alphas, lows, highs, color=colour, alpha=0.15, linewidth=0)
    axes.plot(best.alpha, best.accuracy.score, "o", color=colour, markersize=9, fillstyle="none", markeredgewidth=1.5)


def alpha_sweep_layers(sweep: Sweep, title: str) -> Figure:
    """Relative L1 error of each layer against α as a heat map, one panel for each number of bits, best α marked.

    Colours show each layer's error relative to its own unsmoothed error, so that one scale serves all of them:
    blue is better than without smoothing, red is worse.
    """
    layers = list(sweep.points[0].layer_l1)
    widths = sweep.bits
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(2.2 + 3.6 * len(widths), max(3.0, 1.2 + 0.2 * len(layers))), layout="constrained")
        panels = np.atleast_1d(figure.subplots(1, len(widths), sharey=True))
        for panel, bits in zip(panels, widths, strict=True):
            image = _draw_heat_map(panel, sweep, bits, layers)
        panels[0].set_yticks(range(len(layers)), layers, fontsize=7)
        bar = figure.colorbar(image, ax=panels, pad=0.01, aspect=40)
        ticks = (-1, -0.5, 0, 0.5, 1)
        bar.set_ticks(ticks, labels=[f"{2**tick:.2g}×" for tick in ticks])
        bar.set_label("layer error relative to no smoothing")
        figure.suptitle(title, x=0.01, ha="left")
    return figure


def _draw_heat_map(axes: Any, sweep: Sweep, bits: str, layers: list[str]) -> Any:
    curve, plain = sweep.curve(bits), sweep.find(bits, None)
    errors = np.array([[point.layer_l1[layer] for point in curve] for layer in layers])  # [layers, alphas]
    base = np.array([plain.layer_l1[layer] for layer in layers])[:, None] if plain else errors.max(1, keepdims=True)
    relative = np.log2(np.maximum(errors, 1e-12) / np.maximum(base, 1e-12))
    image = axes.imshow(relative, aspect="auto", cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
    axes.plot(errors.argmin(1), range(len(layers)), "o", color="black", markersize=3)
    step = max(1, len(curve) // 6)
    places = range(0, len(curve), step)
    axes.set_xticks(places, [f"{curve[i].alpha:g}" for i in places])
    axes.set(xlabel="α", title=f"{bits}  (● best α)")
    return image


def _cycle(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]
