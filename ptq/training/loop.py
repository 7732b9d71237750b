"""The one training loop; plain, quantization-aware, pipelined and data-parallel training plug into it as engines.

An engine says whose parameters a process optimises and how they get their gradients. The loop does the rest: order
of the data, learning rate, optimizer, measurements, checkpoints. A run that was interrupted goes on after its last
epoch and gives the same bits as one that wasn't.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ptq.batches import Batches, device_of
from ptq.errors import PtqError
from ptq.evaluation import evaluate
from ptq.interruption import units
from ptq.storage import fingerprint, write_tensors
from ptq.training.checkpoints import Folder, momentum_by_name, restore_momentum
from ptq.training.recipe import Recipe, generator_for
from ptq.training.samples import Samples, epoch_batches, steps_in


class DivergedError(PtqError):
    """A loss that is no number any more."""


class Engine:
    """One process training a whole network; what others do differently they override."""

    rank = 0
    kind = "float"
    saves_weights = True  # as a checkpoint that --weights takes

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model = model
        self.recipe = recipe
        self._loss = recipe.loss()

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What the optimizer gets."""
        return [{"params": [parameter for parameter in self.model.parameters() if parameter.requires_grad]}]

    def settings(self) -> dict[str, Any]:
        """What else a run depends on: a checkpoint made with other settings is refused."""
        return {}

    def begin_epoch(self, epoch: int) -> None:
        self.model.train()

    def gradients(self, inputs: Tensor, labels: Tensor, step: int) -> float | None:
        """Leave the mean gradient of the batch in the parameters; returns the loss where this process knows it."""
        total, parts = 0.0, self.recipe.micro_batches
        for some, of_some in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
            loss = self._loss(self.model(some), of_some)
            loss.backward()
            total += float(loss.detach())
        if parts > 1:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(parts)
        return total / parts

    def measurements(self, steps: int) -> dict[str, Any]:
        """What else to note of the epoch that ends, over its number of steps."""
        return {}

    def extra_state(self) -> dict[str, Any]:
        """What of this process has to be kept beside model and optimizer."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None: ...

    def collect(self, report: dict[str, Any]) -> list[dict[str, Any]] | None:
        """The reports of all processes, in the first one; None in the others."""
        return [report]

    def whole_model(self, reports: Sequence[dict[str, Any]]) -> nn.Module:
        """The network that is trained, with the state of all processes, in the first one."""
        return self.model


@dataclass
class History:
    """What came out of a run."""

    epochs: list[dict[str, Any]] = field(default_factory=list)  # the lines of metrics.jsonl
    model: nn.Module | None = None  # the trained network, in the first process

    @property
    def score(self) -> float | None:
        """The last epoch's score, in percent."""
        return self.epochs[-1].get("score") if self.epochs else None


