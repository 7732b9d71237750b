"""Sections of the analysis: what to do, which layers and channels matter, and which distance tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ptq.report.page import comparing
from ptq.report.page.blocks import Block, Part, long_table
from ptq.report.page.files import RunFiles
from ptq.report.page.scores import score_text
from ptq.report.page.tables import Cell, Column, Table, interval, number, number_columns, signed, text_columns, words


def findings(files: RunFiles) -> list[Block]:
    """Those that the analysis has something for, in the order of the page."""
    return [block for make in (_remedies, _sensitivity, _outliers, _distances) for block in make(files)]


def _remedies(files: RunFiles) -> Iterator[Block]:
    remedies = (files.analysis or {}).get("remedies")
    if not files.analysis or not remedies:
        return
    before = remedies["quantized"]
    columns = [Column("remedy", number=False), *number_columns("gain", "95 % interval", "score", "loss")]
    columns += [Column("clear", number=False, hint="whether chance is ruled out"), Column("commands", number=False)]
    rows = [
        [
            words(remedy["name"]), signed(remedy["change"]["score"]["change"]),
            interval(remedy["change"]["score"]["interval"], "+.2f"), number(remedy["score"], ".2f"),
            signed(remedy["change"]["loss"]["change"], "+.4f"), words("yes" if remedy["clear"] else "no"),
            Cell("", lines=remedy["commands"]),
        ]
        for remedy in remedies["tried"]
    ]  # fmt: skip
    skipped = [[words(name), words(reason)] for name, reason in remedies["skipped"].items()]
    note = (
        f"Each was tried on this network, best first, on {remedies['samples']:,} samples that chose none of them; at "
        f"{files.analysis['network']['bits']} it has {score_text(before['score'], before['metric'])} there, in float "
        f"{score_text(remedies['reference']['score'], before['metric'])}. Gains are in points, losses cross-entropies."
    )
    part = Part(
        id="remedies-table",
        table=Table("Remedies", columns, rows),
        more=Table("Not tried", text_columns("remedy", "why not"), skipped) if skipped else None,
        more_title=f"{len(skipped)} that were not tried",
    )
    yield Block(id="remedies", title="What to do about it", short="Remedies", note=note, parts=[part])


def _sensitivity(files: RunFiles) -> Iterator[Block]:
    found = (files.analysis or {}).get("sensitivities")
    if not found:
        return
    columns = [Column("layer", number=False)]
    for who in ("only it quantized", "all but it"):
        columns += number_columns(f"{who}: loss", "95 % interval", "points")
    by_loss = sorted(found["layers"], key=lambda layer: layer["disable"]["loss"]["change"])
    rows = []
    for layer in by_loss:
        cells = [words(layer["layer"])]
        for effect in (layer["enable"], layer["disable"]):
            cells += [signed(effect["loss"]["change"], "+.4f"), interval(effect["loss"]["interval"], "+.4f")]
            cells += [signed(effect["score"]["change"])]
        rows.append(cells)
    note = (
        f"How the loss and the score change from float when only this layer is quantized, and from the quantized "
        f"network when all but this layer is; {found['samples']:,} samples, what is regained most first."
    )
    part = long_table("sensitivity-table", Table("Sensitivity", columns, rows), "layers")
    yield Block(id="sensitivity", title="Which layers matter", short="Sensitivity", note=note, parts=[part])


def _outliers(files: RunFiles) -> Iterator[Block]:
    found = (files.analysis or {}).get("outliers")
    if not found:
        return
    columns = [
        Column("layer", number=False),
        *number_columns("channels", "outliers", "share of the range", "bits lost"),
    ]
    columns += [Column("largest channels (times the median)", number=False)]
    rows = [
        [
            words(layer["layer"]), number(layer["channels"], "d"), number(layer["count"], "d"),
            number(100 * layer["share"], ".0f"), number(layer["bits"], ".2f"),
            words(", ".join(f"{one['channel']} ({_times(one['times_median'])})" for one in layer["listed"][:6])),
        ]
        for layer in found
    ]  # fmt: skip
    part = long_table("outliers-table", Table("Outlier channels", columns, rows), "layers")
    note = "Input channels that are much larger than the median, and what part of the range only they need, in percent."
    yield Block(id="outliers", title="Outlier channels", short="Outliers", note=note, parts=[part])


def _times(ratio: float | None) -> str:
    return "∞" if ratio is None else f"{ratio:.1f}×"


def _distances(files: RunFiles) -> Iterator[Block]:
    parts = []
    for study in (files.analysis or {}).get("distances") or ():
        if not study["correlations"]:
            continue
        columns = [Column("distance", number=False), *number_columns("rank correlation", "95 % interval")]
        columns += [Column("at equal bits", hint="the mean over bit widths among networks of that width alone")]
        columns += [Column("with the loss", hint="rank correlation with the increase of the loss")]
        rows = [
            [
                words(found["distance"]), signed(found["spearman"]), interval(found["interval"], "+.2f"),
                signed(found["within"]), signed(found["with_loss"]),
            ]
            for found in study["correlations"]
        ]  # fmt: skip
        best = study["correlations"][0]["distance"]
        heading = f"The {len(study['points'])} networks of the {study['source']}, {study['samples']:,} samples"
        part = long_table(f"distances-{study['source']}", Table("Distances", columns, rows), "distances")
        parts.append(
            replace(part, heading=heading, chart=comparing.distance_scatter(study["points"], best, study["metric"]))
        )
    if parts:
        note = (
            "Without labels, which number should be watched? Spearman’s rank correlation of each tensor distance with "
            "the loss of accuracy: 1 ranks the networks as accuracy does, 0 says nothing."
        )
        yield Block(id="distances", title="Which distance predicts accuracy", short="Distances", note=note, parts=parts)
