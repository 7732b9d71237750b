"""The tasks on sentences: cola (is it grammatical?) and rte (does the first sentence imply the second?)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ptq.errors import InputError
from ptq.tasks import glue
from ptq.tasks.encoders import MINILM, PREFIX, TextModel, load_text_model
from ptq.tasks.glue import Examples, Layout
from ptq.tasks.heads import fit_head
from ptq.tasks.models import RANDOM, RANDOM_NOTE
from ptq.tasks.task import Task

DATA_FORM = "glue:DIR"
DEFAULT_MODEL = f"{PREFIX}{MINILM}"
BATCH_SIZE = 32
FIT_AT_MOST = 10_000  # examples that a missing classifier is fitted on: half a minute for MiniLM


@dataclass(frozen=True, kw_only=True)
class TextTask:
    """A row of the table of tasks on sentences."""

    layout: Layout
    metric: str


TEXT_TASKS: dict[str, TextTask] = {
    "cola": TextTask(layout=glue.COLA, metric="matthews"),
    "rte": TextTask(layout=glue.RTE, metric="top1"),
}


class TextBatches:
    """Batches ``{input_ids, attention_mask, …: int64 [N, longest], labels: int64 [N]}`` of examples, in their order."""

    def __init__(self, examples: Examples, source: TextModel, batch_size: int) -> None:
        tokens = source.tokenizer(
            *(list(column) for column in zip(*examples.texts, strict=True)),
            truncation=True,
            max_length=source.max_length,
            return_attention_mask=True,
            return_token_type_ids="token_type_ids" in source.inputs,
        )
        self.batch_size = batch_size
        self.columns = {name: [torch.tensor(row) for row in tokens[name]] for name in source.inputs}
        self.labels = torch.tensor(examples.labels)
        self._padding = {
            "input_ids": source.tokenizer.pad_token_id,
            "attention_mask": 0,
            "token_type_ids": source.tokenizer.pad_token_type_id,
        }
        self._side = source.tokenizer.padding_side

    def __len__(self) -> int:
        return math.ceil(len(self.labels) / self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for start in range(0, len(self.labels), self.batch_size):
            part = slice(start, start + self.batch_size)
            inputs = {
                name: pad_sequence(rows[part], True, self._padding[name], self._side)
                for name, rows in self.columns.items()
            }
            yield {**inputs, "labels": self.labels[part]}


def text_task(
    name: str,
    *,
    model: str | None = None,
    weights: str | None = None,
    data: str | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Task:
    """One of TEXT_TASKS, calibrated on train.tsv in a fixed random order and measured on dev.tsv."""
    row = TEXT_TASKS[name]
    if data is None or not data.startswith(glue.PREFIX):
        given = "brings no data" if data is None else f"doesn't read {data}"
        raise InputError(f"{name} {given}: give --data {DATA_FORM}, a folder with {glue.TRAIN} and {glue.DEV}")
    train, dev = glue.read_folder(data, row.layout)
    source = load_text_model(model or DEFAULT_MODEL, weights, len(row.layout.classes), seed)
    size = batch_size or BATCH_SIZE
    notes: tuple[str, ...] = ()
    if weights == RANDOM:
        notes = (RANDOM_NOTE,)
    elif weights is None and source.headless:
        notes = (_with_fitted_head(source, train, row.layout, progress),)
    return Task(
        name=name,
        model=source.model,
        calibration=TextBatches(_shuffled(train), source, size),
        evaluation=TextBatches(dev, source, size),
        labels=row.layout.classes,
        notes=notes,
        metric=row.metric,
    )


def _with_fitted_head(source: TextModel, train: Examples, layout: Layout, progress: bool) -> str:
    """Fit the classifier that the encoder lacks; returns what to say about it."""
    assert source.headless is not None
    missing = [name for label, name in enumerate(layout.classes) if label not in train.labels]
    if missing:
        raise InputError(
            f"{glue.TRAIN} has no example of {missing[0]}: a classifier can't be fitted; give some, or --weights FILE"
        )
    used = _shuffled(train, FIT_AT_MOST)
    by_length = used.at(sorted(range(len(used)), key=lambda place: sum(map(len, used.texts[place]))))  # little padding
    kept = fit_head(source.headless, TextBatches(by_length, source, BATCH_SIZE), source.description, progress=progress)
    return (
        f"the encoder has no classifier: one is fitted to its features of {len(used):,} of {len(train):,} examples in"
        f" {glue.TRAIN}" + (f" (kept in {kept})" if kept else "") + "; --weights FILE gives a trained one"
    )


def _shuffled(examples: Examples, at_most: int | None = None) -> Examples:
    """In a fixed random order: files are often sorted by where their sentences come from."""
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0)).tolist()
    return examples.at(order[:at_most])
