"""``ptq train``: baselines that were trained for few bits or through compressed pipelines."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ptq.cli import Screen, app, command

if TYPE_CHECKING:
    from ptq.run import Run
    from ptq.tasks import Task
    from ptq.training.recipe import Recipe

_group = typer.Typer(name="train", help="Train baselines: float, qat, pipeline, ddp.", no_args_is_help=True)
app.add_typer(_group)

# What takes the place of the recipe's own settings …
_CHANGES: dict[str, Any] = {
    "epochs": Annotated[int | None, typer.Option(help="Epochs, in place of the recipe's.")],
    "learning_rate": Annotated[float | None, typer.Option(help="Learning rate, in place of the recipe's.")],
    "batch": Annotated[int | None, typer.Option(help="Samples of a step, in place of the recipe's.")],
    "label_smoothing": Annotated[float | None, typer.Option(help="Label smoothing, from 0 to below 1.")],
    "images": Annotated[int | None, typer.Option(help="Train on the first so many images or texts.")],
    "tokens": Annotated[int | None, typer.Option(help="Train on texts of at most so many tokens.")],
}
# … and what else all four commands take
_SHARED: dict[str, Any] = {
    "preset": Annotated[
        str | None, typer.Option(help="A named recipe: digits, cifar10-short, mobilenetv2-cifar10-published …")
    ],
    **_CHANGES,
    "test_images": Annotated[int | None, typer.Option(help="Measure on the first so many images or texts.")],
    "name": Annotated[str | None, typer.Option(help="Folder under baselines/; the kind of training if not given.")],
}


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What was said by the options that all kinds of training take."""

    run: "Run"
    preset: str | None
    changes: dict[str, Any]
    test_images: int | None
    name: str | None

    def folder(self, name: str) -> Path:
        return self.run.folder / "baselines" / (self.name or name)

    def recipe(self, kind: str, **more: Any) -> "Recipe":
        from ptq.training.baselines import recipe_for

        recipe = recipe_for(self.run.task.name, kind, self.preset)
        given = {**self.changes, **more, "seed": self.run.options.seed}
        given["batch_size"] = given.pop("batch")
        said = {key: value for key, value in given.items() if value is not None}
        if said.get("epochs", recipe.epochs) <= recipe.warmup_epochs:
            said["warmup_epochs"] = 0
        return replace(recipe, **said)

    def task(self, recipe: "Recipe") -> "Task":
        """The task in the form that is trained, measured on the first so many samples."""
        from ptq.batches import limited
        from ptq.training.text import with_one_input

        task = with_one_input(self.run.task, recipe.tokens)
        return replace(task, evaluation=limited(task.evaluation, self.test_images))


