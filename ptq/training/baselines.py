"""A task trained in one of four ways into a folder of its own, with what came out of it in ``baseline.json``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ptq.calibration import Calibration
from ptq.errors import InputError
from ptq.evaluation import evaluate
from ptq.quantization import Quantized, Scheme
from ptq.storage import read_json, write_json
from ptq.tasks import Task
from ptq.training.gradients import GradientCompression
from ptq.training.loop import Engine, History, train
from ptq.training.pipeline import plan_pipeline, train_pipeline
from ptq.training.qat import train_qat
from ptq.training.recipe import DEFAULTS, Recipe, preset
from ptq.training.replicas import train_ddp
from ptq.training.samples import samples_of

KIND, SCHEMA = "baseline", 2
KINDS = ("float", "qat", "pipeline", "ddp")


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What a training was and what it gave. The score is in percent, with its 95 % interval over n samples."""

    training: str  # one of KINDS
    task: str
    metric: str
    score: float
    interval: tuple[float, float]
    n: int
    seconds: float  # of training, all epochs
    seconds_per_step: float  # of the last epoch
    images: int  # that were trained on, counted each time
    recipe: dict[str, Any]
    payload_bytes_per_step: float | None = None  # of the last epoch, all processes
    settings: dict[str, Any]  # formats, split, scheme …

    @property
    def samples_per_second(self) -> float:
        """That were trained on, over all epochs."""
        return self.images / self.seconds if self.seconds else 0.0

    def save(self, folder: Path) -> None:
        write_json(_file(folder), {"kind": KIND, "schema": SCHEMA, **asdict(self), "interval": list(self.interval)})

    @classmethod
    def load(cls, folder: Path) -> Baseline:
        content = read_json(_file(folder))
        if (content.pop("kind", None), content.pop("schema", None)) != (KIND, SCHEMA):
            raise InputError(f"{_file(folder)}: not a baseline of this version: train it again")
        return cls(**{**content, "interval": tuple(content["interval"])})


def baselines_in(folder: Path) -> dict[str, Baseline]:
    """The finished trainings under a folder, by the names of their own folders."""
    return {path.parent.name: Baseline.load(path.parent) for path in sorted(folder.glob(f"*/{_file(Path()).name}"))}


def _file(folder: Path) -> Path:
    return folder / "baseline.json"


def recipe_for(task: str, kind: str, name: str | None = None) -> Recipe:
    """The named preset, or the one that fits the task and the kind of training."""
    if name is not None:
        return preset(name)
    base = DEFAULTS.get(task)
    if base is None:
        raise InputError(
            f"{task} has no recipe of its own: give --preset, and --epochs, --batch, --learning-rate to change it"
        )
    return preset(f"{base}-qat" if kind == "qat" else base)


def float_baseline(
    task: Task, recipe: Recipe, folder: Path, *, stop_after: int | None = None, progress: bool = False
) -> tuple[Baseline, nn.Module]:
    """Train a copy of the task's network from the weights that it has."""
    history = train(
        Engine(copy.deepcopy(task.model), recipe),
        samples_of(task.calibration),
        folder=folder,
        evaluation=task.evaluation,
        metric=task.metric,
        stop_after=stop_after,
        progress=progress,
    )
    return _finished("float", task, recipe, history, folder, {})


def qat_baseline(
    task: Task,
    source: nn.Module,
    calibration: Calibration,
    scheme: Scheme,
    recipe: Recipe,
    folder: Path,
    *,
    steps: str = "learned",
    freeze_after: int | None = None,
    observer: str | None = None,
    stop_after: int | None = None,
    progress: bool = False,
) -> tuple[Baseline, Quantized]:
    """Train the source, the task's network as it is or smoothed, for the scheme."""
    quantized, history = train_qat(
        source,
        calibration,
        samples_of(task.calibration),
        recipe,
        scheme,
        steps=steps,
        freeze_after=freeze_after,
        observer=observer,
        folder=folder,
        evaluation=task.evaluation,
        metric=task.metric,
        stop_after=stop_after,
        progress=progress,
    )
    settings = {"scheme": scheme.to_json(), "steps": steps, "freeze_after": freeze_after}
    return _finished("qat", task, recipe, history, folder, settings)[0], quantized


def pipeline_baseline(
    task: Task,
    recipe: Recipe,
    folder: Path,
    *,
    stages: int = 2,
    split: Sequence[str] = (),
    activations: str | None = None,
    gradients: str | None = None,
    schedule: str = "gpipe",
    record_every: int | None = None,
    stop_after: int | None = None,
    progress: bool = False,
) -> tuple[Baseline, nn.Module]:
    """Train a copy of the task's network in stages, with what crosses between them compressed."""
    samples = samples_of(task.calibration)
    pipeline = plan_pipeline(
        task.model,
        samples,
        recipe,
        stages=stages,
        split=split,
        activations=activations,
        gradients=gradients,
        schedule=schedule,
        record_every=record_every,
        folder=folder,
    )
    history = train_pipeline(
        task.model,
        samples,
        recipe,
        pipeline,
        folder=folder,
        evaluation=task.evaluation,
        metric=task.metric,
        stop_after=stop_after,
        progress=progress,
    )
    settings = {"split": [cut.name for cut in pipeline.cuts], "schedule": schedule}
    return _finished(
        "pipeline", task, recipe, history, folder, {**settings, "activations": activations, "gradients": gradients}
    )


def ddp_baseline(
    task: Task,
    recipe: Recipe,
    folder: Path,
    compression: GradientCompression,
    *,
    ranks: int = 2,
    stop_after: int | None = None,
    progress: bool = False,
) -> tuple[Baseline, nn.Module]:
    """Train replicas of the task's network, with the gradients between them compressed."""
    history = train_ddp(
        task.model,
        samples_of(task.calibration),
        recipe,
        compression,
        ranks=ranks,
        folder=folder,
        evaluation=task.evaluation,
        metric=task.metric,
        stop_after=stop_after,
        progress=progress,
    )
    return _finished("ddp", task, recipe, history, folder, {"ranks": ranks, **asdict(compression)})


def _finished(
    training: str, task: Task, recipe: Recipe, history: History, folder: Path, settings: dict[str, Any]
) -> tuple[Baseline, nn.Module]:
    assert history.model is not None
    answers = evaluate(history.model, task.evaluation, metric=task.metric)
    last = history.epochs[-1]
    baseline = Baseline(
        training=training,
        task=task.name,
        metric=task.metric,
        score=answers.score(),
        interval=answers.score_interval(),
        n=answers.n,
        seconds=sum(line["seconds"] for line in history.epochs),
        seconds_per_step=last["seconds_per_step"],
        images=last["step"] * recipe.batch_size,
        recipe=recipe.to_json(),
        payload_bytes_per_step=last.get("payload_bytes_per_step"),
        settings=settings,
    )
    baseline.save(folder)
    return baseline, history.model
