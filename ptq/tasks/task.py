"""What a task is: a network, the data to calibrate it on and the data to measure it on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ptq.batches import Batches
from ptq.errors import InputError
from ptq.evaluation.metrics import checked_metric


@dataclass(frozen=True, kw_only=True)
class Normalization:
    """How raw pixels become the network's input: ``(pixel / peak - mean) / std`` at ``image_size`` x ``image_size``."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_size: int
    peak: float = 255.0  # the raw value of white

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise InputError(f"normalization has {len(self.mean)} means and {len(self.std)} stds: give one per channel")
        if self.image_size < 1:
            raise InputError(f"image size {self.image_size}: give a positive number of pixels")

    @property
    def channels(self) -> int:
        return len(self.mean)


IMAGENET = Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), image_size=224)
GRAY = Normalization(mean=(0.5,), std=(0.5,), image_size=224)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What there is to quantize."""

    name: str
    model: nn.Module  # float, in eval mode
    calibration: Batches  # can be iterated again; labels may be there and are ignored
    evaluation: Batches  # can be iterated again; (inputs, labels)
    labels: tuple[str, ...] | None = None  # the names of the classes
    normalization: Normalization | None = None
    notes: tuple[str, ...] = ()  # what the user should be told
    metric: str = "top1"  # what it is judged by, one of ptq.evaluation.metrics.METRICS

    def __post_init__(self) -> None:
        checked_metric(self.metric)
