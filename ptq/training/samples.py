"""Training data that can be read in any order: the samples behind the batches of a task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ptq.batches import Batches, as_call
from ptq.errors import InputError
from ptq.tasks.arrays import ArrayBatches
from ptq.training.recipe import Recipe, augmented, generator_for


@runtime_checkable
class HasSamples(Protocol):
    """Batches that know their samples."""

    def samples(self) -> Samples: ...


class Samples(Protocol):
    """Labelled samples by their number."""

    def __len__(self) -> int: ...

    def batch(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs ``[N, …]`` and the labels ``[N]`` of the samples with these numbers."""
        ...


@dataclass(frozen=True)
class TensorSamples:
    """Samples held as two tensors."""

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels):
            raise InputError(f"{len(self.inputs)} inputs and {len(self.labels)} labels: give one label per input")

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return self.inputs[chosen], self.labels[chosen]


@dataclass(frozen=True)
class ArraySamples:
    """Raw images, converted a batch at a time: 50,000 of CIFAR-10 take 150 MB this way and 600 as floats."""

    source: ArrayBatches

    def __len__(self) -> int:
        return len(self.source.images)

    def batch(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        places = chosen.numpy()
        images, labels = self.source.images[places], self.source.labels[places]
        return next(iter(ArrayBatches(images, labels, self.source.normalization, len(places))))


def samples_of(batches: Batches) -> Samples:
    """The samples behind a task's batches ``(inputs, labels)``."""
    if isinstance(batches, ArrayBatches):
        return ArraySamples(batches)
    if isinstance(batches, HasSamples):
        return batches.samples()
    inputs, labels = [], []
    for batch in batches:
        call = as_call(batch)
        if call.labels is None or len(call.args) != 1 or not isinstance(call.args[0], Tensor):
            raise InputError("training takes batches (inputs, labels) with one tensor of inputs: this is another kind")
        inputs.append(call.args[0])
        labels.append(call.labels)
    if not inputs:
        raise InputError("no batches to train on: give at least one")
    try:
        return TensorSamples(torch.cat(inputs), torch.cat(labels))
    except RuntimeError as error:
        raise InputError(f"the batches to train on differ in shape ({error}): make them equal") from error


def steps_in(samples: Samples, recipe: Recipe) -> int:
    """Batches of an epoch. The last, incomplete one is left out: BatchNorm suffers from few samples, and the order
    is new each epoch."""
    steps = min(len(samples), recipe.images or len(samples)) // recipe.batch_size
    if not steps:
        raise InputError(f"{len(samples)} samples don't fill a batch of {recipe.batch_size}: give a smaller batch size")
    return steps


def epoch_batches(samples: Samples, recipe: Recipe, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of one epoch: their order and augmentation depend on the seed and the epoch alone."""
    generator = generator_for(recipe.seed, 0, epoch)
    count = min(len(samples), recipe.images or len(samples))
    order = torch.randperm(count, generator=generator)
    for chosen in torch.split(order, recipe.batch_size)[: steps_in(samples, recipe)]:
        inputs, labels = samples.batch(chosen)
        yield augmented(inputs, recipe, generator), labels
