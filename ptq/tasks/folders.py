"""``--data imagefolder:DIR``: pictures in one folder per class."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptq.errors import InputError
from ptq.tasks.task import Normalization
from ptq.vision import torchvision

RESIZE = 256 / 224  # the short side before the crop, in image sizes: ImageNet's usual evaluation
CALIBRATION_EVERY = 5  # of a folder without a split, every fifth image calibrates
EVALUATION_FOLDERS = ("val", "test")
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

Sample = tuple[Path, int]


class FolderBatches:
    """Batches ``(float32 [N, C, size, size], int64 [N])`` of image files, opened as they are needed."""

    def __init__(self, samples: list[Sample], normalization: Normalization, batch_size: int) -> None:
        transforms = torchvision("transforms")
        self.samples = samples
        self.batch_size = batch_size
        self._mode = "L" if normalization.channels == 1 else "RGB"
        self._transform = transforms.Compose(
            [
                transforms.Resize(round(normalization.image_size * RESIZE)),
                transforms.CenterCrop(normalization.image_size),
                transforms.ToTensor(),
                transforms.Normalize(normalization.mean, normalization.std),
            ]
        )

    def __len__(self) -> int:
        return math.ceil(len(self.samples) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.samples), self.batch_size):
            part = self.samples[start : start + self.batch_size]
            yield torch.stack([self._read(path) for path, _ in part]), torch.tensor([label for _, label in part])

    def _read(self, path: Path) -> Tensor:
        from PIL import Image

        try:
            with Image.open(path) as image:
                pixels: Tensor = self._transform(image.convert(self._mode))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # what Pillow's readers raise
            raise InputError(f"{path} can't be read as an image: repair or remove it") from error
        return pixels


def image_folder(
    root: Path, normalization: Normalization, batch_size: int
) -> tuple[FolderBatches, FolderBatches, tuple[str, ...]]:
    """Calibration, evaluation and the names of the classes: of train/ and val/, or of one folder split in a fixed way.

    Images of the classes alternate, so that the first few batches see every class.
    """
    if not root.is_dir():
        raise InputError(f"--data imagefolder:{root}: no such folder")
    evaluation_root = next((root / name for name in EVALUATION_FOLDERS if (root / name).is_dir()), None)
    if (root / "train").is_dir() and evaluation_root is not None:
        classes, calibration = _scan(root / "train")
        evaluation_classes, evaluation = _scan(evaluation_root)
        if classes != evaluation_classes:
            odd = sorted(set(classes) ^ set(evaluation_classes))
            raise InputError(
                f"{root / 'train'} has {len(classes)} classes and {evaluation_root} {len(evaluation_classes)}:"
                f" give both the same folders ({odd[0]} is in one alone)"
            )
    else:
        classes, samples = _scan(root)
        calibration = samples[::CALIBRATION_EVERY]
        evaluation = [sample for index, sample in enumerate(samples) if index % CALIBRATION_EVERY]
        if not evaluation:
            raise InputError(f"--data imagefolder:{root}: one image can't be split; give at least two")
    return (
        FolderBatches(_alternating(calibration), normalization, batch_size),
        FolderBatches(_alternating(evaluation), normalization, batch_size),
        classes,
    )


def _scan(root: Path) -> tuple[tuple[str, ...], list[Sample]]:
    """The classes (folders by name) and their image files, in the order of their names."""
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    samples = [
        (path, label)
        for label, folder in enumerate(folders)
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    ]
    if not samples:
        raise InputError(f"--data imagefolder:{root}: no images; give one folder per class with image files in it")
    return tuple(folder.name for folder in folders), samples


def _alternating(samples: list[Sample]) -> list[Sample]:
    by_class: defaultdict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_class[sample[1]].append(sample)
    rounds: Any = zip_longest(*by_class.values())
    return [sample for sample in chain.from_iterable(rounds) if sample is not None]
