"""Data-parallel training: one process a replica, with the gradients between them compressed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ptq.batches import Batches
from ptq.errors import InputError
from ptq.training.gradients import GradientCompression, attach, replicated
from ptq.training.loop import Engine, History, train
from ptq.training.pipeline import gathered, history_from, refuse_pruned_embeddings, returned
from ptq.training.processes import device_of_rank, run_ranks
from ptq.training.recipe import Recipe
from ptq.training.record import Recorder
from ptq.training.samples import Samples


class ReplicaEngine(Engine):
    """One replica: every ``world``-th sample of each batch is its own."""

    kind = "ddp"

    def __init__(
        self, rank: int, model: nn.Module, recipe: Recipe, compression: GradientCompression, folder: Path | None = None
    ) -> None:
        self.world = dist.get_world_size()
        if recipe.batch_size % (self.world * recipe.micro_batches):
            raise InputError(
                f"batch_size = {recipe.batch_size} can't be shared by {self.world} replicas with"
                f" {recipe.micro_batches} micro-batches each: change it"
            )
        super().__init__(model.to(device_of_rank(rank)), recipe)
        self.rank, self.compression = rank, compression
        self._ddp = replicated(self.model)
        self._recorder = None
        if compression.record_every and folder is not None:
            self._recorder = Recorder(folder / f"gradients-{rank}.jsonl", compression.record_every)
        self.attached = attach(self._ddp, compression, recipe.seed, self._recorder)
        self._counted, self._statistics, self._started = 0, 0, False

    def settings(self) -> dict[str, Any]:
        compression = self.compression
        return {
            "ranks": self.world,
            "gradients": compression.form,
            "error_feedback": compression.error_feedback,
            "normalised": compression.normalised,
            "updates": [*compression.updates.at, compression.updates.every],
        }

    def gradients(self, inputs: Tensor, labels: Tensor, step: int) -> float | None:
        if self._recorder is not None and not self._started:
            self._recorder.forget_from(step)
        self._started = True
        if self.attached.quantized is not None:
            self.attached.quantized.step = step
        inputs, labels = inputs[self.rank :: self.world], labels[self.rank :: self.world]
        total, parts = 0.0, self.recipe.micro_batches
        for part, (some, of_some) in enumerate(zip(inputs.chunk(parts), labels.chunk(parts), strict=True)):
            with nullcontext() if part == parts - 1 else self._ddp.no_sync():
                loss = self._loss(self._ddp(some), of_some) / parts
                loss.backward()
            total += float(loss.detach())
        return total

    def measurements(self, steps: int) -> dict[str, Any]:
        """Payload bytes that all replicas send in a step, and each of them."""
        now, learned = self.attached.bytes_so_far(), 0
        if self.attached.quantized is not None:
            learned = self.attached.quantized.statistics_bytes
        sent, statistics = (now - self._counted) / steps, (learned - self._statistics) / steps
        self._counted, self._statistics = now, learned
        own = {"payload_bytes_per_rank_per_step": sent} if self.rank == 0 else {}
        return {"payload_bytes_per_step": sent, "statistics_bytes_per_step": statistics, **own}

    def extra_state(self) -> dict[str, Any]:
        return self.attached.quantized.state() if self.attached.quantized is not None else {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        if self.attached.quantized is not None:
            self.attached.quantized.load_state(state)

    def collect(self, report: dict[str, Any]) -> list[dict[str, Any]] | None:
        # BatchNorm's statistics are each replica's own until the next forward pass; the first one's count.
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)
        if self.rank > 0:  # the parameters are the first replica's, bit for bit
            report = {key: value for key, value in report.items() if key not in ("model", "optimizer")}
        return gathered(report, self.rank)

    def whole_model(self, reports: Sequence[dict[str, Any]]) -> nn.Module:
        return self.model


def train_ddp(
    model: nn.Module,
    samples: Samples,
    recipe: Recipe,
    compression: GradientCompression | None = None,
    *,
    ranks: int = 2,
    folder: str | Path | None = None,
    evaluation: Batches | None = None,
    metric: str = "top1",
    stop_after: int | None = None,
    threads: int = 1,
    progress: bool = False,
) -> History:
    """Train replicas of the model, one process each, started here unless torchrun did."""
    options = {"folder": folder, "evaluation": evaluation, "metric": metric, "stop_after": stop_after}
    options["progress"] = progress
    compression = compression or GradientCompression()
    if ranks < 1:
        raise InputError(f"--ranks {ranks}: give at least 1")
    if not compression.is_built_in:
        refuse_pruned_embeddings("gradients", model, compression.form)
    # A copy: the tensors that processes are given lie in memory that all of them see.
    given = (copy.deepcopy(model), samples, recipe, compression, options)
    return history_from(run_ranks(_rank, given, ranks, threads=threads)[0], model)


def _rank(
    rank: int,
    model: nn.Module,
    samples: Samples,
    recipe: Recipe,
    compression: GradientCompression,
    options: dict[str, Any],
) -> dict[str, Any]:
    # 1 × 1 convolutions give their gradients in another layout than DDP would like, which costs a copy.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    folder = Path(options["folder"]) if options["folder"] is not None else None
    engine = ReplicaEngine(rank, copy.deepcopy(model), recipe, compression, folder)
    return returned(train(engine, samples, **options))
