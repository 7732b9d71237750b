"""What came out, in two sentences: the first says what was measured, the second what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from ptq.quantization import Bits
from ptq.report.page.charts import alpha_name, interval_text
from ptq.report.page.files import RunFiles
from ptq.report.page.markup import code
from ptq.report.page.scores import Score, metric_title, networks, score_text
from ptq.sweeping import Sweep, SweepPoint

_AS_GOOD = 1.0  # points below float that most people accept
_RUNTIME_BITS = 8  # of activations, in ONNX runtimes


def verdict(files: RunFiles) -> tuple[Markup, Markup]:
    """Two sentences made from the numbers of the folder."""
    if files.evaluation:
        rows = [row for row in networks(files.evaluation) if not row.name.endswith(", as deployed")]
        if len(rows) > 1:
            return _of_evaluation(files, rows)
    if files.sweep and files.sweep.reference and files.sweep.points:
        return _of_sweep(files.sweep)
    return _of_nothing(files)


def _of_evaluation(files: RunFiles, rows: list[Score]) -> tuple[Markup, Markup]:
    reference, plain, final = rows[0], rows[1], rows[-1]
    assert files.evaluation is not None
    bits = str(Bits(**files.evaluation["scheme"]["bits"]))
    sentence = Markup(
        "At <b>{}</b> this network reaches <b>{}</b> {} ({}), {} float’s {} ({}) on the same {:,} samples"
    )
    found = sentence.format(
        bits,
        final.text,
        metric_title(final.metric),
        final.interval_text,
        _distance(final.score - reference.score, final),
        reference.text,
        reference.interval_text,
        final.n,
    )
    if final is not plain:
        step = " and ".join(
            step for step, mark in (("smoothing", "smoothed"), ("refinement", "refined")) if mark in final.name
        )
        doubt = "" if _apart(plain, final) else f", which {final.n:,} samples can’t tell from chance"
        found += Markup("; without {step} it is {}, so {step} gave <b>{}</b> points{}").format(
            plain.text, signed(final.score - plain.score), doubt, step=step
        )
    return found + ".", _advice(files, bits, reference, plain, final)


def signed(points: float) -> str:
    """With its sign, a true minus."""
    return f"{points:+.2f}".replace("-", "−")


def _distance(gap: float, final: Score) -> str:
    if not final.differs:
        return f"{signed(gap)} points and no measurable difference from"
    return f"{abs(gap):.2f} points {'below' if gap < 0 else 'above'}"


def _apart(one: Score, other: Score) -> bool:
    return one.interval[1] < other.interval[0] or other.interval[1] < one.interval[0]


def _advice(files: RunFiles, bits: str, reference: Score, plain: Score, final: Score) -> Markup:
    """Ship what is as good as float; else the remedy that was measured to help most, or what the sweep knows."""
    if not final.differs or final.score >= reference.score - _AS_GOOD:
        return _ship(files, bits)
    remedy = _remedy(files.analysis, bits)
    if remedy is not None:
        name, gain, commands = remedy
        return Markup("What helped most here, measured, is “{}” ({} points): {}.").format(name, gain, code(commands))
    if final is not plain and plain.score > final.score:
        return Markup("Leave smoothing out here: {}.").format(code(f"ptq quantize --bits {bits} --no-smooth"))
    better = _better_point(files.sweep, bits, final)
    if better is not None:
        sentence = Markup("The sweep has a better way at these bits, {} with {}: {}.")
        return sentence.format(alpha_name(better.alpha), _score(better), code(_command(better)))
    wider = _cheapest_as_good(files.sweep)
    if wider is not None and wider.bits != bits:
        sentence = Markup("The fewest bits of the sweep within a point of float are <b>{}</b>, {} with {}: {}.")
        return sentence.format(wider.bits, alpha_name(wider.alpha), _score(wider), code(_command(wider)))
    sentence = Markup("Let rounding make up for its own errors, {}, or give the worst layers more bits.")
    return sentence.format(code(f"ptq quantize --bits {bits} --refine best"))


def _ship(files: RunFiles, bits: str) -> Markup:
    export = files.export
    if export is not None and str(Bits(**export["scheme"]["bits"])) == bits:
        sentence = Markup("Ship it: <code>export/{}</code> answers as its simulation on {:.2f} % of the samples{}.")
        return sentence.format(export["file"], export["agreement"]["same_top1"], _speed(export["milliseconds"]))
    width = Bits(**files.evaluation["scheme"]["bits"]) if files.evaluation else Bits.parse(bits)
    if width.activations == _RUNTIME_BITS:
        return Markup("Ship it: <code>ptq export</code> writes the ONNX file and measures that.")
    sentence = Markup(
        "These bits are enough; runtimes compute activations in 8, so for a file that runs take {} and "
        "<code>ptq export</code>."
    )
    return sentence.format(code(f"ptq quantize --bits {Bits(width.weights, _RUNTIME_BITS)}"))


def _score(point: SweepPoint) -> str:
    return score_text(point.accuracy.score, point.accuracy.metric)


def _speed(milliseconds: Mapping[str, Mapping[str, float]]) -> str:
    """What the first batch size that was timed takes, against float."""
    for size, times in milliseconds.items():
        share = times["int8 ONNX"] / times["float ONNX"]
        return f" {'and' if share < 1 else 'but'} takes {share:.2f} of float ONNX’s time at batch {size}"
    return ""


def _better_point(sweep: Sweep | None, bits: str, final: Score) -> SweepPoint | None:
    """The sweep's best at these bits, where it is better by more than its interval."""
    if sweep is None:
        return None
    points = [point for point in sweep.points if point.bits == bits and point.accuracy.n == final.n]
    best = max(points, key=lambda point: point.accuracy.score, default=None)
    return best if best is not None and best.accuracy.interval[0] > final.score else None


