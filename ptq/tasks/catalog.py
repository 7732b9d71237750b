"""From names to tasks: the built-in ones, and those made of ``--model``, ``--weights`` and ``--data``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from ptq.batches import Batches
from ptq.errors import InputError
from ptq.tasks import digits, encoders, glue, models, references, sources
from ptq.tasks.checkpoints import load_weights
from ptq.tasks.models import LoadedModel, build, load_model
from ptq.tasks.networks.cifar_resnet import resnet20, resnet56
from ptq.tasks.networks.digits import DigitsNet
from ptq.tasks.networks.mobilenet import cifar10_mobilenetv2
from ptq.tasks.sources import LoadedData, Request, load_data
from ptq.tasks.task import GRAY, IMAGENET, Normalization, Task
from ptq.tasks.text import TEXT_TASKS, text_task


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """A row of the table of built-in tasks; ``weights`` and ``data`` are None where the user brings them."""

    network: Callable[[], nn.Module]
    normalization: Normalization
    labels: tuple[str, ...]
    batch_size: int
    weights: Path | None = None
    data: Callable[[Normalization, int], tuple[Batches, Batches]] | None = None
    data_forms: str = sources.FORMS


CIFAR10_LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _cifar10(network: Callable[[], nn.Module]) -> BuiltIn:
    return BuiltIn(
        network=network,
        normalization=replace(IMAGENET, image_size=32),
        labels=CIFAR10_LABELS,
        batch_size=64,
        data_forms="npz:FILE or cifar10:DIR",
    )


BUILT_IN: dict[str, BuiltIn] = {
    "digits": BuiltIn(
        network=DigitsNet,
        normalization=digits.NORMALIZATION,
        labels=digits.LABELS,
        batch_size=32,
        weights=digits.WEIGHTS,
        data=digits.digits,
    ),
    "cifar10-resnet20": _cifar10(resnet20),
    "cifar10-resnet56": _cifar10(resnet56),
    "cifar10-mobilenetv2": _cifar10(cifar10_mobilenetv2),
}
TASKS = (*BUILT_IN, *TEXT_TASKS)
DEFAULT = "digits"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``resolve`` but for the name."""

    model: str | None
    weights: str | None
    data: str | None
    batch_size: int | None
    image_size: int | None
    download: bool
    seed: int
    progress: bool

    def request(self, normalization: Normalization) -> Request:
        return Request(
            normalization=normalization,
            batch_size=self.batch_size,
            image_size=self.image_size,
            download=self.download,
        )


def resolve(
    name: str | None = None,
    *,
    model: str | None = None,
    weights: str | None = None,
    data: str | None = None,
    batch_size: int | None = None,
    image_size: int | None = None,
    download: bool = False,
    seed: int = 0,
    progress: bool = False,
) -> Task:
    """The task that the options describe; without any, the embedded one.

    ``resolve()``, ``resolve("cifar10-resnet20", weights="resnet20.safetensors", data="npz:cifar10.npz")``,
    ``resolve(model="torchvision:mobilenet_v2", weights="DEFAULT", data="imagefolder:photos")``,
    ``resolve("cola", data="glue:CoLA")``. ``progress`` shows bars where that takes a while.
    """
    for option, value in (("--batch-size", batch_size), ("--image-size", image_size)):
        if value is not None and value < 1:
            raise InputError(f"{option} {value}: give a positive number")
    options = Options(
        model=model,
        weights=weights,
        data=data,
        batch_size=batch_size,
        image_size=image_size,
        download=download,
        seed=seed,
        progress=progress,
    )
    if name in TEXT_TASKS:
        return _text(name, options)
    if name is not None and name not in BUILT_IN and not references.is_reference(name):
        raise InputError(
            f"no task {name!r}: give {', '.join(TASKS)} or package.module:factory{references.suggestion(name, TASKS)}"
        )
    _refuse_text(name, options)
    if name is None and model is not None:
        return _around_model(model, options)
    name = DEFAULT if name is None else name
    return _built_in(name, BUILT_IN[name], options) if name in BUILT_IN else _own(name, options)


def _around_model(specification: str, options: Options) -> Task:
    """A task named after its network."""
    if options.data is None:
        raise InputError(f"--model {specification} needs data: give --data {sources.FORMS}")
    loaded = load_model(specification, options.weights, options.seed)
    data = load_data(options.data, options.request(_normalization(loaded)))
    return Task(
        name=folder_name(specification),
        model=loaded.model,
        calibration=data.calibration,
        evaluation=data.evaluation,
        labels=data.labels or loaded.labels,
        normalization=data.normalization,
        notes=(*loaded.notes, *_class_notes(loaded.model, data)),
    )