def train(
    engine: Engine,
    samples: Samples,
    *,
    folder: str | Path | None = None,
    evaluation: Batches | None = None,
    metric: str = "top1",
    stop_after: int | None = None,
    on_step: Callable[[int], None] | None = None,
    progress: bool = False,
) -> History:
    """Train what the engine holds by its recipe, going on where ``folder`` left off.

    ``stop_after`` ends the run early after so many epochs, ``on_step`` is called after each step with its number.
    """
    recipe, model = engine.recipe, engine.model
    files = Folder(folder) if folder is not None else None
    steps = steps_in(samples, recipe)
    optimizer = torch.optim.SGD(
        engine.parameter_groups(),
        lr=recipe.learning_rate,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(recipe.rate_factor, steps_per_epoch=steps))
    torch.set_rng_state(generator_for(recipe.seed, 1, engine.rank).get_state())
    settings = {**recipe.to_json(), "kind": engine.kind, "samples": len(samples), **engine.settings()}
    history = History()
    done = _resume(engine, optimizer, schedule, files.load(settings) if files else None, history)
    if files and engine.rank == 0:
        files.start_metrics(history.epochs)

    device, last = device_of(model), min(recipe.epochs, stop_after or recipe.epochs)
    bar = tqdm(total=last * steps, initial=done * steps, unit="step", disable=not progress or engine.rank > 0)
    with bar, units("epoch") as epoch_finished:
        for epoch in range(done, last):
            started, losses = time.perf_counter(), []
            engine.begin_epoch(epoch)
            for step, (inputs, labels) in enumerate(epoch_batches(samples, recipe, epoch), start=epoch * steps):
                optimizer.zero_grad()
                loss = engine.gradients(inputs.to(device), labels.to(device), step)
                if loss is not None:
                    if not math.isfinite(loss):
                        raise DivergedError(f"step {step}: the loss is {loss}: try a lower learning rate")
                    losses.append(loss)
                optimizer.step()
                schedule.step()
                if on_step is not None:
                    on_step(step)
                bar.update()
            line = {"epoch": epoch + 1, "step": (epoch + 1) * steps, "learning_rate": schedule.get_last_lr()[0]}
            reports = engine.collect(_report(engine, optimizer, losses, steps, time.perf_counter() - started))
            if reports is None:
                continue
            line |= _summary(reports, recipe, steps)
            history.model = engine.whole_model(reports)
            if evaluation is not None:
                line["score"] = evaluate(history.model, evaluation, metric=metric).score()
            bar.set_postfix({key: f"{line[key]:.4g}" for key in ("loss", "score") if line.get(key) is not None})
            history.epochs.append(line)
            if files:
                files.add_metrics(line)
                content = {"settings": settings, "epoch": epoch + 1, "schedule": schedule.state_dict()}
                if epoch + 1 == recipe.epochs and engine.saves_weights:
                    _save_weights(files, history, settings)  # before the checkpoint that says that all is done
                files.save({**content, "history": history.epochs, "ranks": [_kept(report) for report in reports]})
                epoch_finished()
    if history.model is not None:
        history.model.eval()
    return history


def _report(
    engine: Engine, optimizer: torch.optim.Optimizer, losses: list[float], steps: int, seconds: float
) -> dict[str, Any]:
    return {
        "model": engine.model.state_dict(),
        "optimizer": momentum_by_name(engine.model, optimizer),
        "rng": torch.get_rng_state(),
        "extra": engine.extra_state(),
        "loss": sum(losses) / len(losses) if losses else None,
        "seconds": seconds,
        "measurements": engine.measurements(steps),
    }


def _kept(report: dict[str, Any]) -> dict[str, Any]:
    return {key: report[key] for key in ("model", "optimizer", "rng", "extra") if key in report}


def _summary(reports: Sequence[dict[str, Any]], recipe: Recipe, steps: int) -> dict[str, Any]:
    """Loss as the mean over the processes that know it; time as that of the slowest; counts as sums."""
    losses = [report["loss"] for report in reports if report["loss"] is not None]
    seconds = max(report["seconds"] for report in reports)
    summary = {
        "loss": sum(losses) / len(losses),
        "seconds": seconds,
        "seconds_per_step": seconds / steps,
        "images_per_second": recipe.batch_size * steps / seconds,
    }
    for report in reports:
        for name, value in report["measurements"].items():
            summary[name] = summary.get(name, 0) + value
    return summary


def _resume(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    content: dict[str, Any] | None,
    history: History,
) -> int:
    """Put everything back to where a checkpoint was made; returns the epochs that are done."""
    if content is None:
        return 0
    own, first = content["ranks"][engine.rank], content["ranks"][0]
    engine.model.load_state_dict(own.get("model", first.get("model")))
    restore_momentum(engine.model, optimizer, own.get("optimizer", first.get("optimizer")))
    engine.load_extra_state(own["extra"])
    schedule.load_state_dict(content["schedule"])
    for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate
    torch.set_rng_state(own["rng"])
    history.epochs.extend(content["history"])
    if engine.rank == 0:
        history.model = engine.whole_model(content["ranks"])
    return int(content["epoch"])


def _save_weights(files: Folder, history: History, settings: dict[str, Any]) -> None:
    """The trained network as a checkpoint that ``--weights`` takes."""
    assert history.model is not None
    metadata = {"schema": 1, "settings": settings, "fingerprint": fingerprint(history.model), **history.epochs[-1]}
    write_tensors(files.weights, "trained model", history.model.state_dict(), metadata)
