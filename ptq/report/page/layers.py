"""The layer table: a row for each layer, and a drawer with what is known about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from ptq.quantization import Bits
from ptq.report.page import charts
from ptq.report.page.files import RunFiles
from ptq.report.page.tables import Cell, Column, number, words

MOST_DRAWN = 150  # layers with pictures in their drawers: what a page of 3 MB has room for


@dataclass(frozen=True)
class Figure:
    """A chart of a drawer."""

    caption: str
    chart: Markup


@dataclass(frozen=True)
class ErrorRow:
    """One network's distance from float at one layer, alone and in all."""

    network: str
    where: str
    cells: Sequence[str]


@dataclass(frozen=True)
class LayerRow:
    name: str
    anchor: str
    cells: list[Cell]
    figures: list[Figure] = field(default_factory=list)
    ledger: Mapping[str, Any] | None = None
    errors: list[ErrorRow] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class LayerTable:
    columns: list[Column]
    rows: list[LayerRow]

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The headings over the headings, with how many columns each spans."""
        found: list[tuple[str, int]] = []
        for column in self.columns:
            if found and column.group and found[-1][0] == column.group:
                found[-1] = (column.group, found[-1][1] + 1)
            else:
                found.append((column.group, 1))
        return found

    @property
    def has_errors(self) -> bool:
        return any(column.group == group for _, group, _ in _WHERE for column in self.columns)


def anchors(files: RunFiles) -> dict[str, str]:
    """Layer → the id of its row; names may hold anything, ids are numbered."""
    return {name: f"layer-{index}" for index, name in enumerate(files.layers)}


def layer_table(files: RunFiles) -> LayerTable:
    networks = _networks(files)
    columns = [Column("layer", number=False)]
    parts = [_kind_cells, _range_cells, _bits_cells, _ledger_cells, _sweep_cells]
    for part in parts:
        columns += part(files, None)[0]
    columns += [Column(_short(name), group, hint=f"{name}: relative L1 error {hint}")
                for _, group, hint in _WHERE for name in networks]  # fmt: skip
    spans = {where: _span(files, networks, where) for where, _, _ in _WHERE}
    drawn = _drawn(files, networks)
    rows = []
    for name in files.layers:
        cells = [words(name)]
        for part in parts:
            cells += part(files, name)[1]
        for where, _, _ in _WHERE:
            for network in networks:
                error = _error(files, name, network, where)
                cells.append(_heat_cell(error["l1"] if error else None, spans[where]))
        rows.append(
            LayerRow(
                name=name,
                anchor=anchors(files)[name],
                cells=cells,
                figures=_figures(files, name) if name in drawn else [],
                ledger=_ledger_entry(files, name),
                errors=_error_rows(files, name, networks),
                facts=_facts(files, name),
            )
        )
    return LayerTable(columns, rows)


_WHERE = (
    ("isolated", "error alone", "of this layer by itself, on float inputs"),
    ("accumulated", "error in all", "there in the whole quantized network"),
)


def _networks(files: RunFiles) -> list[str]:
    if not files.evaluation:
        return []
    layers = files.evaluation["layers"].values()
    return list(dict.fromkeys(network for layer in layers for network in layer["errors"]))


def _short(network: str) -> str:
    """``W4A4, smoothed α by layer`` is ``smoothed`` in a narrow heading."""
    bits, _, how = network.partition(", ")
    return how.split(" ")[0] if how else bits


def _error(files: RunFiles, layer: str, network: str, where: str) -> Mapping[str, Any] | None:
    if not files.evaluation:
        return None
    found: Mapping[str, Any] | None = (
        files.evaluation["layers"].get(layer, {}).get("errors", {}).get(network, {}).get(where)
    )
    return found


def _span(files: RunFiles, networks: Sequence[str], where: str) -> tuple[float, float]:
    """The smallest and the largest error of all layers and networks: what colours go from and to."""
    found = (_error(files, layer, network, where) for layer in files.layers for network in networks)
    errors = [error["l1"] for error in found if error and error["l1"] is not None]
    return min(errors, default=0.0), max(errors, default=0.0)


def _heat_cell(value: float | None, span: tuple[float, float]) -> Cell:
    if value is None:
        return Cell("")
    low, high = span
    return Cell(f"{value:.4f}", value, (value - low) / (high - low) if high > low else 0.0)


def _kind_cells(files: RunFiles, name: str | None) -> tuple[list[Column], list[Cell]]:
    kinds = files.layers
    if not any(kinds.values()):
        return [], []
    return [Column("kind", number=False)], [] if name is None else [words(kinds[name])]


def _sweep_cells(files: RunFiles, name: str | None) -> tuple[list[Column], list[Cell]]:
    """Each layer's error without smoothing at each number of bits, where no evaluation tells more."""
    if files.evaluation or not files.sweep:
        return [], []
    plain = [point for point in files.sweep.points if point.alpha is None]
    columns = [Column(point.bits, "error alone, not smoothed") for point in plain]
    if name is None:
        return columns, []
    spans = [(min(point.layer_l1.values()), max(point.layer_l1.values())) for point in plain]
    return columns, [_heat_cell(point.layer_l1.get(name), span) for point, span in zip(plain, spans, strict=True)]


