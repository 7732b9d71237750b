"""What compressed training reaches on the embedded task."""

from __future__ import annotations

import copy

import pytest
import torch

from ptq.evaluation import evaluate
from ptq.tasks import resolve
from ptq.training.gradients import GradientCompression
from ptq.training.loop import Engine, train
from ptq.training.recipe import Recipe
from ptq.training.replicas import train_ddp
from ptq.training.samples import samples_of


def test_gradients_of_3_learned_bits_train_as_well_as_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """ALQ at 3 bits on two replicas, against one process with float gradients: within a point on digits."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
    task = resolve("digits", weights="random")
    samples = samples_of(task.calibration)
    recipe = Recipe(epochs=6, batch_size=64, learning_rate=0.1, warmup_epochs=1)
    plain = train(Engine(copy.deepcopy(task.model), recipe), samples)
    compressed = train_ddp(task.model, samples, recipe, GradientCompression(form="alq:bits=3,bucket=8192"))
    assert plain.model is not None and compressed.model is not None
    reached = evaluate(plain.model, task.evaluation).top1
    assert reached > 97
    assert evaluate(compressed.model, task.evaluation).top1 >= reached - 1
    # 42,754 gradients of 3 bits with a norm for each of 6 buckets: less than a tenth of floats
    assert compressed.epochs[-1]["payload_bytes_per_rank_per_step"] < 42_754 * 4 / 10