def _training(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command that gets a Shared beside its Run and Screen."""
    run, screen, _, *own = inspect.signature(function).parameters.values()

    @functools.wraps(function)
    def wrapper(run: "Run", screen: Screen, **given: Any) -> None:
        shared = {name: given.pop(name) for name in _SHARED}
        changes = {name: shared.pop(name) for name in _CHANGES}
        function(run, screen, Shared(run=run, changes=changes, **shared), **given)

    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _SHARED.items()
    ]
    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    wrapper.__signature__ = inspect.Signature([run, screen, *own, *added])  # type: ignore[attr-defined]
    return command(wrapper, group=_group)


def _from_scratch(run: "Run") -> None:
    """Baselines begin with random weights unless a checkpoint was given; on text, with the encoder that is there."""
    from ptq.tasks.text import TEXT_TASKS

    if run.options.weights is None and run.options.task not in TEXT_TASKS:
        run.options = replace(run.options, weights="random")
        say, run.say = run.say, lambda message: None  # that such a network is right by chance is known here
        _ = run.task
        run.say = say


def _show(screen: Screen, folder: Path, baseline: Any) -> None:
    low, high = baseline.interval
    screen.say(
        f"{baseline.metric} {baseline.score:.2f} ({low:.1f} to {high:.1f}, n = {baseline.n})"
        f" after {baseline.seconds:.0f} s of training, {baseline.samples_per_second:.0f} samples/s,"
        f" {1000 * baseline.seconds_per_step:.0f} ms"
        + (f" and {baseline.payload_bytes_per_step:,.0f} bytes" if baseline.payload_bytes_per_step else "")
        + " a step"
    )
    from ptq.report import compare_plots, plots
    from ptq.training.checkpoints import Folder, read_lines
    from ptq.training.record import recorded_lines

    title = f"{baseline.task}, {folder.name}"
    curve = compare_plots.training_picture(
        read_lines(Folder(folder).metrics), recorded_lines(folder), baseline.metric, title
    )
    plots.save(curve, folder / "training.png")
    names = ("baseline.json", "metrics.jsonl", "model.safetensors", "quantized.safetensors", "training.png")
    screen.show(
        [], [folder / name for name in names if (folder / name).exists()], {**asdict(baseline), "interval": [low, high]}
    )


@_training
def float_(run: "Run", screen: Screen, shared: Shared) -> None:
    """Train the network from random weights, or from --weights."""
    from ptq.training.baselines import float_baseline

    _from_scratch(run)
    folder, recipe = shared.folder("float"), shared.recipe("float")
    baseline, _ = float_baseline(shared.task(recipe), recipe, folder, progress=screen.progress)
    _show(screen, folder, baseline)


@_training
def qat(
    run: "Run",
    screen: Screen,
    shared: Shared,
    bits: Annotated[str, typer.Option(help="W4A4, w8a8 …")] = "W4A4",
    first_last: Annotated[int | None, typer.Option(help="Bits of the first and the last layer.")] = None,
    include: Annotated[list[str] | None, typer.Option(help="Only layers that match, e.g. 'features.*'.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Not the layers that match.")] = None,
    override: Annotated[list[str] | None, typer.Option(help="PATTERN=BITS, e.g. 'classifier*=W8A8'.")] = None,
    observer: Annotated[str | None, typer.Option(help="Another observer than the calibration's.")] = None,
    weight_format: Annotated[str | None, typer.Option(help="A number format for the weights; see ptq formats.")] = None,
    activation_format: Annotated[str | None, typer.Option(help="A number format for the activations.")] = None,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Symmetric activations, zero-point 0.")] = False,
    steps: Annotated[str, typer.Option(help="learned (LSQ) or observed step sizes.")] = "learned",
    keep_batchnorm: Annotated[bool, typer.Option("--keep-batchnorm", help="Don't fold BatchNorm first.")] = False,
    freeze_after: Annotated[int | None, typer.Option(help="Freeze kept BatchNorms after so many epochs.")] = None,
    use_smoothed: Annotated[bool, typer.Option("--smooth/--no-smooth", help="Start from the smoothed model.")] = True,
    use: Annotated[
        bool, typer.Option("--use", help="Make it the folder's quantized network, for evaluate, analyze, export.")
    ] = False,
) -> None:
    """Train with quantization in the loop, from the float or smoothed network of this folder."""
    from ptq.quantization import Bits, Scheme
    from ptq.quantization.scheme import parse_override
    from ptq.training.baselines import qat_baseline
    from ptq.training.text import with_one_input

    folder, recipe = shared.folder(f"qat-{bits}"), shared.recipe("qat")
    smoothed = run.smoothed() if use_smoothed else None
    source, calibration = (smoothed.model, smoothed.calibration) if smoothed else (run.task.model, run.calibration())
    scheme = Scheme(
        bits=replace(Bits.parse(bits), weight_format=weight_format, activation_format=activation_format),
        first_last=first_last,
        include=tuple(include or ["*"]),
        exclude=tuple(exclude or []),
        overrides=tuple(parse_override(text) for text in override or []),
        symmetric_activations=symmetric,
        fold_batchnorm=not keep_batchnorm,
    )
    baseline, quantized = qat_baseline(
        shared.task(recipe),
        with_one_input(replace(run.task, model=source)).model,
        calibration,
        scheme,
        recipe,
        folder,
        steps=steps,
        freeze_after=freeze_after,
        observer=observer,
        progress=screen.progress,
    )
    if use:
        quantized.save(run.quantized_file)
        run.mixed_file.unlink(missing_ok=True)  # it told about an earlier network
    _show(screen, folder, baseline)


@_training
def pipeline(
    run: "Run",
    screen: Screen,
    shared: Shared,
    stages: Annotated[int, typer.Option(help="Processes, one for each stage.")] = 2,
    split: Annotated[list[str] | None, typer.Option(help="Cut before this module; balanced if not said.")] = None,
    activations: Annotated[str | None, typer.Option(help="Number format of what goes forward.")] = None,
    gradients: Annotated[str | None, typer.Option(help="Number format of what comes back.")] = None,
    schedule: Annotated[str, typer.Option(help="gpipe or 1f1b.")] = "gpipe",
    record_every: Annotated[int | None, typer.Option(help="Record distortions every so many steps.")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Parts of a batch, one after the other.")] = 4,
) -> None:
    """Train in stages, one process each, with what crosses between them compressed."""
    from ptq.training.baselines import pipeline_baseline

    _from_scratch(run)
    folder, recipe = shared.folder("pipeline"), shared.recipe("pipeline", micro_batches=micro_batches)
    baseline, _ = pipeline_baseline(
        shared.task(recipe),
        recipe,
        folder,
        stages=stages,
        split=split or (),
        activations=activations,
        gradients=gradients,
        schedule=schedule,
        record_every=record_every,
        progress=screen.progress,
    )
    _show(screen, folder, baseline)


@_training
def ddp(
    run: "Run",
    screen: Screen,
    shared: Shared,
    ranks: Annotated[int, typer.Option(help="Processes, one for each replica.")] = 2,
    gradients: Annotated[str | None, typer.Option(help="Number format, fp16, bf16 or powersgd:rank=N.")] = None,
    error_feedback: Annotated[bool, typer.Option("--error-feedback", help="Add what was lost to the next.")] = False,
    normalised: Annotated[
        bool, typer.Option("--normalised", help="All buckets weigh the same in learning levels (ALQ-N, AMQ-N).")
    ] = False,
    update_levels: Annotated[
        str, typer.Option(help="Steps at which levels are learned again; the last number is a period.")
    ] = "100,2000,10000",
    record_every: Annotated[int | None, typer.Option(help="Record distortions every so many steps.")] = None,
) -> None:
    """Train replicas, one process each, with the gradients between them compressed."""
    from ptq.training.baselines import ddp_baseline
    from ptq.training.gradients import GradientCompression, Updates

    _from_scratch(run)
    folder, recipe = shared.folder("ddp"), shared.recipe("ddp")
    compression = GradientCompression(
        form=gradients,
        error_feedback=error_feedback,
        normalised=normalised,
        updates=Updates.parse(update_levels),
        record_every=record_every,
    )
    baseline, _ = ddp_baseline(shared.task(recipe), recipe, folder, compression, ranks=ranks, progress=screen.progress)
    _show(screen, folder, baseline)
