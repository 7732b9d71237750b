"""How a network is trained: a frozen recipe, and the named ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ptq.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """SGD with momentum; the learning rate rises linearly and falls as a cosine. Everything a run depends on."""

    epochs: int
    batch_size: int
    learning_rate: float
    warmup_epochs: float = 0.0
    momentum: float = 0.9
    weight_decay: float = 1e-4
    label_smoothing: float = 0.0
    micro_batches: int = 1  # parts of a batch that pass the network one after the other
    shift: int = 0  # images are moved by up to so many pixels, each way
    flip: bool = False  # every other image, at random, is mirrored
    images: int | None = None  # train on the first so many
    tokens: int | None = None  # of texts, on those of at most so many tokens
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "micro_batches"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} = {getattr(self, name)}: give at least 1")
        for name in ("learning_rate", "warmup_epochs", "momentum", "weight_decay", "shift", "seed"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InputError(f"{name} = {getattr(self, name)}: give 0 or more")
        if self.momentum >= 1:
            raise InputError(f"momentum = {self.momentum}: give less than 1")
        if not 0 <= self.label_smoothing < 1:
            raise InputError(f"label_smoothing = {self.label_smoothing}: choose from 0 to below 1")
        if self.warmup_epochs >= self.epochs:
            raise InputError(f"warmup_epochs = {self.warmup_epochs}: give less than the {self.epochs} epochs")
        if self.batch_size % self.micro_batches:
            raise InputError(
                f"batch_size = {self.batch_size} can't be cut into {self.micro_batches} equal micro-batches:"
                " change one of them"
            )
        if self.tokens is not None and self.tokens < 1:
            raise InputError(f"tokens = {self.tokens}: give at least 1")
        if self.images is not None and self.images < self.batch_size:
            raise InputError(f"images = {self.images}: give at least one batch of {self.batch_size}")

    def rate_factor(self, step: int, steps_per_epoch: int) -> float:
        """What the learning rate is multiplied by in a step, counted from 0, of T steps of which w warm up.

        ``(step + 1) / w`` while it warms up, then ``(1 + cos(π (step - w) / (T - w))) / 2``.
        """
        warmup, total = round(self.warmup_epochs * steps_per_epoch), self.epochs * steps_per_epoch
        if step < warmup:
            return (step + 1) / warmup
        return (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup)))) / 2

    def loss(self) -> nn.CrossEntropyLoss:
        return nn.CrossEntropyLoss(label_smoothing=self.label_smoothing)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Recipe:
        known = {field.name for field in fields(cls)}
        unknown = [name for name in content if name not in known]
        if unknown:
            raise InputError(f"recipe: no setting {unknown[0]!r}: the settings are {', '.join(sorted(known))}")
        return cls(**content)


PRESETS: dict[str, Recipe] = {
    # about a minute on one core
    "digits": Recipe(epochs=30, batch_size=64, learning_rate=0.1, warmup_epochs=3, shift=1),
    "digits-short": Recipe(epochs=5, batch_size=64, learning_rate=0.1, warmup_epochs=1, shift=1),
    # from a trained network on, for quantization-aware training
    "digits-qat": Recipe(epochs=5, batch_size=64, learning_rate=0.01, warmup_epochs=0.5, shift=1),
    # the published setting for MobileNetV2 on CIFAR-10
    "mobilenetv2-cifar10-published": Recipe(
        epochs=200, batch_size=1024, learning_rate=0.4, warmup_epochs=20, micro_batches=4, shift=4, flip=True
    ),
    # a fixed number of images, for a machine with two cores
    "cifar10-short": Recipe(
        epochs=5,
        batch_size=128,
        learning_rate=0.1,
        warmup_epochs=1,
        micro_batches=4,
        shift=4,
        flip=True,
        images=12_800,
    ),
    # from a network that was trained on other images on
    "cifar10-finetune": Recipe(
        epochs=1, batch_size=64, learning_rate=0.02, warmup_epochs=0.1, shift=4, flip=True, images=16_000
    ),
    # without BatchNorm, which is folded by then, ResNet-20 diverges at 0.01
    "cifar10-short-qat": Recipe(
        epochs=2, batch_size=128, learning_rate=0.001, warmup_epochs=0.5, shift=4, flip=True, images=12_800
    ),
    # a trained encoder with a classifier fitted to it, taught further on a fixed number of short texts
    "cola-short": Recipe(
        epochs=1, batch_size=16, learning_rate=0.002, warmup_epochs=0.1, micro_batches=4, images=2_400, tokens=24
    ),
    "cola-short-qat": Recipe(epochs=1, batch_size=16, learning_rate=0.001, warmup_epochs=0.1, images=800, tokens=24),
    "rte-short": Recipe(
        epochs=1, batch_size=16, learning_rate=0.002, warmup_epochs=0.1, micro_batches=4, images=800, tokens=64
    ),
    "rte-short-qat": Recipe(epochs=1, batch_size=16, learning_rate=0.001, warmup_epochs=0.1, images=400, tokens=64),
}
DEFAULTS = {
    "digits": "digits",
    "cifar10-mobilenetv2": "cifar10-short",
    "cifar10-resnet20": "cifar10-short",
    "cola": "cola-short",
    "rte": "rte-short",
}


def preset(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in PRESETS:
        raise InputError(f"no preset {name!r}: give {', '.join(PRESETS)}")
    return PRESETS[name]


def generator_for(*numbers: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator that depends on these numbers alone: on the seed, the epoch, the step, the rank …

    Random numbers that are tied to a place, not to what was drawn before, come out the same after an interruption
    and in whatever order a schedule runs.
    """
    seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
    return torch.Generator(device).manual_seed(seed)


def augmented(images: Tensor, recipe: Recipe, generator: torch.Generator) -> Tensor:
    """Each image moved by up to ``shift`` pixels, what comes in repeating the border, and perhaps mirrored."""
    if not recipe.shift and not recipe.flip:
        return images
    if images.dim() != 4:
        raise InputError(f"shift and flip move images [N, C, H, W], these are {list(images.shape)}: set them to 0")
    count, _, height, width = images.shape

    def positions(size: int) -> Tensor:
        moves = torch.randint(-recipe.shift, recipe.shift + 1, (count, 1), generator=generator)
        return (torch.arange(size) + moves).clamp(0, size - 1)  # [N, size]

    rows, columns = positions(height), positions(width)
    if recipe.flip:
        mirrored = torch.rand(count, 1, generator=generator) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    each = torch.arange(count)[:, None, None]
    return images[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
