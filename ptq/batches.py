"""What a batch is: a tensor, a tuple whose last element holds the labels, or a dict of keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ptq.errors import InputError

Batch: TypeAlias = Any  # a Tensor, a tuple or list (inputs…, labels), or a mapping
Batches: TypeAlias = Iterable[Batch]

LABEL_KEYS = ("labels", "label")


@dataclass(frozen=True)
class Call:
    """One call of a model: ``model(*args, **kwargs)``, and the labels of its samples if there are any."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor | None

    @property
    def samples(self) -> int:
        """How many samples the batch holds: the length of its first tensor."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor) and value.dim():
                return len(value)
        return 1

    def first(self, samples: int) -> Call:
        """The first samples of the batch."""
        return self._between(0, samples)

    def split(self, size: int) -> Iterator[Call]:
        """The batch in parts of at most ``size`` samples."""
        for start in range(0, self.samples, size):
            yield self._between(start, start + size)

    def _between(self, start: int, stop: int) -> Call:
        return self.mapped(lambda value: value[start:stop] if value.dim() else value)

    def double(self) -> Call:
        """The batch in float64."""
        return self.mapped(lambda value: value.double() if value.is_floating_point() else value)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Call:
        """The batch with each of its tensors changed, in the order of the arguments."""

        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else value

        args = tuple(changed(value) for value in self.args)
        return Call(args, {key: changed(value) for key, value in self.kwargs.items()}, changed(self.labels))

    def run(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)

    def logits(self, model: nn.Module) -> Tensor:
        """The model's output as one tensor, also out of ``.logits``, a dict or a tuple."""
        output = self.run(model)
        if isinstance(output, Mapping):
            output = output.get("logits", next(iter(output.values())))
        elif hasattr(output, "logits"):
            output = output.logits
        elif isinstance(output, (tuple, list)):
            output = output[0]
        if not isinstance(output, Tensor):
            raise InputError(f"the model returned {type(output).__name__}: a tensor of logits is needed to evaluate it")
        return output


def as_call(batch: Batch, device: torch.device | None = None) -> Call:
    """Read a batch, moved to ``device``.

    >>> as_call((torch.zeros(2, 3), torch.tensor([0, 1]))).labels
    tensor([0, 1])
    """
    if isinstance(batch, Tensor):
        return Call((_move(batch, device),), {}, None)
    if isinstance(batch, Mapping):
        labels = next((batch[key] for key in LABEL_KEYS if key in batch), None)
        kwargs = {key: _move(value, device) for key, value in batch.items() if key not in LABEL_KEYS}
        return Call((), kwargs, labels)
    if isinstance(batch, (tuple, list)) and batch:
        *inputs, last = batch
        if not inputs:
            return Call((_move(last, device),), {}, None)
        labels = torch.as_tensor(last) if last is not None else None
        return Call(tuple(_move(value, device) for value in inputs), {}, labels)
    raise InputError(f"a batch is {type(batch).__name__}: give a tensor, a tuple (inputs, labels) or a dict")


def calls(batches: Batches, model: nn.Module, limit: int | None = None) -> Iterator[Call]:
    """The first ``limit`` batches, on the device of the model."""
    device = device_of(model)
    for batch in islice(batches, limit):
        yield as_call(batch, device)


@dataclass(frozen=True)
class _Limited:
    batches: Batches
    samples: int

    def __iter__(self) -> Iterator[Batch]:
        left = self.samples
        for batch in self.batches:
            size = as_call(batch).samples
            yield batch if size <= left else _first(batch, left)
            left -= size
            if left <= 0:
                return


def limited(batches: Batches, samples: int | None) -> Batches:
    """The first so many samples, or all of them."""
    if samples is not None and samples < 1:
        raise InputError(f"{samples} images: at least one is needed")
    return batches if samples is None else _Limited(batches, samples)


def _first(batch: Batch, samples: int) -> Batch:
    if isinstance(batch, Mapping):
        return {key: _first(value, samples) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(_first(value, samples) for value in batch)
    return batch[:samples] if isinstance(batch, Tensor) and batch.dim() else batch


def regrouped(batches: Batches, size: int) -> Iterator[Batch]:
    """Neighbours joined into batches of at most ``size`` samples, where they look alike; larger ones as they are."""
    group: list[Batch] = []
    held = 0
    for batch in batches:
        samples = as_call(batch).samples
        if group and (held + samples > size or _look(batch, samples) != _look(group[-1], as_call(group[-1]).samples)):
            yield _joined(group)
            group, held = [], 0
        group.append(batch)
        held += samples
    if group:
        yield _joined(group)


def _look(batch: Batch, samples: int) -> Any:
    """What has to be equal in batches that are joined. A tensor without an entry for each sample equals no other."""
    if isinstance(batch, Mapping):
        return {key: _look(value, samples) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [_look(value, samples) for value in batch]
    if isinstance(batch, Tensor) and batch.dim():
        return batch.shape[1:] if len(batch) == samples else object()
    return repr(batch)


def _joined(group: Sequence[Batch]) -> Batch:
    head = group[0]
    if len(group) == 1:
        return head
    if isinstance(head, Mapping):
        return {key: _joined([part[key] for part in group]) for key in head}
    if isinstance(head, (tuple, list)):
        return tuple(_joined(values) for values in zip(*group, strict=True))
    return torch.cat(list(group)) if isinstance(head, Tensor) and head.dim() else head


def device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in chain(model.parameters(), model.buffers())), torch.device("cpu"))


def _move(value: Any, device: torch.device | None) -> Any:
    return value.to(device) if isinstance(value, Tensor) and device is not None else value
