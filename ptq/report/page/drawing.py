"""SVG by hand, as little as charts need. Colours are classes: the style sheet knows light, dark and paper."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ptq.report.page.markup import short, tag


def svg(width: float, height: float, label: str, parts: Iterable[Markup], class_: str = "chart") -> Markup:
    """A picture that scales with its column; ``label`` is what a screen reader says."""
    return tag(
        "svg", *parts, viewBox=f"0 0 {short(float(width))} {short(float(height))}", class_=class_, role="group",
        aria_label=label, style=f"--natural: {width:.0f}px",
    )  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """Maps values from ``low`` to ``high`` to places from ``start`` to ``stop``."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.stop - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values inside the scale."""
        values = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]).tick_values(self.low, self.high)
        margin = 1e-9 * (self.high - self.low)
        return [float(value) for value in values if self.low - margin <= value <= self.high + margin]


def polyline(points: Sequence[tuple[float, float]], class_: str) -> Markup:
    return tag("path", d="M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=class_)


def band(points: Sequence[tuple[float, float, float]], class_: str) -> Markup:
    """The area between two curves: x, lower and upper y."""
    there = [f"{x:.1f},{low:.1f}" for x, low, _ in points]
    back = [f"{x:.1f},{high:.1f}" for x, _, high in reversed(points)]
    return tag("path", d=f"M{'L'.join(there + back)}Z", class_=class_)


def stairs(values: NDArray[np.float64], x: Scale, y: Scale, class_: str) -> Markup:
    """Filled steps of equal width from zero up: one value after the other along the whole of ``x``."""
    width = (x.stop - x.start) / max(1, len(values))
    steps = "".join(f"V{y(float(value)):.1f}h{width:.2f}" for value in values)
    return tag("path", d=f"M{x.start:.1f},{y(0):.1f}{steps}V{y(0):.1f}Z", class_=class_)


def text(x: float, y: float, content: str, class_: str = "", anchor: str | None = None) -> Markup:
    return tag("text", content, x=float(x), y=float(y), class_=class_ or None, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def frame(x: Scale, y: Scale, x_label: str, y_label: str, *, x_ticks: int = 8, y_ticks: int = 5) -> list[Markup]:
    """Grid lines across, ticks below, and what the axes are; the labels stand where they need no turned head."""
    parts = []
    for value in y.ticks(y_ticks):
        parts.append(line(x.start, y(value), x.stop, y(value), "grid"))
        parts.append(text(x.start - 6, y(value) + 3.5, f"{value:g}", "tick", "end"))
    for value in x.ticks(x_ticks):
        parts.append(text(x(value), y.start + 16, f"{value:g}", "tick", "middle"))
    parts.append(text(x.stop, y.start + 32, x_label, "label", "end"))
    parts.append(text(x.start, y.stop - 8, y_label, "label"))
    return parts


def padded(values: Iterable[float], share: float = 0.06) -> tuple[float, float]:
    """The range of the values with some air around it."""
    found = [value for value in values if math.isfinite(value)]
    low, high = min(found), max(found)
    air = share * (high - low) or max(1e-3, abs(high) * share)
    return low - air, high + air


def narrowed(values: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """At most so many values, each the largest of its neighbours: an outlier stays where it is."""
    if len(values) <= most:
        return values
    edges = np.linspace(0, len(values), most + 1).astype(int)[:-1]
    largest: NDArray[np.float64] = np.maximum.reduceat(values, edges)
    return largest
