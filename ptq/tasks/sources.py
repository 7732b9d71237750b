"""``--data``: where the images to calibrate on and to measure on come from."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ptq.batches import Batch, Batches
from ptq.errors import InputError
from ptq.tasks import references
from ptq.tasks.arrays import ArrayBatches
from ptq.tasks.folders import image_folder
from ptq.tasks.task import Normalization
from ptq.vision import torchvision

FORMS = "npz:FILE, cifar10:DIR, imagefolder:DIR or package.module:factory"
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
CIFAR10_FOLDER = "cifar-10-batches-py"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the network and the command line say about the data to load."""

    normalization: Normalization
    batch_size: int | None = None
    image_size: int | None = None  # None: as the images are, or as the network wants it
    download: bool = False

    def sized(self, image_size: int) -> Normalization:
        """Pixels of 0 to 255 at the size asked for, else at ``image_size``."""
        return replace(self.normalization, image_size=self.image_size or image_size, peak=255.0)


@dataclass(frozen=True, kw_only=True)
class LoadedData:
    """Batches to calibrate on and to measure on, and what is known about them."""

    calibration: Batches
    evaluation: Batches
    labels: tuple[str, ...] | None = None
    normalization: Normalization | None = None


def load_data(specification: str, request: Request) -> LoadedData:
    """The data that ``--data`` names."""
    source, separator, place = specification.partition(":")
    if separator and place and source in _SOURCES:
        return _SOURCES[source](Path(place).expanduser(), request)
    if not references.is_reference(specification):
        raise InputError(f"--data {specification}: give {FORMS}{references.suggestion(source, _SOURCES)}")
    return _own(specification)


def _npz(path: Path, request: Request) -> LoadedData:
    """Arrays x_train, y_train, x_test, y_test: the images are uint8 [N, H, W, C] or [N, H, W]."""
    if not path.is_file():
        raise InputError(f"--data npz:{path}: no such file")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            missing = [name for name in ARRAYS if name not in archive]
            arrays = {} if missing else {name: archive[name] for name in ARRAYS}
    except (OSError, ValueError, EOFError, TypeError, MemoryError, zipfile.BadZipFile) as error:  # TypeError: bare .npy
        raise InputError(f"--data npz:{path} can't be read: save it with numpy.savez({', '.join(ARRAYS)})") from error
    if missing:
        raise InputError(f"--data npz:{path} has no {', '.join(missing)}: it needs {', '.join(ARRAYS)}")
    for name in ("x_train", "x_test"):
        if arrays[name].dtype != np.uint8 or arrays[name].ndim not in (3, 4):
            raise InputError(
                f"--data npz:{path}: {name} is {arrays[name].dtype} {list(arrays[name].shape)}:"
                " give uint8 [N, H, W, C] or [N, H, W]"
            )
    normalization = request.sized(arrays["x_train"].shape[1])
    batch_size = request.batch_size or 64
    try:
        return LoadedData(
            calibration=ArrayBatches(arrays["x_train"], arrays["y_train"], normalization, batch_size),
            evaluation=ArrayBatches(arrays["x_test"], arrays["y_test"], normalization, batch_size),
            normalization=normalization,
        )
    except InputError as error:
        raise InputError(f"--data npz:{path}: {error}") from error


def _cifar10(directory: Path, request: Request) -> LoadedData:
    """torchvision's layout: the folder that holds cifar-10-batches-py, or that folder itself."""
    root = directory.parent if directory.name == CIFAR10_FOLDER else directory
    datasets = torchvision("datasets")
    try:
        train, test = (datasets.CIFAR10(str(root), train=part, download=request.download) for part in (True, False))
    except (OSError, RuntimeError) as error:
        if request.download:
            raise InputError(
                f"--data cifar10:{directory}: downloading it failed ({references.one_line(error)})"
            ) from error
        raise InputError(
            f"--data cifar10:{directory}: no complete {CIFAR10_FOLDER} in it; --download fetches it"
        ) from error
    normalization = request.sized(train.data.shape[1])
    batch_size = request.batch_size or 64
    return LoadedData(
        calibration=ArrayBatches(train.data, np.array(train.targets), normalization, batch_size),
        evaluation=ArrayBatches(test.data, np.array(test.targets), normalization, batch_size),
        labels=tuple(train.classes),
        normalization=normalization,
    )


def _imagefolder(root: Path, request: Request) -> LoadedData:
    normalization = request.sized(request.normalization.image_size)
    calibration, evaluation, classes = image_folder(root, normalization, request.batch_size or 16)
    return LoadedData(calibration=calibration, evaluation=evaluation, labels=classes, normalization=normalization)


def _own(specification: str) -> LoadedData:
    """A pair (calibration, evaluation), one iterable for both, or an object with those two attributes."""
    factory = references.load(specification, f"--data {FORMS}")
    made = references.call(specification, factory, "returns a pair (calibration, evaluation)")
    if hasattr(made, "calibration") and hasattr(made, "evaluation"):
        calibration, evaluation = made.calibration, made.evaluation
    elif isinstance(made, tuple) and any(isinstance(part, Tensor) for part in made):
        raise InputError(f"--data {specification} returned one batch, not batches: return a list of them")
    elif isinstance(made, tuple) and len(made) == 2:
        calibration, evaluation = made
    elif isinstance(made, Iterator):
        calibration = evaluation = Repeated(specification, factory)
    else:
        calibration = evaluation = made
    for role, batches in (("calibration", calibration), ("evaluation", evaluation)):
        _check_batches(specification, role, batches)
    return LoadedData(
        calibration=calibration,
        evaluation=evaluation,
        labels=getattr(made, "labels", None),
        normalization=getattr(made, "normalization", None),
    )


class Repeated:
    """The batches of a generator function, which is called again for each iteration."""

    def __init__(self, specification: str, factory: Callable[[], Iterator[Batch]]) -> None:
        self._specification = specification
        self._factory = factory

    def __iter__(self) -> Iterator[Batch]:
        made: Iterator[Batch] = references.call(self._specification, self._factory, "returns batches")
        return made


def _check_batches(specification: str, role: str, batches: Any) -> None:
    remedy = "return a list, a DataLoader or another object that can be iterated again"
    if isinstance(batches, Iterator):
        raise InputError(f"--data {specification}: {role} can be iterated only once; {remedy}")
    if isinstance(batches, Tensor) or not hasattr(batches, "__iter__"):
        raise InputError(f"--data {specification}: {role} is {type(batches).__name__}, not batches; {remedy}")
    if not list(islice(iter(batches), 1)):
        raise InputError(f"--data {specification}: {role} has no batches; give at least one")


_SOURCES: dict[str, Callable[[Path, Request], LoadedData]] = {
    "npz": _npz,
    "cifar10": _cifar10,
    "imagefolder": _imagefolder,
}
