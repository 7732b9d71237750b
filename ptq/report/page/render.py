"""A run folder as one page: what is there is shown, and nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup

from ptq.report.page import charts, comparing
from ptq.report.page.files import REPORT, RunFiles
from ptq.report.page.findings import findings
from ptq.report.page.layers import anchors, layer_table
from ptq.report.page.markup import breakable, code
from ptq.report.page.pictures import embedded, shown
from ptq.report.page.provenance import environment, fingerprints, seeds
from ptq.report.page.results import export_section, results
from ptq.report.page.retracing import commands
from ptq.report.page.scores import metric_title, networks
from ptq.report.page.tables import Table, interval, number, number_columns, signed, text_columns, words
from ptq.report.page.verdict import verdict
from ptq.storage import replacing
from ptq.sweeping import AUTO, Alpha, Sweep

MOST_BYTES = 3_000_000


def write_page(folder: Path) -> Path:
    """Write ``report.html`` into the run folder, from whatever files are there; returns its path."""
    page = render(RunFiles.read(folder))
    path = folder / REPORT
    with replacing(path) as partial:
        partial.write_text(page, encoding="utf-8")
    return path


def render(files: RunFiles) -> str:
    """The whole page. Pictures get the room that the rest leaves of ``MOST_BYTES``."""
    context = _context(files)
    without = _template().render(**context, pictures=[])
    pictures = embedded(files.pictures, MOST_BYTES - len(without.encode()) - 10_000)
    if not pictures:
        return without
    return _template().render(**context, pictures=pictures)


@dataclass(frozen=True)
class Section:
    id: str
    title: str


def _context(files: RunFiles) -> dict[str, Any]:
    style, script = _resource("style.css"), _resource("script.js")
    layers, more = layer_table(files), [*results(files), *findings(files), *export_section(files)]
    accuracy = _accuracy(files)
    sweep = _sweep(files) if files.sweep and files.sweep.points else None
    present = [
        ("accuracy", "Accuracy", accuracy),
        ("alpha", "α", sweep),
        ("heat-map", "α by layer", sweep),
        ("layers", "Layers", layers.rows),
        ("pictures", "Pictures", shown(files.pictures)),
        *((block.id, block.short or block.title, block) for block in more),
        ("reproduce", "Make it again", True),
    ]
    return {
        "task": files.task,
        "style": Markup(style),
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "sections": [Section(id, title) for id, title, content in present if content],
        "verdict": verdict(files),
        "accuracy": accuracy,
        "sweep": sweep,
        "layers": layers,
        "blocks": more,
        "commands": commands(files),
        "log": files.log,
        "environment": environment(files),
        "seeds": seeds(files),
        "fingerprints": fingerprints(files),
        "hashes": files.hashes(),
    }


def _accuracy(files: RunFiles) -> dict[str, Any] | None:
    if not files.evaluation:
        return None
    rows = networks(files.evaluation)
    scale = comparing.whisker_scale([(row.score, row.interval) for row in rows])
    reference = rows[0]
    return {
        "metric": metric_title(reference.metric),
        "second": "top-5" if reference.metric == "top1" else "top-1",
        "note": f"{reference.n:,} samples, the same for every network; intervals are 95 %, and the line is float.",
        "rows": [(row, comparing.whisker(row.score, row.interval, scale, reference.score)) for row in rows],
    }


def _sweep(files: RunFiles) -> dict[str, Any]:
    assert files.sweep is not None
    sweep = files.sweep
    lines: tuple[tuple[str, Alpha], ...] = (("dashed", None), ("dotted", "auto"), ("dash-dotted", "auto+clip"))
    drawn = [
        f"{style}: {charts.alpha_name(alpha)}" for style, alpha in lines if any(p.alpha == alpha for p in sweep.points)
    ]
    return {
        "legend": f"Level lines are {', '.join(drawn)}." if drawn else "",
        "chart": charts.alpha_curve(sweep),
        "summary": _sweep_summary(sweep),
        "points": _sweep_points(sweep),
        "heat_map": charts.layer_heat_map(sweep, anchors(files)),
    }


def _sweep_summary(sweep: Sweep) -> Table:
    """A row for each number of bits: without smoothing, with the best α, and with α by layer."""
    columns = [*text_columns("bits"), *number_columns("not smoothed", "best α", "smoothed", "95 % interval", "gain")]
    columns += number_columns("α by layer", "and clipped")
    rows = []
    for bits in sweep.bits:
        plain = sweep.find(bits, None)
        best = sweep.best(bits) if sweep.curve(bits) else None
        gain = best.accuracy.score - plain.accuracy.score if best and plain else None
        by_layer = (sweep.find(bits, alpha) for alpha in AUTO)
        rows.append([
            words(bits),
            number(plain.accuracy.score if plain else None, ".2f"),
            number(float(best.alpha or 0) if best else None, "g"),
            number(best.accuracy.score if best else None, ".2f"),
            interval(best.accuracy.interval) if best else words(""),
            signed(gain),
            *(number(point.accuracy.score if point else None, ".2f") for point in by_layer),
        ])  # fmt: skip
    return Table("Smoothing at each number of bits", columns, rows)


def _sweep_points(sweep: Sweep) -> Table:
    columns = [*text_columns("bits", "α"), *number_columns("score", "95 % interval", "answers changed")]
    rows = [
        [
            words(point.bits),
            words(charts.alpha_name(point.alpha)),
            number(point.accuracy.score, ".2f"),
            interval(point.accuracy.interval),
            number(point.changed, "d"),
        ]
        for point in sorted(sweep.points, key=lambda point: sweep.bits.index(point.bits))
    ]
    return Table("All points of the sweep", columns, rows)


def _resource(name: str) -> str:
    return (resources(__package__) / name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    environment = Environment(loader=FunctionLoader(_resource), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"breakable": breakable, "code": code}
    return environment.get_template("template.html")
