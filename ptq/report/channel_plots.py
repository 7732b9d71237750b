"""Channel by channel, before and after smoothing: the activations lose their outliers, the weights take them over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ptq.calibration import Calibration, LayerStatistics
from ptq.errors import InputError, MismatchError
from ptq.report.plots import COLOURS, STYLE

Values: TypeAlias = npt.NDArray[np.float64]

_LAYERS = 4  # drawn when nobody says which
_COLUMNS = 512  # of the heat map, at most
_LIMITS = (math.log10(2), 2.0)  # a factor of two at least, of a hundred at most, uses the colours up
_QUANTITIES = (
    ("activation, largest |x|", "activation_absmax", COLOURS[0]),
    ("weight, largest |w|", "weight_absmax", COLOURS[1]),
)


def channel_magnitudes(
    before: Calibration, after: Calibration, title: str, layers: Sequence[str] | None = None
) -> Figure:
    """One row for each layer: largest activation and weight of each input channel, before and after smoothing.

    Before and after share their scale; the dashed line is the largest channel, which a quantizer's range has to
    cover. Unless ``layers`` says which, those whose activations' outlier ratio (largest over median) fell most.
    """
    names = _most_improved(before, after) if layers is None else list(layers)
    if not names:
        raise InputError("no layer to draw: calibrate the same model before and after smoothing, or name a layer")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 0.8 + 2.3 * len(names)), layout="constrained")
        rows = figure.subplots(len(names), 4, squeeze=False)
        for row, name in zip(rows, names, strict=True):
            _draw_layer(row, name, *_pair(before, after, name))
        for panel in rows[-1]:
            panel.set_xlabel("input channel")
        figure.suptitle(title, x=0.01, ha="left")
    return figure


def _most_improved(before: Calibration, after: Calibration) -> list[str]:
    def fall(name: str) -> float:
        ratio = before.layers[name].outlier_ratio / after.layers[name].outlier_ratio
        return 1.0 if math.isnan(ratio) else ratio  # ∞ / ∞: most channels are zero, before and after

    common = [name for name in before.layers if name in after.layers]
    chosen = set(sorted(common, key=fall, reverse=True)[:_LAYERS])
    return [name for name in common if name in chosen]  # in the order of execution


def _pair(before: Calibration, after: Calibration, name: str) -> tuple[LayerStatistics, LayerStatistics]:
    for calibration, which in ((before, "before"), (after, "after")):
        if name not in calibration.layers:
            known = ", ".join(list(calibration.layers)[:3])
            raise InputError(f"{name}: not in the calibration {which} smoothing: name one of its layers ({known}, …)")
    pair = before.layers[name], after.layers[name]
    if pair[0].channels != pair[1].channels:
        raise MismatchError(
            f"{name}: {pair[0].channels} channels before, {pair[1].channels} after: calibrate the same model twice"
        )
    return pair


def _draw_layer(panels: Any, name: str, before: LayerStatistics, after: LayerStatistics) -> None:
    panels[0].set_title(f"{name}  ({before.kind}, channels: {before.channels})", loc="left", fontsize=10)
    for (label, attribute, colour), pair in zip(_QUANTITIES, (panels[:2], panels[2:]), strict=True):
        values = [getattr(statistics, attribute).double().numpy() for statistics in (before, after)]
        top = max(float(part.max()) for part in values)
        for panel, part, when in zip(pair, values, ("before", "after"), strict=True):
            _draw_channels(panel, part, when, colour)
            panel.set_ylim(0, 1.2 * top if top > 0 else 1.0)
        pair[0].set_ylabel(label, fontsize=9)
        pair[1].tick_params(labelleft=False)  # the same scale


def _draw_channels(axes: Any, values: Values, when: str, colour: str) -> None:
    edges = np.arange(len(values) + 1) - 0.5
    # The outline keeps a single outlier among thousands of channels visible.
    axes.stairs(values, edges, fill=True, facecolor=colour, edgecolor=colour, linewidth=0.6, alpha=0.8)
    axes.axhline(values.max(), color="black", linestyle="--", linewidth=0.8)
    label = f"{when}: max {values.max():.3g}, {_times(_ratio(values))} median"
    axes.text(0.99, 0.99, label, transform=axes.transAxes, ha="right", va="top", fontsize=9)
    axes.set_xlim(edges[0], edges[-1])
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(4))


def _ratio(values: Values) -> float:
    """Largest over median channel, as ``LayerStatistics.outlier_ratio``: the median of an even number is the lower."""
    median = float(np.sort(values)[(len(values) - 1) // 2])
    return float(values.max()) / median if median > 0 else math.inf


def _times(ratio: float) -> str:
    return f"{ratio:.3g}×" if math.isfinite(ratio) else "∞ ×"


def all_layers_heatmap(before: Calibration, after: Calibration, title: str) -> Figure:
    """Every layer a row, its channels from the largest to the smallest, before and after smoothing.

    Colour is ``log10(channel absmax / median)`` of the activations, the median being that of channels that aren't
    zero: an even layer is white, an outlier red, a layer without statistics grey. Places are logarithmic, so that
    three outliers among thousands of channels are still seen.
    """
    if not before.layers:
        raise InputError("the calibration has no layers: calibrate the model again")
    names = list(before.layers)
    widest = max(layer.channels for layer in before.layers.values())
    maps = np.array([[_profile(calibration, name, widest) for name in names] for calibration in (before, after)])
    top = float(np.nan_to_num(maps, neginf=0.0).max())
    limit = float(np.clip(top, *_LIMITS))
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(11, max(3.4, 1.6 + 0.2 * len(names))), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for panel, values, when in zip(panels, maps, ("before", "after"), strict=True):
            image = _draw_profiles(panel, values, limit, widest)
            panel.set(title=f"{when} smoothing", xlabel="share of the layer's channels, largest first")
        panels[0].set_yticks(range(len(names)), names, fontsize=7)
        bar = figure.colorbar(image, ax=panels, pad=0.01, aspect=40, extend="both" if top > limit else "min")
        ticks = [float(tick) for tick in np.linspace(-limit, limit, 5)]
        bar.set_ticks(ticks, labels=[f"{10**tick:.2g}×" for tick in ticks])
        bar.set_label("activation absmax / median")
        figure.suptitle(title, x=0.01, ha="left")
    return figure


def _profile(calibration: Calibration, name: str, widest: int) -> Values:
    """``log10(absmax / median)``, largest first, at logarithmic places from ``1 / (2 · widest)`` to 1.

    -∞ for a channel that is zero; NaN if all are, or the layer is missing.
    """
    if name not in calibration.layers or not calibration.layers[name].activation_absmax.any():
        return np.full(_COLUMNS, np.nan)
    values = np.sort(calibration.layers[name].activation_absmax.double().numpy())[::-1]
    shares = (2.0 * widest) ** (np.arange(_COLUMNS) / _COLUMNS - 1)
    with np.errstate(divide="ignore"):
        relative = np.log10(values / np.median(values[values > 0]))
    profile: Values = relative[(shares * len(values)).astype(int)]  # channel i covers i / C to (i + 1) / C
    return profile


def _draw_profiles(axes: Any, values: Values, limit: float, widest: int) -> Any:
    axes.set_facecolor("#cccccc")
    shown = np.where(np.isneginf(values), -2 * limit, values)  # a zero channel is below every colour
    extent = (0, 1, len(values) - 0.5, -0.5)
    image = axes.imshow(
        shown, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest", extent=extent
    )
    shares = [share for share in (0.001, 0.01, 0.1, 1.0) if share * widest >= 1]
    places = [1 + math.log(share) / math.log(2 * widest) for share in shares]
    axes.set_xticks(places, [f"{100 * share:g} %" for share in shares])
    return image
