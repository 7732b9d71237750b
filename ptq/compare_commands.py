"""``ptq compare``: networks that reach the same bits in different ways, or one network at every precision."""

from typing import TYPE_CHECKING, Annotated

import typer

from ptq.cli import Screen, command
from ptq.errors import InputError

if TYPE_CHECKING:
    from ptq.quantization import Bits
    from ptq.run import Run

DEFAULT_BITS = "W4A4"


@command
def compare(
    run: "Run",
    screen: Screen,
    bits: Annotated[
        str | None,
        typer.Option(
            help="W4A4, or several; those of the QAT baselines if not said. Or precisions of one network: "
            "float,half,bfloat16,16,8,6,4."
        ),
    ] = None,
    alpha: Annotated[str, typer.Option(help="Of the smoothed network: a number, or best.")] = "best",
    refine: Annotated[str, typer.Option(help="Also a refined network: as in ptq quantize.")] = "fast",
    images: Annotated[int | None, typer.Option(help="Only the first so many images.")] = None,
    error_batches: Annotated[int, typer.Option(help="Batches for the per-layer errors.")] = 8,
) -> None:
    """Put float, quantized, quantization-aware and pipeline- and DDP-trained networks side by side."""
    if bits is not None and not bits.lower().startswith("w"):
        _compare_precisions(run, screen, bits, images)
        return
    from ptq.refinement import steps_of
    from ptq.report import compare_plots, plots
    from ptq.report.page import write_page
    from ptq.storage import read_json
    from ptq.sweeping import Sweep
    from ptq.training.candidates import best_alpha, post_training, trained
    from ptq.training.comparison import Comparison, correlations_in
    from ptq.training.comparison import compare as measure

    steps_of(refine)  # before any work is done
    task, folder = run.task, run.folder / "baselines"
    given = None if alpha == "best" else _alpha(alpha)
    widths = _widths(bits, run)
    calibration, smoothed = run.calibration(), run.smoothed()
    sweep = Sweep.from_json(read_json(run.sweep_file)) if run.sweep_file.exists() else None
    baselines = trained(task, calibration, smoothed, folder, widths, run.say)
    candidates = []
    for width in widths:
        value = given
        if value is None:
            value, why = best_alpha(task.model, calibration, width, sweep)
            run.say(f"{width}: α = {value:g}, {why}")
        candidates += post_training(task, calibration, width, value, refine)
        candidates += [candidate for candidate in baselines if candidate.scheme.bits == width]
    comparison = Comparison(
        task=task.name,
        metric=task.metric,
        rows=measure(task, candidates, images=images, error_batches=error_batches),
        correlations=correlations_in(folder),
    )
    numbers, picture = run.folder / "compare.json", run.folder / "compare.png"
    result = comparison.save(numbers)
    plots.save(
        compare_plots.comparison_picture(comparison, f"{task.name}: equal bits, reached in several ways"), picture
    )
    screen.show(compare_plots.comparison_tables(comparison), [numbers, picture, write_page(run.folder)], result)


def _compare_precisions(run: "Run", screen: Screen, bits: str, images: int | None) -> None:
    from ptq.report import compare_plots, plots
    from ptq.report.page import write_page
    from ptq.training.precision import parse_precisions, precisions

    names = parse_precisions(bits)
    found = precisions(run.task, run.calibration(), names, images=images)
    numbers, picture = run.folder / "compare_bits.json", run.folder / "compare_bits.png"
    result = found.save(numbers)
    plots.save(compare_plots.precision_picture(found, f"{found.task}: one network at every precision"), picture)
    screen.show([compare_plots.precision_table(found)], [numbers, picture, write_page(run.folder)], result)


def _widths(text: str | None, run: "Run") -> "list[Bits]":
    """What was asked for, or the bits that the folder's quantization-aware baselines were trained for."""
    from ptq.quantization import Bits
    from ptq.training.baselines import baselines_in

    if text is None:
        found = baselines_in(run.folder / "baselines").values()
        aware = {Bits(**baseline.settings["scheme"]["bits"]) for baseline in found if baseline.training == "qat"}
        return sorted(aware, key=str, reverse=True) or [Bits.parse(DEFAULT_BITS)]
    return list(dict.fromkeys(Bits.parse(part) for part in text.split(",") if part.strip()))


def _alpha(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InputError(f"--alpha {text!r}: give a number from 0 to 1, or best") from error
