"""Charts that put networks side by side: dots with intervals, bars, and dots of distance against accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ptq.report.page.charts import SERIES, alpha_name, interval_text, series
from ptq.report.page.drawing import Scale, frame, line, padded, svg, text
from ptq.report.page.markup import tag
from ptq.report.page.scores import metric_title

WAYS = (
    ("weights_only", "weights only"),
    ("with_activations", "weights and activations"),
    ("undequantized", "on undequantized codes"),
)
_WAY_SERIES = ("series-1", "series-3", "series-2")


def whisker(score: float, interval: tuple[float, float], scale: Scale, reference: float | None = None) -> Markup:
    """A dot with its interval, on the scale of its column; the reference is a thin line through all rows."""
    low, high = interval
    parts = [line(scale(low), 9, scale(high), 9, "interval"), tag("circle", cx=scale(score), cy=9, r=3.5, class_="dot")]
    if reference is not None:
        parts.insert(0, line(scale(reference), 0, scale(reference), 18, "float"))
    return tag("svg", *parts, viewBox="0 0 160 18", class_="whisker", aria_hidden="true")


def whisker_scale(rows: Sequence[tuple[float, tuple[float, float]]]) -> Scale:
    """The scale that all rows of a table share."""
    return Scale(*padded([bound for _, interval in rows for bound in interval]), 4, 156)


def precision_bars(rows: Sequence[tuple[str, Mapping[str, Any]]], metric: str) -> Markup:
    """A group of bars for each precision, one for each way to use it, with 95 % intervals."""
    bottom = min(0.0, *(row[way]["interval"][0] for _, row in rows for way, _ in WAYS if row[way]))
    y = Scale(bottom, 100, 250, 50)
    x = Scale(0, len(rows), 54, min(760.0, 54 + 110.0 * len(rows)))
    parts = []
    for value in y.ticks(5):
        parts.append(line(x.start, y(value), x.stop, y(value), "grid"))
        parts.append(text(x.start - 6, y(value) + 3.5, f"{value:g}", "tick", "end"))
    parts.append(text(x.start, y.stop - 34, metric_title(metric), "label"))
    for index, (_, title) in enumerate(WAYS):
        parts.append(
            tag("rect", x=x.start + index * 190.0, y=28.0, width=10, height=10, class_=f"bars {_WAY_SERIES[index]}")
        )
        parts.append(text(x.start + index * 190.0 + 16, 37, title, "tick"))
    width = (x(1) - x(0)) * 0.8 / len(WAYS)
    for place, (name, row) in enumerate(rows):
        parts.append(text(x(place + 0.5), y.start + 16, name, "tick", "middle"))
        for index, (way, title) in enumerate(WAYS):
            if not row[way]:
                continue
            score, (low, high) = row[way]["score"], row[way]["interval"]
            start = x(place + 0.1) + index * width
            label = tag("title", f"{name}, {title}: {score:.2f} ({interval_text(low, high)})")
            top, height = y(max(score, 0.0)), abs(y(score) - y(0))
            bar = tag(
                "rect", label, x=start, y=top, width=width - 3, height=height, class_=f"bars {_WAY_SERIES[index]}"
            )
            middle = start + (width - 3) / 2
            parts.append(tag("g", bar, line(middle, y(low), middle, y(high), "whisk")))
    return svg(x.stop + 10, 276, "Accuracy at every precision", parts, "chart interactive")


def distance_scatter(points: Sequence[Mapping[str, Any]], distance: str, metric: str) -> Markup:
    """Each network a dot: how far its tensors are from float's, and how much it lost; bits by colour."""
    xs, ys = [point["distances"][distance] for point in points], [point["drop"] for point in points]
    x, y = Scale(*padded(xs), 54, 640), Scale(*padded(ys), 250, 30)
    parts = frame(x, y, distance, f"points of {metric_title(metric)} lost")
    widths = list(dict.fromkeys(point["bits"] for point in points))
    for point, at, drop in zip(points, xs, ys, strict=True):
        way = alpha_name(point["alpha"])
        label = f"{point['bits']}, {way}: {distance} {at:.4g}, {drop:.2f} points lost"
        class_ = _scatter_class(widths.index(point["bits"]))
        parts.append(tag("circle", tag("title", label), cx=x(at), cy=y(drop), r=4, class_=class_))
    for index, bits in enumerate(widths):
        place = y.stop + 16 * index
        parts.append(tag("circle", cx=x.stop + 16, cy=place, r=4, class_=_scatter_class(index)))
        parts.append(text(x.stop + 26, place + 4, bits, f"name {series(index)}"))
    return svg(720, 290, f"Accuracy lost against {distance}", parts, "chart interactive")


def _scatter_class(index: int) -> str:
    """Six colours, filled and then hollow."""
    return f"scatter {series(index)}{' hollow' if index >= SERIES else ''}"
