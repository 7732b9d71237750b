"""The charts of the page, each a piece of SVG; every mark that can be pointed at carries its values as a title."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from ptq.calibration import LayerStatistics
from ptq.report.page.drawing import Scale, band, frame, line, narrowed, padded, polyline, stairs, svg, text
from ptq.report.page.markup import tag
from ptq.report.plots import score_label
from ptq.sweeping import Accuracy, Alpha, Sweep

_COLUMNS = 192  # of channels in a drawer, at most
_BINS = 96
_TITLED = 3000  # cells of a heat map that still carry their values
_SMALL = 360, 160  # a chart of a drawer
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 350, 30, 124
SERIES = 6  # colours of the style sheet

# What has no single α: the class of its line, and its name.
_REFERENCES: dict[Alpha, tuple[str, str]] = {
    None: ("none", "not smoothed"),
    "auto": ("auto", "α by layer"),
    "auto+clip": ("clip", "α by layer and clipped ranges"),
}


def interval_text(low: float, high: float) -> str:
    return f"{low:.2f} … {high:.2f}"


def alpha_name(alpha: Alpha) -> str:
    """``α = 0.5``, or what is done without a single α."""
    return _REFERENCES[alpha][1] if alpha in _REFERENCES else f"α = {alpha:g}"


def series(index: int) -> str:
    return f"series-{index % SERIES + 1}"


def alpha_curve(sweep: Sweep) -> Markup:
    """Accuracy against α with its 95 % band, a curve for each number of bits; lines for what has no single α."""
    x = Scale(0, 1, 54, 700)
    scores = [point.accuracy.score for point in sweep.points]
    bounds = [bound for point in sweep.points if point.accuracy for bound in point.accuracy.interval]
    if sweep.reference:
        bounds += sweep.reference.interval
    low, high = padded(scores + bounds, 0.03)
    y = Scale(low, min(high, 100.0) if max(bounds) <= 100 else high, 320, 34)
    parts = frame(x, y, "α  (0: weights stay as they are, 1: activations become even)", score_label(sweep.reference))
    labels: list[tuple[float, str, str]] = []
    if sweep.reference:
        place = y(sweep.reference.score)
        parts.append(line(x.start, place, x.stop, place, "float"))
        labels.append((place + 4, "float", ""))
    for index, bits in enumerate(sweep.bits):
        parts.append(_curve(sweep, bits, x, y, series(index), labels))
    parts += [text(x.stop + 6, place, name, f"name {class_}") for place, name, class_ in _spread(labels)]
    return svg(790, 360, "Accuracy against α", parts, "chart interactive")


def _curve(sweep: Sweep, bits: str, x: Scale, y: Scale, class_: str, labels: list[tuple[float, str, str]]) -> Markup:
    curve = sweep.curve(bits)
    parts = []
    for alpha, (style, name) in _REFERENCES.items():
        point = sweep.find(bits, alpha)
        if point is not None:
            place = y(point.accuracy.score)
            title = tag("title", _point_text(bits, name, point.accuracy, point.changed))
            parts.append(tag("g", title, line(x.start, place, x.stop, place, f"reference {style}")))
    if curve:
        places = [(x(float(point.alpha or 0)), point) for point in curve]
        bounds = [(place, *point.accuracy.interval) for place, point in places]
        parts.append(band([(place, y(low), y(high)) for place, low, high in bounds], "band"))
        parts.append(polyline([(p, y(point.accuracy.score)) for p, point in places], "curve"))
        best = sweep.best(bits)
        for place, point in places:
            title = tag("title", _point_text(bits, f"α = {point.alpha:g}", point.accuracy, point.changed))
            ring = "point best" if point is best else "point"
            circle = tag("circle", title, cx=place, cy=y(point.accuracy.score), r=5 if point is best else 3.5)
            parts.append(tag("g", circle, class_=ring))
        labels.append((y(curve[-1].accuracy.score) + 4, bits, class_))
    return tag("g", *parts, class_=f"curve-group {class_}")


def _point_text(bits: str, what: str, accuracy: Accuracy, changed: int) -> str:
    score = f"{accuracy.score:.2f} ({interval_text(*accuracy.interval)})"
    return f"{bits}, {what}: {score}, {changed} of {accuracy.n} answers changed"


def _spread(labels: Sequence[tuple[float, str, str]], apart: float = 13.0) -> list[tuple[float, str, str]]:
    """Labels moved down as far as they need to be readable."""
    placed: list[tuple[float, str, str]] = []
    for place, name, class_ in sorted(labels):
        placed.append((max(place, placed[-1][0] + apart) if placed else place, name, class_))
    return placed


def layer_curve(sweep: Sweep, layer: str) -> Markup:
    """One layer's relative L1 error against α, and without smoothing as a dashed line."""
    x = Scale(0, 1, _LEFT, 312)
    found = [point.layer_l1[layer] for point in sweep.points if layer in point.layer_l1]
    _, high = padded(found)
    y = Scale(0, high, _BOTTOM, _TOP)
    parts = frame(x, y, "α", "relative L1 error of this layer alone", x_ticks=6, y_ticks=4)
    labels = []
    for index, bits in enumerate(sweep.bits):
        curve, plain = sweep.curve(bits), sweep.find(bits, None)
        inside = []
        if plain:
            place = y(plain.layer_l1[layer])
            inside.append(line(x.start, place, x.stop, place, "reference none"))
        if curve:
            places = [(x(float(point.alpha or 0)), y(point.layer_l1[layer])) for point in curve]
            inside.append(polyline(places, "curve"))
            best = min(curve, key=lambda point: point.layer_l1[layer])
            title = tag("title", f"{bits}: least at α = {best.alpha:g}, {best.layer_l1[layer]:.4f}")
            inside.append(
                tag("circle", title, cx=x(float(best.alpha or 0)), cy=y(best.layer_l1[layer]), r=4, class_="mark")
            )
            labels.append((places[-1][1] + 4, bits, series(index)))
        parts.append(tag("g", *inside, class_=f"curve-group {series(index)}"))
    parts += [text(x.stop + 5, place, name, f"name {class_}") for place, name, class_ in _spread(labels)]
    return svg(*_SMALL, f"Error of {layer} against α", parts)


