"""Training through a pipeline of processes, one a stage, with what crosses between them compressed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from ptq.batches import Batches
from ptq.errors import InputError
from ptq.formats import format as read_format
from ptq.training.checkpoints import Folder
from ptq.training.loop import Engine, History, train
from ptq.training.processes import device_of_rank, run_ranks
from ptq.training.recipe import Recipe
from ptq.training.record import Recorder
from ptq.training.samples import Samples
from ptq.training.split import Cut, balanced_cuts, boundary_tensors, cuts_by_name, modules_before, stage_modules
from ptq.training.stage import BACKWARD, FORWARD, CompressedStage, passes_straight_through

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How a network is cut, and in which formats activations and gradients cross the cuts."""

    cuts: tuple[Cut, ...]
    activations: str | None = None  # texts of ptq.format; None sends floats
    gradients: str | None = None
    schedule: str = "gpipe"
    record_every: int | None = None  # steps

    def __post_init__(self) -> None:
        for text in filter(None, (self.activations, self.gradients)):
            read_format(text)
        if self.schedule not in SCHEDULES:
            raise InputError(f"schedule {self.schedule!r}: give {' or '.join(SCHEDULES)}")

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1


class PipelineEngine(Engine):
    """One stage of a pipeline."""

    kind = "pipeline"

    def __init__(
        self, rank: int, model: nn.Module, recipe: Recipe, pipeline: Pipeline, example: Tensor, folder: Path | None
    ) -> None:
        if recipe.micro_batches < pipeline.stages and pipeline.schedule == "1f1b":
            raise InputError(f"1f1b takes at least as many micro-batches as stages ({pipeline.stages})")
        device = device_of_rank(rank)
        self._whole = copy.deepcopy(model) if rank == 0 else None
        stages = stage_modules(model, pipeline.cuts)
        refuse_shared(stages)
        borders = boundary_tensors(stages, example[: recipe.batch_size // recipe.micro_batches])
        super().__init__(stages[rank].to(device), recipe)
        self.rank, self.pipeline = rank, pipeline
        self._recorder = None
        if pipeline.record_every and folder is not None:
            self._recorder = Recorder(folder / f"boundaries-{rank}.jsonl", pipeline.record_every)
        self.stage = CompressedStage(
            self.model,
            rank,
            pipeline.stages,
            device,
            input_args=tuple(tensor.to(device) for tensor in borders[rank]),
            output_args=tuple(tensor.to(device) for tensor in borders[rank + 1]),
            activations=read_format(pipeline.activations) if pipeline.activations else None,
            gradients=read_format(pipeline.gradients) if pipeline.gradients else None,
            seed=recipe.seed,
            recorder=self._recorder,
        )
        self._schedule = SCHEDULES[pipeline.schedule](self.stage, recipe.micro_batches, loss_fn=self._loss)
        self._counted = dict(self.stage.sent_bytes)
        self._started = False

    def settings(self) -> dict[str, Any]:
        pipeline = self.pipeline
        return {
            "split": [cut.name for cut in pipeline.cuts],
            "activations": pipeline.activations,
            "gradients": pipeline.gradients,
            "schedule": pipeline.schedule,
        }

    def gradients(self, inputs: Tensor, labels: Tensor, step: int) -> float | None:
        if self._recorder is not None and not self._started:
            self._recorder.forget_from(step)
        self._started = True
        self.stage.training_step = step
        losses: list[Tensor] = []
        arguments = (inputs,) if self.stage.is_first else ()
        if self.stage.is_last:
            self._schedule.step(*arguments, target=labels, losses=losses)
        else:
            self._schedule.step(*arguments)
        return float(torch.stack(losses).mean().detach()) if losses else None

    def measurements(self, steps: int) -> dict[str, Any]:
        """Payload bytes that this stage sent in a step, by direction; summed over the stages by the loop."""
        sent = {direction: self.stage.sent_bytes[direction] - self._counted[direction] for direction in self._counted}
        self._counted = dict(self.stage.sent_bytes)
        return {
            "payload_bytes_per_step": sum(sent.values()) / steps,
            "forward_bytes_per_step": sent[FORWARD] / steps,
            "backward_bytes_per_step": sent[BACKWARD] / steps,
        }

    def collect(self, report: dict[str, Any]) -> list[dict[str, Any]] | None:
        return gathered(report, self.rank)

    def whole_model(self, reports: Sequence[dict[str, Any]]) -> nn.Module:
        assert self._whole is not None
        state = self._whole.state_dict()
        for report in reports:
            state |= report["model"]
        self._whole.load_state_dict(state)
        return self._whole


def gathered(report: dict[str, Any], rank: int) -> list[dict[str, Any]] | None:
    """The reports of all ranks, in the first one."""
    reports: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(report, reports)
    return reports


def refuse_shared(stages: Sequence[nn.Module]) -> None:
    """A parameter in two stages would be trained twice, differently."""
    owners: dict[str, int] = {}
    for index, stage in enumerate(stages):
        for name, _ in stage.named_parameters():
            if owners.setdefault(name, index) != index:
                raise InputError(f"{name}: stages {owners[name]} and {index} both use it: split elsewhere")


def refuse_pruned_embeddings(name: str, module: nn.Module, *forms: str | None) -> None:
    """Embeddings are never pruned: what looks them up keeps every value, of its results and of their gradients."""
    dropping = [form for form in forms if form is not None and not passes_straight_through(read_format(form))]
    if dropping and any(isinstance(part, nn.Embedding) for part in module.modules()):
        raise InputError(
            f"{name}: {dropping[0]} drops values, and embeddings are never pruned: choose a format that keeps all,"
            " or split behind a later layer"
        )


def plan_pipeline(
    model: nn.Module,
    samples: Samples,
    recipe: Recipe,
    *,
    stages: int = 2,
    split: Sequence[str] = (),
    activations: str | None = None,
    gradients: str | None = None,
    schedule: str = "gpipe",
    record_every: int | None = None,
    folder: str | Path | None = None,
) -> Pipeline:
    """A pipeline cut at the named modules, or, without names, into stages that take equally long here.

    Two measurements seldom agree: a run that goes on in its ``folder`` keeps the cuts that it has.
    """
    before = Folder(folder).settings() if folder is not None and not split else None
    if before is not None and len(before.get("split", ())) == stages - 1:
        split = before["split"]
    if split:
        cuts = cuts_by_name(model, split)
    else:
        count = recipe.batch_size // recipe.micro_batches
        cuts = balanced_cuts(model, stages, samples.batch(torch.arange(count) % len(samples))[0])
    for cut in cuts:
        for name in modules_before(model, cut):
            refuse_pruned_embeddings(name, model.get_submodule(name), activations, gradients)
    return Pipeline(
        cuts=tuple(cuts),
        activations=activations,
        gradients=gradients,
        schedule=schedule,
        record_every=record_every,
    )


def train_pipeline(
    model: nn.Module,
    samples: Samples,
    recipe: Recipe,
    pipeline: Pipeline,
    *,
    folder: str | Path | None = None,
    evaluation: Batches | None = None,
    metric: str = "top1",
    stop_after: int | None = None,
    threads: int = 1,
    progress: bool = False,
) -> History:
    """Train a copy of the model, one process a stage, started here unless torchrun did."""
    options = {"folder": folder, "evaluation": evaluation, "metric": metric, "stop_after": stop_after}
    options["progress"] = progress
    # A copy: the tensors that processes are given lie in memory that all of them see.
    given = (copy.deepcopy(model), samples, recipe, pipeline, options)
    results = run_ranks(_rank, given, pipeline.stages, threads=threads)
    return history_from(results[0], model)


def history_from(result: dict[str, Any], model: nn.Module) -> History:
    """What the first rank returned, with its state in a copy of the model."""
    trained = copy.deepcopy(model)
    trained.load_state_dict(result["state"])
    return History(epochs=result["epochs"], model=trained.eval())


def _rank(
    rank: int, model: nn.Module, samples: Samples, recipe: Recipe, pipeline: Pipeline, options: dict[str, Any]
) -> dict[str, Any]:
    folder = Path(options["folder"]) if options["folder"] is not None else None
    plan: list[Any] = [pipeline]
    dist.broadcast_object_list(plan)  # under torchrun each rank measured its own
    (pipeline,) = plan
    example, _ = samples.batch(torch.arange(recipe.batch_size) % len(samples))
    engine = PipelineEngine(rank, copy.deepcopy(model), recipe, pipeline, example, folder)
    return returned(train(engine, samples, **options))


def returned(history: History) -> dict[str, Any]:
    """A history as tensors and plain values."""
    return {"epochs": history.epochs, "state": history.model.state_dict()} if history.model is not None else {}
