"""Sections with what was measured beside the main road: other ways to the same bits, precisions, export."""

from __future__ import annotations

from collections.abc import Iterator

from ptq.quantization import Bits
from ptq.report.page import comparing
from ptq.report.page.blocks import Block, Part, long_table
from ptq.report.page.files import RunFiles
from ptq.report.page.scores import score_text
from ptq.report.page.tables import Cell, Column, Table, interval, number, number_columns, signed, text_columns, words


def results(files: RunFiles) -> list[Block]:
    """Those that the folder has something for, in the order of the page."""
    return [block for make in (_mixed, _compare, _precisions, _baselines, _sizes) for block in make(files)]


def _mixed(files: RunFiles) -> Iterator[Block]:
    if not files.mixed:
        return
    mixed, layers = files.mixed, files.mixed["layers"]
    widths = sorted({width for layer in layers.values() for width in layer["errors"]}, key=int)
    columns = [Column("layer", number=False), *number_columns("weights", "bits", *(f"error at {w}" for w in widths))]
    rows = [
        [
            words(name), number(layer["elements"], ",d"), number(layer["bits"], "d"),
            *(number(layer["errors"].get(width), ".2g") for width in widths),
        ]
        for name, layer in layers.items()
    ]  # fmt: skip
    changed = "" if mixed["changed"] is None else f" and {mixed['changed']:.2f} % of the answers changed"
    note = (
        f"{mixed['average']:.2f} bits a weight on average{changed}. An error is the relative squared error of the "
        "network’s output with this layer’s weights alone at so many bits."
    )
    yield Block(
        id="mixed",
        title="Bits by layer",
        note=note,
        parts=[long_table("mixed-table", Table("Bits of each layer", columns, rows), "layers")],
    )


def _compare(files: RunFiles) -> Iterator[Block]:
    if not files.compare:
        return
    compared = files.compare["rows"]
    scale = comparing.whisker_scale([(row["score"], tuple(row["interval"])) for row in compared])
    columns = [*text_columns("network", "bits"), *number_columns("score", "95 % interval"), Column("", number=False)]
    columns += number_columns("in float", "L1 alone", "L1 in all", "bytes", "trained, s", "on images")
    rows = [
        [
            words(row["name"]), words(row["bits"]), number(row["score"], ".2f"), interval(row["interval"]),
            Cell("", picture=comparing.whisker(row["score"], tuple(row["interval"]), scale, compared[0]["score"])),
            number(row["float_score"], ".2f"), number(row["l1"], ".4f"), number(row["accumulated_l1"], ".4f"),
            number(row["weight_bytes"], ",d"), number(row["seconds"], ".0f"), number(row["images"], ",d"),
        ]
        for row in compared
    ]  # fmt: skip
    parts = [Part(id="compare-table", table=Table("Networks side by side", columns, rows))]
    correlated = [
        [
            words(training),
            words(measure),
            signed(found["value"]),
            interval(found["interval"], "+.2f"),
            number(found["runs"], "d"),
        ]
        for training, by_measure in files.compare["correlations"].items()
        for measure, found in by_measure.items()
    ]
    if correlated:
        columns = [
            *text_columns("trained by", "distance"),
            *number_columns("rank correlation", "95 % interval", "runs"),
        ]
        note = "Spearman’s rank correlation, over runs, of what compression did to tensors with the final score."
        table = Table("Rank correlations", columns, correlated)
        parts.append(Part(heading="What compression did, and the score", note=note, table=table))
    note = (
        f"{compared[0]['n']:,} samples, the same for every network; the line is float. “In float” is the same network "
        "before it was quantized; L1 is the mean over layers of their relative error."
    )
    yield Block(id="compare", title="Other ways to the same bits", short="Compare", note=note, parts=parts)


def _precisions(files: RunFiles) -> Iterator[Block]:
    if not files.precisions:
        return
    found = files.precisions
    columns = [Column("precision", number=False)]
    for _, title in comparing.WAYS:
        columns += number_columns(title, "95 % interval")
    columns += number_columns("bytes")
    rows = []
    for row in found["rows"]:
        cells = [words(precision_name(row["name"]))]
        for way, _ in comparing.WAYS:
            score = row[way]
            cells += [number(score["score"], ".2f"), interval(score["interval"])] if score else [Cell(""), Cell("")]
        rows.append([*cells, number(row["weight_bytes"], ",d")])
    note = (
        f"{found['n']:,} samples; the marks are 95 % intervals. Running on codes that were never brought back to their "
        "scale is a known mistake: who made it recognises the numbers."
    )
    parts = [
        Part(
            id="precisions-table",
            chart=comparing.precision_bars(
                [(precision_name(row["name"]), row) for row in found["rows"]], found["metric"]
            ),
            table=Table("Precisions", columns, rows),
        )
    ]
    yield Block(id="precisions", title="One network at every precision", short="Precisions", note=note, parts=parts)


