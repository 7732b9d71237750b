"""Commands about number formats, and about this machine: ``ptq formats``, ``pack`` and ``doctor``."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ptq.cli import Screen, command
from ptq.errors import InputError

if TYPE_CHECKING:
    from ptq.run import Run


@command
def doctor(run: "Run", screen: Screen) -> None:
    """Say what this machine and this installation can do."""
    from ptq.export import doctor as facts
    from ptq.report.tables import facts_table

    found = facts()
    screen.show([facts_table(found)], [], found)


@command
def pack(
    run: "Run",
    screen: Screen,
    conv: Annotated[str, typer.Option(help="Number format of the convolutions' weights.")] = "affine:bits=8,axis=0",
    linear: Annotated[str, typer.Option(help="Number format of the Linear layers' weights.")] = "affine:bits=8,axis=0",
) -> None:
    """Pack the checkpoint: weights in few bits on disk, everything else untouched."""
    checkpoint, size = run.pack({"conv": conv, "linear": linear})
    from ptq.report.format_plots import packed_table

    result = {
        "tensors": [asdict(entry) for entry in checkpoint.entries],
        "source_bytes": checkpoint.source_bytes,
        "packed_bytes": checkpoint.nbytes,
        "file_bytes": size,
    }
    screen.show([packed_table(checkpoint, size)], [run.packed_file], result)


@command
def formats(
    run: "Run",
    screen: Screen,
    distribution: Annotated[str, typer.Option(help="normal, laplace, relu or uniform.")] = "normal",
    shape: Annotated[str, typer.Option(help="Of the values drawn.")] = "4,16,32,32",
    layer: Annotated[str | None, typer.Option(help="Use the input of this layer of the task instead.")] = None,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw error against true bits, with the task's tensors.")
    ] = False,
) -> None:
    """List the number formats: their bits, bytes and errors on a distribution or on a layer's input."""
    from ptq.formats import catalog
    from ptq.report import format_plots

    if plot:
        from ptq.report import plots
        from ptq.storage import write_json

        name, activation, gradient = run.captured(layer)
        comparison = catalog.compare({f"input of {name}": activation, f"gradient at {name}": gradient})
        picture, numbers = run.folder / "formats.png", run.folder / "formats.json"
        plots.save(format_plots.error_against_bits(comparison, f"{run.task.name}: error against true bits"), picture)
        result = {"kind": "formats", "schema": 1, "layer": name, **comparison.to_json()}
        write_json(numbers, result)
        screen.show([format_plots.sets_table(comparison)], [picture, numbers], result)
        return
    if layer:
        name, values, _ = run.captured(layer)
        what = f"input of {name}"
    else:
        values, what = catalog.draw(distribution, parse_shape(shape)), distribution
    rows = catalog.listing(values)
    screen.show(
        [format_plots.formats_table(rows, what)], [], {"what": what, "formats": [row.to_json() for row in rows]}
    )


def parse_shape(text: str) -> tuple[int, ...]:
    """``4,16,32,32``."""
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--shape {text!r}: write whole numbers, as 4,16,32,32") from error
    if any(size < 1 for size in shape):
        raise InputError(f"--shape {text!r}: every size is at least 1")
    return shape
