"""The commands that make the files of a run folder again, read off the files themselves."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ptq.quantization import Bits
from ptq.refinement import steps_of
from ptq.report.page.files import RunFiles
from ptq.tasks import DEFAULT, folder_name

_TASK_OPTIONS = ("task", "model", "weights", "data", "batch_size", "image_size", "seed")


def commands(files: RunFiles) -> list[str]:
    """In the order of the main road. The first describes the task; the folder remembers it for the others."""
    where = _where(files)
    found = [*_calibrate(files)]
    for step in (_smooth, _export, _quantize, _evaluate, _sweep, _sizes, _baselines, _compare, _analyze):
        found += [[*parts, *where] for parts in step(files)]
    found.append(["ptq", "report", *where])
    return [shlex.join(parts) for parts in found]


def _where(files: RunFiles) -> list[str]:
    """How later commands find the folder: by the task's name if it is where the task's folder would be."""
    named = files.options.get("task") or files.options.get("model") or DEFAULT
    if files.folder.name == folder_name(named) and files.folder.parent.name == "reports":
        return [] if named == DEFAULT else ["--task" if files.options.get("task") else "--model", str(named)]
    return ["--run", files.folder.name if files.folder.is_absolute() else files.folder.as_posix()]


def _calibrate(files: RunFiles) -> Iterator[list[str]]:
    if files.calibration is None and not files.options:
        return
    parts = ["ptq", "calibrate"]
    for name in _TASK_OPTIONS:
        if files.options.get(name) is not None:
            parts += [f"--{name.replace('_', '-')}", str(files.options[name])]
    if (where := _where(files))[:1] == ["--run"]:
        parts += where
    if files.calibration:
        parts += _unless("--observer", files.calibration.observer, "max")
        parts += ["--batches", str(files.calibration.batches)]
    yield parts


def _smooth(files: RunFiles) -> Iterator[list[str]]:
    ledger = files.ledger
    if not ledger or (ledger.get("by") == "quantize" and files.quantizes_smoothed):  # which makes it again
        return
    parts = ["ptq", "smooth", "--alpha", str(ledger["alpha"])]
    parts += _unless("--bits", ledger["bits"], None)
    parts += ["--clip"] if ledger["clip"] else []
    parts += _unless("--form", ledger["form"], "fold") + _unless("--explicit", ledger["explicit"], "allow")
    yield parts


def _quantize(files: RunFiles) -> Iterator[list[str]]:
    if files.quantized is None:
        if files.evaluation:
            parts = ["ptq", "quantize", *_scheme(files.evaluation["scheme"])]
            parts += _unsmoothed(files, files.evaluation) if files.evaluation["alpha"] is None else []
            yield [*parts, *_refinement(files.evaluation)]
        return
    parts = ["ptq", "quantize", *_scheme(files.quantized["scheme"])]
    if files.calibration:
        parts += _unless("--observer", files.quantized["observer"], files.calibration.observer)
        if files.quantized["source"] == files.calibration.model_fingerprint:
            parts += _unsmoothed(files, files.quantized)
    yield [*parts, *_refinement(files.quantized)]


def _unsmoothed(files: RunFiles, made: Mapping[str, Any]) -> list[str]:
    """Needed where there is a smoothed network, or refinement would begin with making one."""
    return ["--no-smooth"] if files.smoothed or "alpha" in steps_of(made.get("refine", "none")) else []


def _refinement(made: Mapping[str, Any]) -> list[str]:
    return _unless("--refine", made.get("refine", "none"), "fast")


def _scheme(scheme: Mapping[str, Any]) -> list[str]:
    width = scheme["bits"]
    parts = ["--bits", str(Bits(width["weights"], width["activations"]))]
    parts += _unless("--weight-format", width["weight_format"], None)
    parts += _unless("--activation-format", width["activation_format"], None)
    parts += _unless("--first-last", scheme["first_last"], None)
    parts += [part for pattern in scheme["include"] if pattern != "*" for part in ("--include", pattern)]
    parts += [part for pattern in scheme["exclude"] for part in ("--exclude", pattern)]
    for pattern, bits in scheme["overrides"]:
        parts += ["--override", f"{pattern}={Bits(**bits)}"]
    parts += ["--symmetric"] if scheme["symmetric_activations"] else []
    parts += ["--symmetric-weights"] if scheme.get("symmetric_weights") else []
    parts += [] if scheme.get("diffuse_image", True) else ["--no-diffuse"]
    return parts + ([] if scheme["fold_batchnorm"] else ["--keep-batchnorm"])


def _evaluate(files: RunFiles) -> Iterator[list[str]]:
    if files.evaluation:
        deployed = any(row["name"].endswith(", as deployed") for row in files.evaluation["networks"])
        yield ["ptq", "evaluate", *(["--placement", "deploy"] if deployed else [])]


def _sweep(files: RunFiles) -> Iterator[list[str]]:
    if not files.sweep or not files.sweep.points:
        return
    sweep = files.sweep
    alphas = sorted({point.alpha for point in sweep.points if isinstance(point.alpha, (int, float))})
    parts = ["ptq", "sweep", "--alphas", _alphas(alphas), "--bits", ",".join(sweep.bits)]
    parts += [] if any(point.alpha == "auto" for point in sweep.points) else ["--no-auto"]
    yield parts + _unless("--form", sweep.form, "fold") + _unless("--images", sweep.images, None)


def _alphas(values: Sequence[float]) -> str:
    """``0.05:0.95:0.05`` where they are evenly spread, and a list where not."""
    if len(values) > 2:
        step = round(values[1] - values[0], 10)
        if all(abs(value - (values[0] + index * step)) < 1e-9 for index, value in enumerate(values)):
            return f"{values[0]:g}:{values[-1]:g}:{step:g}"
    return ",".join(f"{value:g}" for value in values)


def _sizes(files: RunFiles) -> Iterator[list[str]]:
    if files.sizes:
        points = files.sizes["points"]
        batches, bits = (dict.fromkeys(str(point[key]) for point in points) for key in ("batches", "bits"))
        alpha = next((point["alpha"] for point in points if point["alpha"] is not None), 0.5)
        parts = ["ptq", "sweep", "--calibration-batches", ",".join(batches), "--bits", ",".join(bits)]
        yield [*parts, "--alphas", f"{alpha:g}"]


def _export(files: RunFiles) -> Iterator[list[str]]:
    """With the quantization that it was made from, which may be another than the one that is there now."""
    if not files.export:
        return
    export = files.export
    yield ["ptq", "quantize", *_scheme(export["scheme"]), *_refinement(export)]
    parts = ["ptq", "export", *_unless("--for", export["target"], "onnxruntime")]
    if len(export["candidates"]) == 1 and export["target"] == "onnxruntime":
        parts += ["--variant", export["variant"]]  # it was said; of several the best was taken
    yield parts


def _baselines(files: RunFiles) -> Iterator[list[str]]:
    for name, baseline in files.baselines.items():
        settings, recipe = baseline.settings, baseline.recipe
        parts = ["ptq", "train", baseline.training, *(_scheme(settings["scheme"]) if "scheme" in settings else [])]
        for option in ("steps", "freeze_after", "schedule", "activations", "gradients", "ranks", "record_every"):
            parts += _unless(f"--{option.replace('_', '-')}", settings.get(option), None)
        parts += _unless("--gradients", settings.get("form"), None)
        if "updates" in settings:
            levels = [*settings["updates"]["at"], settings["updates"]["every"]]
            parts += _unless("--update-levels", ",".join(map(str, levels)), "100,2000,10000")
        parts += [f"--{flag.replace('_', '-')}" for flag in ("error_feedback", "normalised") if settings.get(flag)]
        parts += [part for cut in settings.get("split", ()) for part in ("--split", cut)]
        if baseline.training == "pipeline":
            parts += ["--stages", str(len(settings["split"]) + 1), "--micro-batches", str(recipe["micro_batches"])]
        parts += ["--epochs", str(recipe["epochs"]), "--learning-rate", f"{recipe['learning_rate']:g}"]
        for option, field in (("--batch", "batch_size"), ("--images", "images"), ("--tokens", "tokens")):
            parts += _unless(option, recipe.get(field), None)
        parts += _unless("--label-smoothing", recipe.get("label_smoothing", 0.0), 0.0)
        yield [*parts, "--name", name]


def _compare(files: RunFiles) -> Iterator[list[str]]:
    if files.compare:
        widths = dict.fromkeys(row["bits"] for row in files.compare["rows"][1:])
        yield ["ptq", "compare", "--bits", ",".join(widths)]
    if files.precisions:
        yield ["ptq", "compare", "--bits", ",".join(row["name"] for row in files.precisions["rows"])]


def _analyze(files: RunFiles) -> Iterator[list[str]]:
    if files.analysis:
        bits = files.analysis["network"]["bits"]
        same = files.quantized is not None and str(Bits(**files.quantized["scheme"]["bits"])) == bits
        yield ["ptq", "analyze", *([] if same else ["--bits", bits]), "--budget", f"{files.analysis['budget']:g}"]


def _unless(option: str, value: object, default: object) -> list[str]:
    return [] if value is None or value == default else [option, str(value)]
