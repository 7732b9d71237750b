"""``ptq grid``: many runs from one TOML file."""

import functools
import inspect
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ptq.cli import COMMON, Screen, app, errors_in_one_line, invoke
from ptq.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from ptq.grid import Grid, GridFolder

_group = typer.Typer(name="grid", help="Many runs from one TOML file: plan, run, status, collect, cancel.",
                     no_args_is_help=True)  # fmt: skip
app.add_typer(_group)

_COMMON = {name: COMMON[name] for name in ("as_json", "quiet", "log_level", "debug")}
_SHOWN = 40  # rows of a table; the JSON has all


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command that gets the grid of FILE and a Screen."""
    own = list(inspect.signature(function).parameters.values())[2:]
    parameters = [
        inspect.Parameter(
            "file",
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[Path, typer.Argument(metavar="FILE", help="The grid, as TOML.")],
        ),
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in _COMMON.items()
        ),
    ]

    @functools.wraps(function)
    def wrapper(*, file: Path, as_json: bool, quiet: bool, log_level: str, debug: bool, **given: Any) -> None:
        screen = Screen(as_json=as_json, quiet=quiet)
        with errors_in_one_line(debug=debug), screen.showing(log_level):
            from ptq.grid import read_grid

            function(read_grid(file), screen, **given)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return _group.command(function.__name__)(wrapper)


@_command
def plan(
    grid: "Grid",
    screen: Screen,
    workers: Annotated[int, typer.Option(help="Runs at a time, for the estimate.")] = 1,
) -> None:
    """Show the runs and, once some have finished, how long the rest should take."""
    from ptq.grid import GridFolder
    from ptq.report.tables import plain_table

    if workers < 1:
        raise InputError(f"--workers {workers}: give at least 1")
    folder = GridFolder.of(grid)
    states, seconds = folder.states(), folder.remaining_seconds()
    left = [seconds[run.id] for run in grid.runs if states[run.id] != "finished"]
    known = [time for time in left if time is not None]
    total = sum(known) / workers if len(known) == len(left) else None
    if not left:
        caption = "all runs are finished"
    elif total is None:
        caption = f"{len(left)} to do; how long that takes is known once one run has finished"
    else:
        caption = f"{len(left)} to do, about {duration(total)} with {workers} at a time (medians of finished commands)"
    table = plain_table(f"{grid.name}: {len(grid.runs)} runs", "run", *grid.axes, "state", "left", caption=caption)
    for run in grid.runs[:_SHOWN]:
        remaining = seconds[run.id]
        text = "" if states[run.id] == "finished" else "?" if remaining is None else duration(remaining)
        table.add_row(run.id, *map(str, run.settings.values()), states[run.id], text)
    _note_the_rest(table, len(grid.runs), caption)
    runs = [
        {"id": run.id, "settings": run.settings, "commands": run.commands, "state": states[run.id],
         "seconds_left": seconds[run.id]}
        for run in grid.runs
    ]  # fmt: skip
    screen.show([table], [], {"name": grid.name, "runs": runs, "seconds_left": total})


@_command
def run(
    grid: "Grid",
    screen: Screen,
    workers: Annotated[int | None, typer.Option(help="Runs at a time on this machine; as many as cores.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Also what failed before.")] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Put an array of workers into SLURM's queue.")] = False,
    array_size: Annotated[int, typer.Option(help="Workers of the array.")] = 16,
    partition: Annotated[str | None, typer.Option(help="SLURM's partition.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of each worker.")] = 0,
    cpus: Annotated[int | None, typer.Option(help="Cores of each worker.")] = None,
    minutes: Annotated[int, typer.Option(help="Time limit of each worker; it is queued again after it.")] = 24 * 60,
    slurm_option: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for sbatch, e.g. account=vision.")] = None,
) -> None:
    """Do what isn't done yet, here or on a cluster; several of these on one grid share out the runs."""
    from ptq.grid import GridFolder, work

    for name, number in (
        ("--workers", workers),
        ("--array-size", array_size),
        ("--cpus", cpus),
        ("--minutes", minutes),
    ):
        if number is not None and number < 1:
            raise InputError(f"{name} {number}: give at least 1")
    if gpus < 0:
        raise InputError(f"--gpus {gpus}: give 0 or more")
    if not slurm and (partition or gpus or cpus or slurm_option):
        raise InputError("--partition, --gpus, --cpus and --slurm-option are for a cluster: add --slurm")
    folder, before = GridFolder.of(grid), time.time() if retry else None
    folder.save_plan(grid)
    if slurm:
        from ptq.grid.slurm import Resources, submit

        left = sum(state != "finished" for state in folder.states().values())
        if not left:
            screen.say("all runs are finished")
            jobs = []
        else:
            resources = Resources(
                partition=partition, gpus=gpus, cpus=cpus, minutes=minutes, options=tuple(slurm_option or ())
            )
            jobs = submit(folder, min(array_size, left), resources, retry=before)
            screen.say(f"{left} runs for {len(jobs)} workers in SLURM's queue, jobs {jobs[0]} to {jobs[-1]}")
        _show_states(grid, folder, screen, {"jobs": jobs})
        return
    work(folder, workers or os.cpu_count() or 1, retry=before, say=screen.say)
    _show_states(grid, folder, screen, {})
    if folder.counts()["failed"]:
        raise typer.Exit(1)