def channel_bars(before: LayerStatistics, after: LayerStatistics | None, attribute: str) -> Markup:
    """The largest value of each input channel, before and after smoothing on one scale; in brackets ÷ median."""
    pairs = [("before", before)] + ([("after", after)] if after else [])
    values = {when: getattr(statistics, attribute).double().numpy() for when, statistics in pairs}
    top = max(float(part.max(initial=0)) for part in values.values()) or 1.0
    class_, what = ("series-1", "|x|") if attribute == "activation_absmax" else ("series-2", "|w|")
    y = Scale(0, top, _BOTTOM, _TOP)
    width = (_RIGHT - _LEFT) / len(values)
    parts = []
    for value in y.ticks(3):
        parts.append(line(_LEFT, y(value), _RIGHT, y(value), "grid"))
        parts.append(text(_LEFT - 6, y(value) + 3.5, f"{value:.3g}", "tick", "end"))
    for index, (when, part) in enumerate(values.items()):
        start = _LEFT + index * width
        x = Scale(0, len(part), start, start + width - 6)
        parts.append(stairs(narrowed(part, _COLUMNS), x, y, f"bars {class_}"))
        parts.append(text(start, _TOP - 10, f"{when}: {part.max():.3g} ({_times(part)})", "label"))
    parts.append(text(_RIGHT, _BOTTOM + 16, f"{len(values['before'])} input channels", "tick", "end"))
    return svg(*_SMALL, f"Largest {what} of each input channel", parts)