def _range_cells(files: RunFiles, name: str | None) -> tuple[list[Column], list[Cell]]:
    """Channels, range and outlier ratio of the input, before and after smoothing."""
    if not files.calibration:
        return [], []
    both = files.smoothed is not None
    columns = [Column("channels", hint="input channels")]
    for group, hint in (("largest input", "largest |x|"), ("outliers", "largest over median channel")):
        columns += [Column("before" if both else "now", group, hint=hint)]
        columns += [Column("after", group, hint=f"{hint}, after smoothing")] if both else []
    if name is None:
        return columns, []
    before = files.calibration.layers[name]
    after = files.smoothed.layers.get(name) if files.smoothed else None
    found = [before, *([after] if both else [])]
    cells = [number(before.channels, "d")]
    cells += [number(float(layer.activation_absmax.max()) if layer else None) for layer in found]
    cells += [number(layer.outlier_ratio if layer else None, ".1f") for layer in found]
    return columns, cells


def _bits_cells(files: RunFiles, name: str | None) -> tuple[list[Column], list[Cell]]:
    if not files.quantized:
        return [], []
    columns = [Column("bits", number=False)]
    if name is None:
        return columns, []
    bits = files.quantized["bits"].get(name)
    text = str(Bits(**bits)) if bits else "float"
    return columns, [words(text)]


def _ledger_cells(files: RunFiles, name: str | None) -> tuple[list[Column], list[Cell]]:
    if not files.ledger:
        return [], []
    columns = [Column("α", "smoothing"), Column("action", "smoothing", number=False)]
    if name is None:
        return columns, []
    entry = _ledger_entry(files, name) or {}
    return columns, [number(entry.get("alpha"), "g"), words(entry.get("action", ""))]


def _ledger_entry(files: RunFiles, name: str) -> Mapping[str, Any] | None:
    return _entry(files.ledger["layers"] if files.ledger else (), name)


def _drawn(files: RunFiles, networks: Sequence[str]) -> set[str]:
    """The layers whose drawers get pictures: all, or those with the largest errors."""

    def worst(name: str) -> float:
        errors = (_error(files, name, network, "isolated") for network in networks)
        return max((error["l1"] or 0.0 for error in errors if error), default=0.0)

    return set(sorted(files.layers, key=worst, reverse=True)[:MOST_DRAWN])


def _figures(files: RunFiles, name: str) -> list[Figure]:
    figures = []
    if files.calibration and name in files.calibration.layers:
        before = files.calibration.layers[name]
        after = files.smoothed.layers.get(name) if files.smoothed else None
        figures.append(
            Figure(
                "Largest activation of each channel (over the median channel)",
                charts.channel_bars(before, after, "activation_absmax"),
            )
        )
        figures.append(
            Figure(
                "Largest weight of each channel (over the median channel)",
                charts.channel_bars(before, after, "weight_absmax"),
            )
        )
        when, layer = (" after smoothing", after) if after and files.quantizes_smoothed else ("", before)
        drawn = charts.histogram(layer, files.clips.get(name))
        if drawn:
            figures.append(Figure(f"Input values{when}, {drawn[1]}", drawn[0]))
    if files.sweep and files.sweep.points and name in files.sweep.points[0].layer_l1:
        figures.append(Figure("Its error against α; dashed: not smoothed", charts.layer_curve(files.sweep, name)))
    return figures


def _error_rows(files: RunFiles, name: str, networks: Sequence[str]) -> list[ErrorRow]:
    rows = []
    for network in networks:
        for where, title, _ in _WHERE:
            error = _error(files, name, network, where)
            if error:
                forms = (("l1", ".4f"), ("sqnr", ".2f"), ("cosine", ".5f"), ("max", ".3g"))
                texts = ["∞" if error[key] is None else format(error[key], form) for key, form in forms]
                rows.append(ErrorRow(network, title.removeprefix("error "), texts))
    return rows


def _facts(files: RunFiles, name: str) -> list[tuple[str, str]]:
    """What else is known: clips that a search chose, what costs the error, how much the layer matters, outliers."""
    facts = []
    layer = files.smoothed.layers.get(name) if files.smoothed else None
    if layer and layer.activation_clip != 1:
        facts.append(("activations clipped to", f"{layer.activation_clip:.3g} of their range"))
    if layer and layer.weight_clip != 1:
        facts.append(("weights clipped to", f"{layer.weight_clip:.3g} of their range"))
    return facts + (_analysed(files.analysis, name) if files.analysis else [])


def _analysed(analysis: Mapping[str, Any], name: str) -> list[tuple[str, str]]:
    facts = []
    split = _entry(analysis["layers"]["layers"], name)
    if split:
        parts = {part: split["isolated"][part]["l1"] for part in ("weights", "activations")}
        facts += [(f"error by {part} alone", f"{l1:.4f}") for part, l1 in parts.items() if l1 is not None]
    effect = _entry((analysis["sensitivities"] or {}).get("layers", ()), name)
    if effect:
        facts.append(("loss, only it quantized", _change(effect["enable"]["loss"])))
        facts.append(("loss, all but it", _change(effect["disable"]["loss"])))
    outliers = _entry(analysis["outliers"], name)
    if outliers and outliers["listed"]:
        listed = ", ".join(f"{one['channel']} ({one['magnitude']:.3g})" for one in outliers["listed"][:6])
        facts.append(("outlier channels", f"{listed}; {100 * outliers['share']:.0f} % of the range"))
    return facts


def _change(found: Mapping[str, Any]) -> str:
    bounds = ("∞" if bound is None else f"{bound:+.4f}" for bound in found["interval"])
    return f"{found['change']:+.4f} ({' … '.join(bounds)})".replace("-", "−")


def _entry(entries: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    return next((entry for entry in entries if entry["layer"] == name), None)
