"""Tables for the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from ptq.calibration import Calibration
from ptq.evaluation import Row
from ptq.evaluation.metrics import METRICS
from ptq.quantization import Quantized
from ptq.smoothing import Smoothed
from ptq.sweeping import AUTO, Accuracy, Sweep

_OUTLIER = 5.0  # a channel this many times the median costs the others more than two bits


def plain_table(title: str, *columns: str, caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def pairs_table(pairs: Sequence[tuple[str, str]]) -> Table:
    """Names and texts, side by side."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, text in pairs:
        table.add_row(name, text)
    return table


def facts_table(facts: Mapping[str, Any]) -> Table:
    """Nested facts, one a line."""
    pairs: list[tuple[str, str]] = []

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, part in value.items():
                add(f"{name} {key}".strip(), part)
        elif isinstance(value, (list, tuple)):
            pairs.append((name, ", ".join(map(str, value)) or "none"))
        else:
            pairs.append((name, "not there" if value is None else str(value)))

    add("", {key: value for key, value in facts.items() if key not in ("kind", "schema")})
    return pairs_table(pairs)


def calibration_table(calibration: Calibration) -> Table:
    table = plain_table(
        f"{len(calibration.layers)} layers, {calibration.samples} samples in {calibration.batches} batches",
        "layer", "kind", "channels", "act median", "act max", "max/median", "weight max",
        caption=f"a max/median above {_OUTLIER:g} (marked *) is an outlier channel: it costs all others their bits",
    )  # fmt: skip
    for name, layer in calibration.layers.items():
        ratio = layer.outlier_ratio
        table.add_row(
            name,
            layer.kind,
            str(layer.channels),
            f"{float(layer.activation_absmax.median()):.3g}",
            f"{float(layer.activation_absmax.max()):.3g}",
            f"{'* ' if ratio > _OUTLIER else ''}{ratio:.1f}",
            f"{float(layer.weight_absmax.max()):.3g}",
        )
    for name in calibration.never_ran:
        table.add_row(name, "never ran", "", "", "", "", "")
    return table


def ledger_table(smoothed: Smoothed) -> Table:
    actions = [entry.action for entry in smoothed.ledger]
    counts = ", ".join(f"{actions.count(action)} {action}" for action in dict.fromkeys(actions))
    proof = smoothed.proof
    caption = None
    if proof:
        caption = (
            f"equivalent on {proof.samples} samples: the output differs by {proof.output:.1e}, the worst layer "
            f"({proof.worst_layer}) by {proof.worst_layer_difference:.1e} of its largest value"
        )
    title = f"{smoothed.title}: {counts}"
    table = plain_table(title, "layer", "kind", "α", "absmax", "smoothed", "action", caption=caption)
    table.columns[-1].justify = "left"
    for entry in smoothed.ledger:
        alpha, before, after = (
            "" if x is None else f"{x:.3g}" for x in (entry.alpha, entry.absmax_before, entry.absmax_after)
        )
        shared = f", shared with {len(entry.shared_with)} more" if entry.shared_with else ""
        cells = entry.layer, entry.kind, alpha, before, after
        for column, cell in zip(table.columns, cells, strict=False):
            column.min_width = max(column.min_width or len(str(column.header)), len(cell))  # the last one gives way
        table.add_row(*cells, f"{entry.action}{':' if entry.action != 'folded' else ''} {entry.reason}{shared}")
    return table


def quantized_table(quantized: Quantized, kinds: Calibration) -> Table:
    table = plain_table(
        f"{quantized.scheme.bits}: {len(quantized.bits)} layers, {len(quantized.batchnorms)} BatchNorms folded, "
        f"ranges by {quantized.observer}",
        "layer", "kind", "weights", "activations",
    )  # fmt: skip
    for name, layer in kinds.layers.items():
        bits = quantized.bits.get(name)
        weights = (bits.weight_format or bits.weights) if bits else None
        activations = (bits.activation_format or bits.activations) if bits else None
        table.add_row(name, layer.kind, str(weights or "float"), str(activations or "float"))
    return table


def accuracy_table(rows: Sequence[Row]) -> Table:
    """The metric that the task is judged by with its interval, a second one, and what changed from float."""
    reference = rows[0].evaluation
    metric = reference.metric
    second = "top5" if metric == "top1" else "top1"
    table = plain_table(
        f"{reference.n} samples; intervals are 95 %",
        "network", METRICS[metric].title, "interval", METRICS[second].title, "changed", "right → wrong",
        "wrong → right",
    )  # fmt: skip
    for row in rows:
        result = row.evaluation
        paired = result.against(reference)
        cells = [str(paired.changed), str(paired.lost), str(paired.gained)] if row.errors is not None else [""] * 3
        low, high = result.score_interval(metric)
        scores = f"{result.score(metric):.2f}", f"{low:.2f} … {high:.2f}", f"{result.score(second):.2f}"
        table.add_row(row.name, *scores, *cells)
    return table


def layer_error_table(rows: Sequence[Row], calibration: Calibration, smoothed: Calibration | None) -> Table:
    quantized = [row for row in rows if row.errors is not None]
    columns = [f"{part} {row.name}" for row in quantized for part in ("alone", "in all")]
    table = plain_table(
        "relative L1 error of each layer, by itself and in the quantized network",
        "layer", "absmax", *(["smoothed"] if smoothed else []), *columns,
    )  # fmt: skip
    for name, layer in calibration.layers.items():
        cells = [f"{float(layer.activation_absmax.max()):.3g}"]
        if smoothed:
            cells.append(f"{float(smoothed.layers[name].activation_absmax.max()):.3g}")
        for row in quantized:
            error = (row.errors or {}).get(name)
            parts = (error.isolated, error.accumulated) if error else (None, None)
            cells += ["" if part is None else f"{part.l1:.4f}" for part in parts]
        table.add_row(name, *cells)
    return table


def sweep_table(sweep: Sweep) -> Table:
    assert sweep.reference is not None
    table = plain_table(
        f"float {_with_interval(sweep.reference)} on {sweep.reference.n} images",
        "bits", "not smoothed", "best α", "smoothed", "gain", "α by layer", "and clipped",
    )  # fmt: skip
    for bits in sweep.bits:
        plain, best = sweep.find(bits, None), sweep.best(bits)
        gain = f"{best.accuracy.score - plain.accuracy.score:+.2f}" if plain else ""
        none = _with_interval(plain.accuracy) if plain else ""
        by_layer = (sweep.find(bits, alpha) for alpha in AUTO)
        scores = (f"{point.accuracy.score:.2f}" if point else "" for point in by_layer)
        table.add_row(bits, none, f"{best.alpha:g}", _with_interval(best.accuracy), gain, *scores)
    return table


def _with_interval(accuracy: Accuracy) -> str:
    low, high = accuracy.interval
    return f"{accuracy.score:.2f} ({low:.2f} … {high:.2f})"
