"""The command line: its options, its errors, and where results go. The commands stand in ``ptq.commands``."""

import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ptq.errors import InputError, PtqError

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

# What every command understands.
_COMMON: dict[str, tuple[Any, Any]] = {
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
    "run": (Annotated[Path | None, typer.Option(help="Run folder; reports/<task> if not given.")], None),
    "device": (Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")], "auto"),
    "seed": (Annotated[int | None, typer.Option(help="Seed of whatever is random.")], None),
    "as_json": (Annotated[bool, typer.Option("--json", help="One JSON object on stdout, the rest on stderr.")], False),
    "quiet": (Annotated[bool, typer.Option("--quiet", "-q", help="Errors only.")], False),
    "debug": (Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")], False),
}  # fmt: skip


class Screen:
    """Where results go: tables for people, or one JSON object for programs."""

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self._as_json, self._quiet = as_json, quiet
        self.progress = not quiet and sys.stderr.isatty()

    def say(self, message: str) -> None:
        if not self._quiet:
            typer.echo(message, err=True)

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
        for name, (annotation, default) in _COMMON.items()
    ]

    @functools.wraps(function)
    def wrapper(**given: Any) -> None:
        options = {name: given.pop(name) for name in _COMMON}
        screen = Screen(as_json=options["as_json"], quiet=options["quiet"])
        try:
            if "bits_or_file" in inspect.signature(function).parameters:
                given["bits_or_file"], options["weights"] = _bits_and_files(options["weights"])
            function(_open_run(options, screen), screen, **given)
        except PtqError as error:
            if options["debug"]:
                raise
            _fail(str(error), 1)
        except KeyboardInterrupt:
            _fail("interrupted: what is finished is kept, the same command goes on from there", 130)
        except (OSError, RuntimeError, MemoryError) as error:
            if options["debug"]:
                raise
            _fail(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} (--debug for more)", 1)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != "bits_or_file"]
    wrapper.__signature__ = inspect.Signature([*parameters, *common])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in [*parameters, *common]}
    return group.command(function.__name__.strip("_"))(wrapper)


def _open_run(options: dict[str, Any], screen: Screen) -> "Run":
    from ptq.allocator import tune_allocator

    tune_allocator()
    from ptq.run import Run, TaskOptions

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


def main() -> None:
    """The ``ptq`` command: errors in the options are one line too."""
    import ptq.commands
    import ptq.train_commands  # noqa: F401 (they register themselves)

    try:
        code = app(standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        message = " ".join(error.format_message().split())
        typer.echo(f"ptq: {message} (ptq COMMAND --help lists the options)", err=True)
        code = getattr(error, "exit_code", 2)
    sys.exit(code)
