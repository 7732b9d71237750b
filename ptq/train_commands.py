"""``ptq train``: baselines that were trained for few bits or through compressed pipelines."""

from dataclasses import asdict, replace
from functools import partial
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
_training = partial(command, group=_group)

Preset = Annotated[
    str | None, typer.Option(help="A named recipe: digits, cifar10-short, mobilenetv2-cifar10-published …")
]
Epochs = Annotated[int | None, typer.Option(help="Epochs, in place of the recipe's.")]
Rate = Annotated[float | None, typer.Option(help="Learning rate, in place of the recipe's.")]
MicroBatches = Annotated[int | None, typer.Option(help="Parts of a batch that pass one after the other.")]
Images = Annotated[int | None, typer.Option(help="Train on the first so many images.")]
TestImages = Annotated[int | None, typer.Option(help="Measure on the first so many images.")]
Name = Annotated[str | None, typer.Option(help="Folder under baselines/; the kind of training if not given.")]


def _recipe(run: "Run", kind: str, preset: str | None, **given: Any) -> "Recipe":
    from ptq.training.baselines import recipe_for

    recipe = recipe_for(run.task.name, kind, preset)
    said = {key: value for key, value in {**given, "seed": run.options.seed}.items() if value is not None}
    if said.get("epochs", recipe.epochs) <= recipe.warmup_epochs:
        said["warmup_epochs"] = 0
    return replace(recipe, **said)


def _from_scratch(run: "Run") -> None:
    """Baselines begin with random weights unless a checkpoint was given; on text, with the encoder that is there."""
    from ptq.tasks.text import TEXT_TASKS

    if run.options.weights is None and run.options.task not in TEXT_TASKS:
        run.options = replace(run.options, weights="random")
        say, run.say = run.say, lambda message: None  # that such a network is right by chance is known here
        _ = run.task
        run.say = say


def _task(run: "Run", test_images: int | None) -> "Task":
    """The task in the form that is trained, measured on the first so many images."""
    from ptq.batches import limited
    from ptq.training.text import with_one_input

    task = with_one_input(run.task)
    return replace(task, evaluation=limited(task.evaluation, test_images))


def _show(screen: Screen, folder: Path, baseline: Any) -> None:
    low, high = baseline.interval
    screen.say(
        f"{baseline.metric} {baseline.score:.2f} ({low:.1f} to {high:.1f}, n = {baseline.n})"
        f" after {baseline.seconds:.0f} s of training"
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
def float_(
    run: "Run",
    screen: Screen,
    preset: Preset = None,
    epochs: Epochs = None,
    learning_rate: Rate = None,
    images: Images = None,
    test_images: TestImages = None,
    name: Name = None,
) -> None:
    """Train the network from random weights, or from --weights."""
    from ptq.training.baselines import float_baseline

    _from_scratch(run)
    folder = run.folder / "baselines" / (name or "float")
    recipe = _recipe(run, "float", preset, epochs=epochs, learning_rate=learning_rate, images=images)
    baseline, _ = float_baseline(_task(run, test_images), recipe, folder, progress=screen.progress)
    _show(screen, folder, baseline)


@_training
def qat(
    run: "Run",
    screen: Screen,
    bits: Annotated[str, typer.Option(help="W4A4, w8a8 …")] = "W4A4",
    steps: Annotated[str, typer.Option(help="learned (LSQ) or observed step sizes.")] = "learned",
    keep_batchnorm: Annotated[bool, typer.Option("--keep-batchnorm", help="Don't fold BatchNorm first.")] = False,
    freeze_after: Annotated[int | None, typer.Option(help="Freeze kept BatchNorms after so many epochs.")] = None,
    use_smoothed: Annotated[bool, typer.Option("--smooth/--no-smooth", help="Start from the smoothed model.")] = True,
    preset: Preset = None,
    epochs: Epochs = None,
    learning_rate: Rate = None,
    images: Images = None,
    test_images: TestImages = None,
    name: Name = None,
) -> None:
    """Train with quantization in the loop, from the float or smoothed network of this folder."""
    from ptq.quantization import Bits, Scheme
    from ptq.training.baselines import qat_baseline
    from ptq.training.text import with_one_input

    folder = run.folder / "baselines" / (name or f"qat-{bits}")
    recipe = _recipe(run, "qat", preset, epochs=epochs, learning_rate=learning_rate, images=images)
    smoothed = run.smoothed() if use_smoothed else None
    source, calibration = (smoothed.model, smoothed.calibration) if smoothed else (run.task.model, run.calibration())
    scheme = Scheme(bits=Bits.parse(bits), fold_batchnorm=not keep_batchnorm)
    baseline, _ = qat_baseline(
        _task(run, test_images),
        with_one_input(replace(run.task, model=source)).model,
        calibration,
        scheme,
        recipe,
        folder,
        steps=steps,
        freeze_after=freeze_after,
        progress=screen.progress,
    )
    _show(screen, folder, baseline)


@_training
def pipeline(
    run: "Run",
    screen: Screen,
    stages: Annotated[int, typer.Option(help="Processes, one for each stage.")] = 2,
    split: Annotated[list[str] | None, typer.Option(help="Cut before this module; balanced if not said.")] = None,
    activations: Annotated[str | None, typer.Option(help="Number format of what goes forward.")] = None,
    gradients: Annotated[str | None, typer.Option(help="Number format of what comes back.")] = None,
    schedule: Annotated[str, typer.Option(help="gpipe or 1f1b.")] = "gpipe",
    record_every: Annotated[int | None, typer.Option(help="Record distortions every so many steps.")] = None,
    micro_batches: MicroBatches = 4,
    preset: Preset = None,
    epochs: Epochs = None,
    learning_rate: Rate = None,
    images: Images = None,
    test_images: TestImages = None,
    name: Name = None,
) -> None:
    """Train in stages, one process each, with what crosses between them compressed."""
    from ptq.training.baselines import pipeline_baseline

    _from_scratch(run)
    folder = run.folder / "baselines" / (name or "pipeline")
    recipe = _recipe(
        run, "pipeline", preset, epochs=epochs, learning_rate=learning_rate, images=images, micro_batches=micro_batches
    )
    baseline, _ = pipeline_baseline(
        _task(run, test_images),
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
    ranks: Annotated[int, typer.Option(help="Processes, one for each replica.")] = 2,
    gradients: Annotated[str | None, typer.Option(help="Number format, fp16, bf16 or powersgd:rank=N.")] = None,
    error_feedback: Annotated[bool, typer.Option("--error-feedback", help="Add what was lost to the next.")] = False,
    record_every: Annotated[int | None, typer.Option(help="Record distortions every so many steps.")] = None,
    preset: Preset = None,
    epochs: Epochs = None,
    learning_rate: Rate = None,
    images: Images = None,
    test_images: TestImages = None,
    name: Name = None,
) -> None:
    """Train replicas, one process each, with the gradients between them compressed."""
    from ptq.training.baselines import ddp_baseline
    from ptq.training.gradients import GradientCompression

    _from_scratch(run)
    folder = run.folder / "baselines" / (name or "ddp")
    recipe = _recipe(run, "ddp", preset, epochs=epochs, learning_rate=learning_rate, images=images)
    compression = GradientCompression(form=gradients, error_feedback=error_feedback, record_every=record_every)
    task = _task(run, test_images)
    baseline, _ = ddp_baseline(task, recipe, folder, compression, ranks=ranks, progress=screen.progress)
    _show(screen, folder, baseline)
