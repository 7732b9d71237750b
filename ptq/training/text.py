"""Text classifiers in the form that the training loop and pipelines take: one tensor in, logits out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ptq.batches import Batch
from ptq.errors import InputError
from ptq.tasks import Task
from ptq.tasks.encoders import PooledClassifier
from ptq.tasks.text import TextBatches
from ptq.training.samples import TensorSamples


class Sentences(nn.Module):
    """A BERT or RoBERTa classifier that takes ``[N, columns, tokens]``: token ids, mask and, if it has them, types.

    It holds the modules of the network that it is made of under their own names, so that the state dicts of both are
    the same. Its calls are written out layer by layer, so that it can be cut between any two of them; the mask of each
    layer is made from the integers that came in, which cross a cut as they are.
    """

    def __init__(self, network: nn.Module, columns: tuple[str, ...]) -> None:
        super().__init__()
        for name, child in network.named_children():
            self.add_module(name, child)
        self.columns = columns
        self.body = _name_of_body(network)
        body = network.get_submodule(self.body)
        self.pooled = isinstance(network, PooledClassifier)
        self.has_pooler = getattr(body, "pooler", None) is not None
        layers = cast(nn.ModuleList, body.get_submodule("encoder.layer"))
        width = next(layers[0].parameters()).shape[-1]
        with torch.no_grad():
            answer = layers[0](torch.zeros(1, 2, width))
        self._in_tuples = isinstance(answer, tuple)  # up to transformers 4
        # What torch.fx takes as one call: their insides depend on more than it can follow.
        self.called_as_one = {f"{self.body}.embeddings", f"{self.body}.pooler", "classifier"}
        self.called_as_one |= {f"{self.body}.encoder.layer.{number}" for number in range(len(layers))}

    def _column(self, packed: Tensor, name: str) -> Tensor:
        return packed[:, self.columns.index(name)]

    def _mask(self, packed: Tensor) -> Tensor:
        """What is added to the attention scores: 0 for tokens and the least number for padding, [N, 1, 1, tokens]."""
        mask = self._column(packed, "attention_mask")[:, None, None, :]
        return (1 - mask).to(torch.float32) * torch.finfo(torch.float32).min

    def forward(self, packed: Tensor) -> Tensor:
        body = cast(Any, self.get_submodule(self.body))
        types = {"token_type_ids": self._column(packed, "token_type_ids")} if "token_type_ids" in self.columns else {}
        hidden = body.embeddings(input_ids=self._column(packed, "input_ids"), **types)
        for layer in body.encoder.layer:
            hidden = layer(hidden, self._mask(packed))
            hidden = hidden[0] if self._in_tuples else hidden
        classifier = cast(Any, self.classifier)
        if self.pooled:
            mask = self._column(packed, "attention_mask").unsqueeze(-1).to(torch.float32)
            return cast(Tensor, classifier((hidden * mask).sum(1) / mask.sum(1)))
        if self.has_pooler:
            return cast(Tensor, classifier(cast(Any, self.dropout)(body.pooler(hidden))))
        return cast(Tensor, classifier(hidden))


def _name_of_body(network: nn.Module) -> str:
    """The encoder inside a classifier: a child with ``embeddings`` and ``encoder.layer``."""
    for name, child in network.named_children():
        inner = getattr(child, "encoder", None)
        if hasattr(child, "embeddings") and isinstance(getattr(inner, "layer", None), nn.ModuleList):
            return name
    raise InputError(f"{type(network).__name__} isn't built as BERT or RoBERTa: only these are trained on text")


class PackedBatches:
    """Batches ``([N, columns, tokens], labels)``, each padded to its longest; ``tokens`` leaves out longer texts."""

    def __init__(self, source: TextBatches, tokens: int | None = None) -> None:
        self.names = tuple(source.columns)
        self.batch_size = source.batch_size
        lengths = torch.tensor([len(row) for row in source.columns["input_ids"]])
        kept = torch.arange(len(lengths)) if tokens is None else (lengths <= tokens).nonzero().flatten()
        if not len(kept):
            raise InputError(f"no text has at most {tokens} tokens, the shortest has {lengths.min()}: give more")
        self.labels = source.labels[kept]
        self._rows = {name: [rows[place] for place in kept.tolist()] for name, rows in source.columns.items()}
        self._padding, self._side = source._padding, source._side

    def __len__(self) -> int:
        return math.ceil(len(self.labels) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.labels), self.batch_size):
            part = slice(start, start + self.batch_size)
            yield self._packed(part), self.labels[part]

    def samples(self) -> TensorSamples:
        """All texts, padded to the longest of them: the stages of a pipeline agree on one shape."""
        return TensorSamples(self._packed(slice(None)), self.labels)

    def _packed(self, part: slice) -> Tensor:
        padded = [pad_sequence(rows[part], True, self._padding[name], self._side) for name, rows in self._rows.items()]
        return torch.stack(padded, dim=1)  # [N, columns, tokens]


def with_one_input(task: Task, tokens: int | None = None) -> Task:
    """A task on text in that form, trained on texts of at most so many tokens; any other as it is."""
    if not isinstance(task.calibration, TextBatches) or not isinstance(task.evaluation, TextBatches):
        return task
    packed = PackedBatches(task.calibration, tokens)
    return replace(
        task,
        model=Sentences(task.model, packed.names).eval(),
        calibration=packed,
        evaluation=PackedBatches(task.evaluation),
    )
