"""The command line: its options, its errors, and where results go. The commands stand in ``ptq.commands``."""

import functools
import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ptq.errors import InputError, PtqError
from ptq.interruption import stoppable
from ptq.journal import checked_level, logger, recording, showing
from ptq.locking import holding

if TYPE_CHECKING:
    from rich.table import Table

    from ptq.run import Run

app = typer.Typer(
    name="ptq",
    help="Post-training quantization and calibration for PyTorch. Every command works without arguments, on an "
    "embedded task.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_invoked: list[str] = []  # the arguments of the command that runs
_READERS = ("doctor", "formats")  # commands that leave the run folder as it is, but for a picture asked for

# What every command understands.
COMMON: dict[str, tuple[Any, Any]] = {
    "task": (
        Annotated[str | None, typer.Option(help="digits (embedded), cifar10-resnet20, cifar10-resnet56, "
                                           "cifar10-mobilenetv2, cola, rte, or package.module:factory.")],
        None,
    ),
    "model": (
        Annotated[str | None, typer.Option(help="torchvision:NAME, timm:NAME, transformers:FOLDER or "
                                           "package.module:factory.")],
        None,
    ),
    "weights": (
        Annotated[list[str] | None, typer.Option("--weights", "--checkpoint", metavar="FILE",
                                                 help="Checkpoint: safetensors, or a pickle of tensors.")],
        None,
    ),
    "data": (
        Annotated[str | None, typer.Option(help="imagefolder:DIR, cifar10:DIR, npz:FILE, glue:DIR or "
                                           "package.module:factory.")],
        None,
    ),
    "download": (Annotated[bool, typer.Option("--download", help="Let torchvision fetch the data set.")], False),
    "batch_size": (Annotated[int | None, typer.Option(help="Samples per batch.")], None),
    "image_size": (Annotated[int | None, typer.Option(help="Side of the images, in pixels.")], None),
    "run": (  # the second name is for torchrun, which takes --run for its own --run-path
        Annotated[Path | None, typer.Option("--run", "--run-folder", help="Run folder; reports/<task> if not given.")],
        None,
    ),
    "device": (Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")], "auto"),
    "seed": (Annotated[int | None, typer.Option(help="Seed of whatever is random.")], None),
    "as_json": (Annotated[bool, typer.Option("--json", help="One JSON object on stdout, the rest on stderr.")], False),
    "quiet": (Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")], False),
    "log_level": (
        Annotated[str, typer.Option(help="What is told, on the screen and in the run folder's log.jsonl: debug (every "
                                    "unit of work), info, warning or error.")],
        "info",
    ),
    "debug": (Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")], False),
}  # fmt: skip


class Screen:
    """Where results go: tables for people, or one JSON object for programs."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self._as_json, self._quiet = as_json, quiet
        self.progress = not quiet and sys.stderr.isatty()

    def say(self, message: str) -> None:
        logger.info("%s", message)

    def showing(self, level: str) -> AbstractContextManager[None]:
        """Inside, what is said from this level on appears on stderr."""
        return showing(lambda line: None if self._quiet else typer.echo(line, err=True), checked_level(level))

    def show(self, tables: "Iterable[Table]", files: Iterable[Path], result: dict[str, Any]) -> None:
        """Print what a command found and which files it wrote."""
        names = [str(file) for file in files]
        if self._as_json:
            typer.echo(json.dumps({**result, "files": names}, ensure_ascii=False))
        if self._quiet or self._as_json:
            return
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, emoji=False, markup=False)
        for table in tables:
            console.print(table)
            console.print()
        if names:
            typer.echo("wrote " + ", ".join(names))


def command(function: Callable[..., None], *, group: typer.Typer = app) -> Callable[..., None]:
    """Register a command: it gets a Run and a Screen made from the common options, then its own options."""
    own = list(inspect.signature(function).parameters.values())[2:]
    common = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in COMMON.items()
    ]

    @functools.wraps(function)
    def wrapper(**given: Any) -> None:
        options = {name: given.pop(name) for name in COMMON}
        screen = Screen(as_json=options["as_json"] and _is_first(), quiet=options["quiet"] or not _is_first())
        level = options["log_level"]
        with errors_in_one_line(debug=options["debug"]), screen.showing(level), _shared_job(group):
            if "bits_or_file" in inspect.signature(function).parameters:
                given["bits_or_file"], options["weights"] = _bits_and_files(options["weights"])
            run = _open_run(options, screen)
            # A folder that the lock alone made is gone again when the line would be added.
            log = recording(run.folder, _invoked, level) if _is_first() else nullcontext()
            with log, _folder_of(run, function):
                function(run, screen, **given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != "bits_or_file"]
    wrapper.__signature__ = inspect.Signature([*parameters, *common])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in [*parameters, *common]}
    return group.command(function.__name__.strip("_"))(wrapper)


@contextmanager
def errors_in_one_line(*, debug: bool = False) -> Iterator[None]:
    """End the process with one line and an exit code; Ctrl-C and SIGTERM, too."""
    try:
        with stoppable():
            yield
    except typer.Exit:  # a RuntimeError, for typer
        raise
    except PtqError as error:
        if debug:
            raise
        _fail(str(error), 1)
    except KeyboardInterrupt as stop:
        again = shlex.join(["ptq", *_invoked])
        _fail(f"stopped: what is finished is kept; go on with `{again}`", getattr(stop, "exit_code", 130))
    except (OSError, RuntimeError, MemoryError) as error:
        if debug:
            raise
        _fail(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} (--debug for more)", 1)


def _folder_of(run: "Run", function: Callable[..., None]) -> AbstractContextManager[None]:
    """The run folder, held against other processes where a command writes; torchrun's ranks are one command."""
    if function.__name__ in _READERS or not _is_first():
        return nullcontext()
    return holding(run.folder, shlex.join(["ptq", *_invoked]))


def _is_first() -> bool:
    """Of the processes that torchrun started, if it did."""
    return int(os.environ.get("RANK", 0)) == 0


def _shared_job(group: typer.Typer) -> AbstractContextManager[None]:
    """torchrun's processes share a command's batches; training has ways of its own."""
    if group is not app or int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return nullcontext()
    from ptq.distributed import joined

    return joined()


def _open_run(options: dict[str, Any], screen: Screen) -> "Run":
    from ptq.allocator import tune_allocator

    tune_allocator()
    from ptq.folder import TaskOptions
    from ptq.run import Run

    files = options["weights"] or []
    if len(files) > 1:
        raise InputError(f"--weights was given {len(files)} times ({', '.join(files)}): one checkpoint is enough")
    task = TaskOptions(
        **{key: options[key] for key in ("task", "model", "data", "batch_size", "image_size", "seed")},
        weights=files[0] if files else None,
    )
    return Run(
        task,
        options["run"],
        device=options["device"],
        download=options["download"],
        say=screen.say,
        progress=screen.progress,
    )


def _bits_and_files(values: list[str] | None) -> tuple[str | None, list[str]]:
    """In ``quantize``, ``--weights 4`` are bits and ``--weights model.safetensors`` is a checkpoint."""
    bits = [value for value in values or [] if value.isdigit() or value == "float"]
    if len(bits) > 1:
        raise InputError(f"--weights {' --weights '.join(bits)}: give the bits of the weights once")
    return (bits[0] if bits else None), [value for value in values or [] if value not in bits]


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"ptq: {message}", err=True)
    raise typer.Exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        import ptq

        typer.echo(f"ptq {ptq.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def invoke(arguments: Sequence[str] | None = None) -> int:
    """Run one command, of this process's own arguments if none are given; errors in the options are one line too."""
    import ptq.analyze_commands
    import ptq.commands
    import ptq.compare_commands
    import ptq.format_commands
    import ptq.grid_commands
    import ptq.report_commands
    import ptq.train_commands  # noqa: F401 (they register themselves)

    _invoked[:] = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(arguments, standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        message = " ".join(error.format_message().split())
        typer.echo(f"ptq: {message} (ptq COMMAND --help lists the options)", err=True)
        code = getattr(error, "exit_code", 2)
    return int(code or 0)


def main() -> None:
    """The ``ptq`` command."""
    sys.exit(invoke())
