"""``ptq analyze``: explain the quantized network of a run folder."""

import shlex
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from ptq.cli import Screen, command
from ptq.errors import InputError

if TYPE_CHECKING:
    from ptq.quantization import Quantized
    from ptq.run import Run
    from ptq.smoothing import Smoothed
    from ptq.sweeping import Sweep


@command
def analyze(
    run: "Run",
    screen: Screen,
    bits: Annotated[str | None, typer.Option(help="Quantize to these for the analysis, not as the folder is.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds for each of the four measurements.")] = 60.0,
    samples: Annotated[int, typer.Option(help="At most so many for the layers' sensitivity.")] = 512,
    error_batches: Annotated[int, typer.Option(help="Batches for the per-layer errors.")] = 8,
    remedies: Annotated[bool, typer.Option(help="Try what could help, and measure it.")] = True,
    distances: Annotated[bool, typer.Option(help="Find the distance that predicts the loss of accuracy.")] = True,
    watch: Annotated[str | None, typer.Option(metavar="LAYER", help="Only look at this layer during a batch.")] = None,
    batch: Annotated[int, typer.Option(help="Which batch to watch, from 0.")] = 0,
) -> None:
    """Explain the quantized network: which layer, which channel, weights or activations, and what helps."""
    if not budget > 0 or samples < 1:
        raise InputError(f"--budget {budget:g}, --samples {samples}: both have to be above zero")
    quantized, smoothed = _network(run, bits)
    if watch:
        _watch(run, screen, quantized, watch, batch)
        return
    from ptq.analysis import analyze
    from ptq.folder import TaskOptions
    from ptq.report import analysis_plots, plots
    from ptq.storage import write_json

    task = run.task
    analysis = analyze(
        task.model,
        quantized,
        run.calibration(),
        task.calibration,
        task.evaluation,
        smoothed=smoothed,
        sweep=_sweep(run) if distances else None,
        max_batches=error_batches,
        samples=samples,
        budget=budget,
        remedies=remedies,
        distances=distances,
        metric=task.metric,
        where="" if run.folder == TaskOptions().folder else f"--run {shlex.quote(str(run.folder))}",
        progress=screen.progress,
    )
    result = {**analysis.to_json(), "task": task.name}
    numbers, title = run.folder / "analysis.json", f"{task.name}, {analysis.title}"
    write_json(numbers, result)
    pictures = {run.folder / "analysis_layers.png": analysis_plots.layer_errors_figure(analysis, title)}
    if analysis.remedies and analysis.remedies.tried:
        pictures[run.folder / "analysis_remedies.png"] = analysis_plots.remedies_figure(
            analysis.remedies, f"{title}: what helps"
        )
    if any(study.correlations for study in analysis.distances):
        pictures[run.folder / "distances.png"] = analysis_plots.distances_figure(
            [study for study in analysis.distances if study.correlations], f"{task.name}: distances and accuracy"
        )
    for path, figure in pictures.items():
        plots.save(figure, path)
    screen.show(analysis_plots.analysis_tables(analysis), [numbers, *pictures], result)


def _network(run: "Run", bits: str | None) -> "tuple[Quantized, Smoothed | None]":
    """The quantized network of the folder, or one with other bits made as the folder would make it."""
    from ptq.quantization import Bits, Scheme
    from ptq.quantization.apply import quantize_by

    if bits is None:
        return run.quantized()
    scheme, smoothed = Scheme(bits=Bits.parse(bits)), run.smoothed()
    if smoothed is not None:
        return quantize_by(scheme, smoothed.model, smoothed.calibration), smoothed
    return quantize_by(scheme, run.task.model, run.calibration()), None


def _sweep(run: "Run") -> "Sweep | None":
    """The folder's sweep, if there is one of this very network."""
    from ptq.storage import read_json
    from ptq.sweeping import Sweep

    if not run.sweep_file.exists():
        return None
    sweep = Sweep.from_json(read_json(run.sweep_file))
    if sweep.model_fingerprint == run.calibration().model_fingerprint:
        return sweep
    run.say(f"{run.sweep_file}: was made with other weights, and is left out")
    return None


def _watch(run: "Run", screen: Screen, quantized: "Quantized", layer: str, index: int) -> None:
    from ptq.analysis.watching import watch
    from ptq.report.analysis_plots import watched_table

    chosen = next(islice(run.task.calibration, max(0, index), None), None)
    if index < 0 or chosen is None:
        raise InputError(f"--batch {index}: the calibration data has no such batch: count from 0")
    watched = watch(run.task.model, quantized.model, layer, chosen)
    screen.show([watched_table(watched)], [], {"kind": "watched layer", "schema": 1, **watched.to_json()})