def _times(values: NDArray[np.float64]) -> str:
    median = float(np.sort(values)[(len(values) - 1) // 2])
    return f"{values.max() / median:.2g}×" if median > 0 else "∞ ×"


def histogram(layer: LayerStatistics, clip: tuple[float, float] | None) -> tuple[Markup, str] | None:
    """How often each input value occurs, on a logarithmic scale, with marks where it is clipped; and what of.

    From the calibration's histogram; from its sampled rows where it has none.
    """
    low, high = min(0.0, float(layer.minimum.min())), max(0.0, float(layer.maximum.max()))
    if not high > low:
        return None
    edges = np.linspace(low, high, _BINS + 1)
    if layer.histogram is not None:
        counts, _ = np.histogram(
            layer.histogram.centers.numpy(), edges, weights=layer.histogram.counts.double().numpy()
        )
        source = "of the calibration's inputs"
    elif layer.rows is not None and layer.rows.numel():
        counts, _ = np.histogram(layer.rows.float().numpy(), edges)
        source = f"of {layer.rows.numel():,} sampled input values"
    else:
        return None
    x = Scale(low, high, _LEFT, _RIGHT)
    heights = np.log10(1 + counts.astype(np.float64))
    y = Scale(0, float(heights.max()) or 1.0, _BOTTOM, _TOP)
    parts = []
    for power in range(0, math.ceil(y.high), max(1, math.ceil(y.high / 4))):
        place = y(math.log10(1 + 10**power))
        parts.append(line(_LEFT, place, _RIGHT, place, "grid"))
        parts.append(text(_LEFT - 6, place + 3.5, str(10**power) if power < 4 else f"1e{power}", "tick", "end"))
    parts.append(stairs(heights, x, y, "bars series-5"))
    parts += [text(x(value), _BOTTOM + 16, f"{value:.3g}", "tick", "middle") for value in x.ticks(6)]
    if clip:
        inside = [bound for bound in clip if low <= bound <= high and (bound != 0 or low < 0)]
        parts += [line(x(bound), _TOP - 6, x(bound), _BOTTOM, "clip") for bound in inside]
        parts.append(text(_LEFT, _TOP - 10, f"clipped at {clip[0]:.3g} and {clip[1]:.3g}", "label"))
    return svg(*_SMALL, "Histogram of the input with its clipping range", parts), source


def layer_heat_map(sweep: Sweep, anchors: Mapping[str, str]) -> Markup:
    """Each layer's error against α, relative to its own without smoothing: ``log2`` from half to twice.

    Blue is better than without smoothing, orange worse; a dot marks each layer's best α.
    """
    layers = [name for name in anchors if name in sweep.points[0].layer_l1]
    widths = [bits for bits in sweep.bits if sweep.curve(bits)]
    columns = sum(len(sweep.curve(bits)) for bits in widths)
    cell, row, gap, top = min(24.0, max(8.0, 720 / columns)), 16.0, 26.0, 26.0
    margin = 12 + 6.2 * max(len(_clipped(name)) for name in layers)
    parts = []
    for index, name in enumerate(layers):
        label = text(margin - 8, top + (index + 0.72) * row, _clipped(name), "tick", "end")
        parts.append(tag("a", tag("title", name), label, href=f"#{anchors[name]}"))
    start = margin
    for bits in widths:
        parts.append(_heat_panel(sweep, bits, layers, start, top, cell, row))
        start += cell * len(sweep.curve(bits)) + gap
    return svg(start, top + row * len(layers) + 30, "Layer error against α", parts, "chart heat")


def _clipped(name: str, most: int = 34) -> str:
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _heat_panel(
    sweep: Sweep, bits: str, layers: Sequence[str], start: float, top: float, cell: float, row: float
) -> Markup:
    curve, plain = sweep.curve(bits), sweep.find(bits, None)
    parts = [text(start, top - 10, bits, "label")]
    titled = len(layers) * len(sweep.points) <= _TITLED
    for index, name in enumerate(layers):
        errors = [point.layer_l1[name] for point in curve]
        base = plain.layer_l1[name] if plain else max(errors)
        for column, error in enumerate(errors):
            relative = math.log2(max(error, 1e-12) / max(base, 1e-12))
            values = f"{name}, {bits}, α = {curve[column].alpha:g}: {error:.4f}, {2**relative:.2f}× of not smoothed"
            parts.append(
                tag(
                    "rect",
                    *([tag("title", values)] if titled else []),
                    x=start + column * cell,
                    y=top + index * row,
                    width=cell,
                    height=row,
                    class_="worse" if relative > 0 else "better",
                    fill_opacity=min(1.0, abs(relative)),
                )
            )
        best = min(range(len(errors)), key=errors.__getitem__)
        parts.append(
            tag("circle", cx=start + (best + 0.5) * cell, cy=top + (index + 0.5) * row, r=2.2, class_="best-dot")
        )
    height = row * len(layers)
    parts.append(tag("rect", x=start, y=top, width=cell * len(curve), height=height, class_="outline"))
    step = max(1, math.ceil(40 / cell))
    for column in range(step // 2, len(curve), step):
        parts.append(
            text(start + (column + 0.5) * cell, top + height + 14, f"{curve[column].alpha:g}", "tick", "middle")
        )
    parts.append(text(start + cell * len(curve) / 2, top + height + 28, "α", "label", "middle"))
    return tag("g", *parts)