def _built_in(name: str, row: BuiltIn, options: Options) -> Task:
    # the data comes first: whether it is there is the quickest thing to find out
    if options.data is None and row.data is None:
        raise InputError(f"{name} brings no data: give --data {row.data_forms}")
    weights = options.weights or (str(row.weights) if row.weights else None)
    if options.model is None and weights is None:
        raise InputError(f"{name} brings no weights: give --weights FILE, or --weights {models.RANDOM} to train it")
    if options.model is not None:
        loaded = load_model(options.model, options.weights, options.seed)
        normalization = loaded.normalization or row.normalization
    else:
        notes = (models.RANDOM_NOTE,) if weights == models.RANDOM else ()
        loaded = LoadedModel(model=build(row.network, weights, options.seed), notes=notes)
        normalization = row.normalization
    if options.data is not None:
        data = load_data(options.data, options.request(replace(normalization, image_size=row.normalization.image_size)))
    elif row.data is not None:
        normalization = replace(row.normalization, image_size=options.image_size or row.normalization.image_size)
        calibration, evaluation = row.data(normalization, options.batch_size or row.batch_size)
        data = LoadedData(calibration=calibration, evaluation=evaluation, normalization=normalization)
    return Task(
        name=name,
        model=loaded.model,
        calibration=data.calibration,
        evaluation=data.evaluation,
        labels=data.labels or row.labels,
        normalization=data.normalization,
        notes=(*loaded.notes, *_class_notes(loaded.model, data)),
    )


def _text(name: str, options: Options) -> Task:
    if options.image_size is not None or options.download:
        option = "--download" if options.download else f"--image-size {options.image_size}"
        raise InputError(f"{option}: {name} is a task on sentences from a folder: leave it out")
    return text_task(
        name,
        model=options.model,
        weights=options.weights,
        data=options.data,
        batch_size=options.batch_size,
        seed=options.seed,
        progress=options.progress,
    )


def _refuse_text(name: str | None, options: Options) -> None:
    """Sentences and their models belong to the tasks on sentences."""
    for option, value, prefix in (("--model", options.model, encoders.PREFIX), ("--data", options.data, glue.PREFIX)):
        if value is not None and value.startswith(prefix):
            wrong = "needs a task" if name is None else f"doesn't go with --task {name}"
            raise InputError(f"{option} {value} {wrong}: give --task {' or '.join(TEXT_TASKS)}")


def _own(reference: str, options: Options) -> Task:
    """The user's own Task, with the parts that the options replace."""
    factory = references.load(reference, f"--task {', '.join(TASKS)} or package.module:factory")
    task = references.call(reference, factory, "returns a ptq.tasks.Task")
    if not isinstance(task, Task):
        raise InputError(f"--task {reference} returned {type(task).__name__}: return a ptq.tasks.Task")
    task.model.eval()
    if options.model is not None:
        loaded = load_model(options.model, options.weights, options.seed)
        task = replace(task, model=loaded.model, notes=(*task.notes, *loaded.notes))
    elif options.weights is not None:
        load_weights(task.model, Path(options.weights))
    if options.data is not None:
        normalization = task.normalization or _normalization(LoadedModel(model=task.model))
        data = load_data(options.data, options.request(normalization))
        task = replace(
            task,
            calibration=data.calibration,
            evaluation=data.evaluation,
            labels=data.labels or task.labels,
            normalization=data.normalization or task.normalization,
        )
    return task


def folder_name(specification: str) -> str:
    """A name that is safe as a folder: ``torchvision:resnet18`` becomes ``torchvision-resnet18``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", specification).strip(".-")


def _normalization(loaded: LoadedModel) -> Normalization:
    """What is known about the network's input; gray images for a network that begins with one channel."""
    if loaded.normalization is not None:
        return loaded.normalization
    first = next((module for module in loaded.model.modules() if isinstance(module, nn.Conv2d)), None)
    return GRAY if first is not None and first.in_channels == 1 else IMAGENET


def _class_notes(model: nn.Module, data: LoadedData) -> tuple[str, ...]:
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
    if data.labels is None or not last or last[0].out_features == len(data.labels):
        return ()
    return (
        f"the network tells {last[0].out_features} classes apart and the data has {len(data.labels)}:"
        " the accuracy is right only if class i of the data is output i of the network",
    )