def _cheapest_as_good(sweep: Sweep | None) -> SweepPoint | None:
    """The best point of the fewest bits that come within a point of float."""
    if sweep is None or sweep.reference is None:
        return None
    enough = [point for point in sweep.points if point.accuracy.score >= sweep.reference.score - _AS_GOOD]
    if not enough:
        return None
    fewest = min(enough, key=lambda point: _total_bits(point.bits)).bits
    return max((point for point in enough if point.bits == fewest), key=lambda point: point.accuracy.score)


def _total_bits(bits: str) -> int:
    width = Bits.parse(bits)
    return (width.weights or 32) + (width.activations or 32)


def _command(point: SweepPoint) -> str:
    """What makes this point of the sweep again."""
    quantize = f"ptq quantize --bits {point.bits}"
    if point.alpha is None:
        return f"{quantize} --no-smooth"
    if isinstance(point.alpha, str):
        clip = " --clip" if point.alpha == "auto+clip" else ""
        return f"ptq smooth --alpha auto --bits {point.bits}{clip} && {quantize}"
    return f"ptq smooth --alpha {point.alpha:g} && {quantize}"


def _remedy(analysis: Mapping[str, Any] | None, bits: str) -> tuple[str, str, str] | None:
    """The best remedy that was tried at these bits, if it clearly helps: its name, gain and commands."""
    remedies = (analysis or {}).get("remedies")
    if not analysis or not remedies or analysis["network"]["bits"] != bits:
        return None
    for remedy in remedies["tried"]:  # best first
        gain = remedy["change"]["score"]["change"]
        if remedy["clear"] and gain > 0:
            return remedy["name"], signed(gain), " && ".join(remedy["commands"])
    return None


def _of_sweep(sweep: Sweep) -> tuple[Markup, Markup]:
    assert sweep.reference is not None
    bits = min(sweep.bits, key=_total_bits)
    best = max((point for point in sweep.points if point.bits == bits), key=lambda point: point.accuracy.score)
    metric, reference = best.accuracy.metric, sweep.reference
    sentence = Markup("At <b>{}</b> the best of the sweep, {}, reaches <b>{}</b> {} ({}); float has {} ({}).")
    found = sentence.format(
        bits,
        alpha_name(best.alpha),
        _score(best),
        metric_title(metric),
        interval_text(*best.accuracy.interval),
        score_text(reference.score, metric),
        interval_text(*reference.interval),
    )
    enough = _cheapest_as_good(sweep)
    if enough is None:
        return found, Markup(
            "Nothing in the sweep comes within a point of float: try more bits or <code>--refine best</code>."
        )
    advice = Markup("The fewest bits within a point of float are <b>{}</b>, {} with {}: {}.").format(
        enough.bits, alpha_name(enough.alpha), _score(enough), code(_command(enough))
    )
    return found, advice


def _of_nothing(files: RunFiles) -> tuple[Markup, Markup]:
    found = Markup("Nothing was measured here yet")
    if files.calibration:
        found = Markup("{} layers were calibrated on {:,} samples, and nothing was measured yet").format(
            len(files.calibration.layers), files.calibration.samples
        )
    return found + ".", Markup("Run <code>ptq quantize</code> and <code>ptq evaluate</code>, then report again.")