def precision_name(name: str) -> str:
    return f"{name} bits" if name.isdigit() else name


def _baselines(files: RunFiles) -> Iterator[Block]:
    if not files.baselines:
        return
    columns = [*text_columns("baseline", "training", "bits or formats"), *number_columns("score", "95 % interval")]
    columns += number_columns("samples", "trained, s", "MB a step")
    rows = []
    for name, baseline in files.baselines.items():
        settings, payload = baseline.settings, baseline.payload_bytes_per_step
        formats = [str(settings[key]) for key in ("activations", "gradients", "form") if settings.get(key)]
        bits = str(Bits(**settings["scheme"]["bits"])) if "scheme" in settings else ", ".join(formats) or "float"
        rows.append([
            words(name), words(baseline.training), words(bits), number(baseline.score, ".2f"),
            interval(baseline.interval), number(baseline.n, "d"), number(baseline.seconds, ".0f"),
            number(payload / 1e6 if payload else None, ".3f"),
        ])  # fmt: skip
    yield Block(
        id="baselines",
        title="Baselines",
        note="Networks trained for few bits or through compressed links, to compare with; the last column is what "
        "crossed between processes.",
        parts=[Part(id="baselines-table", table=Table("Baselines", columns, rows))],
    )


def _sizes(files: RunFiles) -> Iterator[Block]:
    if not files.sizes:
        return
    columns = [
        *number_columns("batches", "samples"),
        *text_columns("bits", "α"),
        *number_columns("score", "95 % interval"),
    ]
    rows = [
        [
            number(point["batches"], "d"), number(point["samples"], "d"), words(point["bits"]),
            words("none" if point["alpha"] is None else f"{point['alpha']:g}"),
            number(point["accuracy"]["score"], ".2f"), interval(point["accuracy"]["interval"]),
        ]
        for point in files.sizes["points"]
    ]  # fmt: skip
    table = Table("Amount of calibration data", columns, rows)
    yield Block(
        id="sizes",
        title="How much calibration data is enough",
        short="Calibration data",
        parts=[Part(id="sizes-table", table=table)],
    )


def export_section(files: RunFiles) -> Iterator[Block]:
    if not files.export:
        return
    export = files.export
    agreement, bits = export["agreement"], str(Bits(**export["scheme"]["bits"]))
    share, apart = export["bytes"] / export["float_bytes"], agreement["largest_difference"]
    pairs = [
        ("file", f"export/{export['file']}, {export['bytes']:,} bytes, {share:.2f} of the float file"),
        ("integers", f"{bits}, {export['variant']}, opset {export['opset']}, for {export['target']}"),
        ("equal answers", f"{agreement['same_top1']:.2f} % of file and simulation, {agreement['samples']:,} samples"),
        ("logits", f"differ by {apart:.3g} at most, of {agreement['largest_logit']:.3g} in size"),
    ]
    if agreement["top1"] is not None:
        simulated = score_text(agreement["reference_top1"], "top1")
        pairs.insert(2, ("top-1 of the file", f"{score_text(agreement['top1'], 'top1')}, simulation {simulated}"))
    parts = [Part(pairs=pairs)]
    if export["milliseconds"]:
        names = list(dict.fromkeys(name for times in export["milliseconds"].values() for name in times))
        columns = [Column("batch", number=False), *number_columns(*(f"{name}, ms" for name in names), "int8 / float")]
        rows = [
            [words(size), *(number(times.get(name), ".3f") for name in names),
             number(times["int8 ONNX"] / times["float ONNX"], ".2f")]
            for size, times in export["milliseconds"].items()
        ]  # fmt: skip
        parts.append(Part(id="latency-table", heading="Latency", table=Table("Latency", columns, rows)))
    if export["findings"]:
        parts.append(Part(heading="Findings", lines=export["findings"]))
    note = "The file itself was run: parity is with its simulation in PyTorch, latencies are of whole batches."
    yield Block(id="export", title="Export", note=note, parts=parts)