@_command
def status(grid: "Grid", screen: Screen) -> None:
    """Say how far the runs are, what failed and why, and who works on what."""
    from ptq.grid import GridFolder

    _show_states(grid, GridFolder.of(grid), screen, {})


def _show_states(grid: "Grid", folder: "GridFolder", screen: Screen, more: dict[str, Any]) -> None:
    from ptq.grid.states import as_json
    from ptq.report.tables import plain_table

    counts = folder.counts()
    runs = []
    for one in grid.runs:
        runs.append(as_json(one, folder.state(one), folder.record(one), folder.holder(one)))
    caption = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    table = plain_table(f"{grid.name}: {len(runs)} runs", "run", *grid.axes, "state", "seconds", "", caption=caption)
    notable = sorted(runs, key=lambda entry: entry["state"] not in ("failed", "running", "interrupted"))
    for entry in notable[:_SHOWN]:
        note = entry["reason"] or entry["holder"] or ""
        seconds = "" if entry["seconds"] is None else f"{entry['seconds']:.1f}"
        table.add_row(entry["id"], *map(str, entry["settings"].values()), entry["state"], seconds, note[:90])
    _note_the_rest(table, len(runs), caption)
    screen.show([table], [], {"name": grid.name, "counts": counts, "runs": runs, **more})
    if counts["failed"]:
        screen.say(f"logs of failed runs: {folder.path / 'runs'}/RUN/log.txt; `ptq grid run FILE --retry` tries again")


@_command
def collect(grid: "Grid", screen: Screen) -> None:
    """Put what came out into one table, as CSV and JSON, and draw it."""
    from ptq.grid.collect import collect as collected_from

    collected = collected_from(grid)
    if not collected.rows:
        raise InputError(f"{grid.folder}: no run has finished yet: `ptq grid run FILE` first")
    from ptq.grid.plots import results_against
    from ptq.report import plots
    from ptq.report.tables import plain_table

    files = collected.save(grid.folder)
    figure = results_against(collected)
    if figure is not None:
        plots.save(figure, grid.folder / "results.png")
        files.append(grid.folder / "results.png")
    caption = f"{collected.missing} runs aren't finished" if collected.missing else None
    table = plain_table(f"{grid.name}: {len(collected.rows)} finished runs", *collected.columns, caption=caption)
    for row in collected.rows[:_SHOWN]:
        table.add_row(*(cell(row.get(column)) for column in collected.columns))
    _note_the_rest(table, len(collected.rows), caption)
    screen.show([table], files, collected.to_json())


@_command
def cancel(grid: "Grid", screen: Screen) -> None:
    """Stop the workers of a grid: here, in SLURM's queue, and, after their run, on other machines."""
    from ptq.grid import GridFolder
    from ptq.grid.slurm import cancel as cancel_jobs
    from ptq.locking import Holder

    folder = GridFolder.of(grid)
    if not folder.path.exists():
        raise InputError(f"{folder.path}: nothing to cancel: the grid was never run")
    folder.cancel()
    jobs = cancel_jobs(folder.path)
    holders = {holder for one in grid.runs if (holder := folder.holder(one)) is not None}
    machine = Holder.myself("").machine
    here = {holder.pid for holder in holders if holder.machine == machine}
    for pid in here:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)
    elsewhere = {holder.host for holder in holders if holder.machine != machine}
    screen.say(
        f"{len(jobs)} jobs cancelled, {len(here)} workers here are finishing their unit of work"
        + (f"; workers on {', '.join(sorted(elsewhere))} end after their run" if elsewhere else "")
    )
    _show_states(grid, folder, screen, {"jobs": jobs, "pids": sorted(here)})


@_group.command(hidden=True)
def execute(folder: Path) -> None:
    """Do what is left of one run; ``ptq grid run`` starts this, and it ends with it."""
    from ptq.grid.states import Record
    from ptq.grid.work import end_with_parent
    from ptq.locking import holding

    with errors_in_one_line():
        end_with_parent()
        # The process that a killed worker left may need a moment to notice.
        with holding(folder, "ptq grid run", patience=30):
            record = Record.load(folder)
            for command in record.commands[len(record.seconds) :]:
                started = time.perf_counter()
                typer.echo(f"$ ptq {' '.join(command)}", err=True)
                code = invoke([*command, "--run", str(folder)])
                if code:
                    raise typer.Exit(code)
                record = record.after(time.perf_counter() - started)
                record.save(folder)


def duration(seconds: float) -> str:
    """``1 h 05 min``, ``3 min 20 s``, ``2.5 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def cell(value: Any) -> str:
    return (
        "" if value is None else f"{value:.2f}" if isinstance(value, float) and value != round(value, 2) else str(value)
    )


def _note_the_rest(table: "Table", total: int, caption: str | None) -> None:
    if total > _SHOWN:
        table.caption = f"{_SHOWN} of {total} shown, --json has all; {caption or ''}".rstrip("; ")
