"""From a task to a folder with a trained network, and networks side by side."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # spawned processes inherit it

import rank_functions

import ptq
from ptq.calibration import Calibration
from ptq.errors import InputError
from ptq.quantization import Bits, Quantized, Scheme
from ptq.tasks import Task
from ptq.tasks.checkpoints import load_weights
from ptq.training.baselines import (
    Baseline,
    ddp_baseline,
    float_baseline,
    pipeline_baseline,
    qat_baseline,
    recipe_for,
)
from ptq.training.candidates import Candidate
from ptq.training.comparison import compare, weight_bytes
from ptq.training.gradients import GradientCompression
from ptq.training.recipe import Recipe, preset

RECIPE = Recipe(epochs=1, batch_size=8, learning_rate=0.05, micro_batches=2)


@pytest.fixture
def small_task() -> Task:
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(8, 1, 8, 8, generator=generator), torch.randint(0, 3, (8,), generator=generator)) for _ in range(3)
    ]
    return Task(name="small", model=rank_functions.network().eval(), calibration=batches, evaluation=batches)


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_float_and_qat_leave_what_the_other_commands_read(small_task: Task, tmp_path: Path) -> None:
    start = {name: tensor.clone() for name, tensor in small_task.model.state_dict().items()}
    baseline, model = float_baseline(small_task, RECIPE, tmp_path / "float")
    assert Baseline.load(tmp_path / "float") == baseline
    assert baseline.n == baseline.images == 24 and baseline.seconds > 0 and baseline.payload_bytes_per_step is None
    assert baseline.score == ptq.evaluate(model, small_task.evaluation).top1
    assert all(torch.equal(tensor, start[name]) for name, tensor in small_task.model.state_dict().items())
    fresh = rank_functions.network()
    load_weights(fresh, tmp_path / "float" / "model.safetensors")
    trained = replace(small_task, model=fresh.eval())
    assert not torch.equal(trained.model.state_dict()["head.weight"], start["head.weight"])

    calibration = ptq.calibrate(trained.model, trained.calibration)
    scheme = Scheme(bits=Bits(4, 4))
    aware, quantized = qat_baseline(trained, trained.model, calibration, scheme, RECIPE, tmp_path / "qat")
    assert aware.settings["scheme"]["bits"]["weights"] == 4
    assert not (tmp_path / "qat" / "model.safetensors").exists()
    loaded = Quantized.load(tmp_path / "qat" / "quantized.safetensors", trained.model, calibration)
    assert ptq.evaluate(loaded.model, trained.evaluation).top1 == aware.score
    assert str(loaded.scheme.bits) == str(quantized.scheme.bits) == "W4A4"


def test_processes_leave_the_same_files(small_task: Task, tmp_path: Path) -> None:
    piped, _ = pipeline_baseline(
        small_task, RECIPE, tmp_path / "pipeline", split=["relu"], activations="affine:bits=8", record_every=1
    )
    compression = GradientCompression(form="alq:bits=3,bucket=512")
    shared, _ = ddp_baseline(small_task, RECIPE, tmp_path / "ddp", compression)
    for name, baseline in (("pipeline", piped), ("ddp", shared)):
        assert Baseline.load(tmp_path / name).training == baseline.training == name
        files = {path.name for path in (tmp_path / name).iterdir()}
        assert {"baseline.json", "checkpoint.pt", "metrics.jsonl", "model.safetensors"} <= files
        fresh = rank_functions.network()
        load_weights(fresh, tmp_path / name / "model.safetensors")
        assert ptq.evaluate(fresh, small_task.evaluation).top1 == baseline.score
    assert (tmp_path / "pipeline" / "boundaries-0.jsonl").exists()
    # two micro-batches of [4, 6, 8, 8], in 8 bits with scale and zero-point forward, in floats backward
    assert piped.payload_bytes_per_step == 2 * (4 * 6 * 64 + 8) + 2 * 4 * (4 * 6 * 64)


def test_recipes_of_tasks() -> None:
    assert recipe_for("digits", "float") == preset("digits")
    assert recipe_for("digits", "qat") == preset("digits-qat")
    assert recipe_for("digits", "ddp", "digits-short") == preset("digits-short")
    assert recipe_for("cifar10-resnet20", "qat").learning_rate < recipe_for("cifar10-resnet20", "float").learning_rate
    with pytest.raises(InputError, match="has no recipe of its own"):
        recipe_for("torchvision:resnet18", "float")


def test_networks_side_by_side(digits: Task, digits_calibration: Calibration) -> None:
    scheme = Scheme(bits=Bits(4, 4))
    smoothed = ptq.smooth(digits.model, digits_calibration, alpha=0.5, batches=digits.calibration)
    quantized = ptq.quantize(digits.model, digits_calibration, 8, 8)
    trained = Baseline(
        training="qat", task="digits", metric="top1", score=99.0, interval=(98.0, 100.0), n=450, seconds=3.0,
        seconds_per_step=0.1, images=640, recipe={}, settings={},
    )  # fmt: skip
    plain = Candidate(name="PTQ", scheme=scheme, model=digits.model, calibration=digits_calibration)
    rows = compare(
        digits,
        [
            plain,
            replace(
                plain,
                name="PTQ, α=0.5",
                model=smoothed.model,
                calibration=smoothed.calibration,
                reference=digits.model,
            ),
            replace(plain, name="trained", quantized=quantized, baseline=trained),
        ],
        images=200,
        error_batches=1,
    )
    by_name = {row.name: row for row in rows}
    assert list(by_name) == ["float", "PTQ", "PTQ, α=0.5", "trained"]
    assert all(row.n == 200 and row.interval[0] <= row.score <= row.interval[1] for row in rows)
    assert by_name["float"].float_score == by_name["PTQ"].float_score == by_name["float"].score
    assert by_name["trained"].bits == "W8A8" and by_name["trained"].seconds == 3.0 and by_name["trained"].images == 640
    l1 = {name: row.l1 for name, row in by_name.items()}
    assert l1["float"] is None and l1["trained"] is not None and l1["PTQ"] is not None and l1["trained"] < l1["PTQ"]
    assert l1["PTQ, α=0.5"] is not None and l1["PTQ, α=0.5"] < 2 * l1["PTQ"]  # in the original scale
    assert by_name["PTQ"].weight_bytes < by_name["trained"].weight_bytes < by_name["float"].weight_bytes
    assert set(by_name["PTQ"].layers) == set(digits_calibration.layers)


def test_sizes_are_counted_by_hand() -> None:
    layer = torch.nn.Linear(10, 4)
    calibration = ptq.calibrate(layer, [torch.randn(8, 10)])
    assert weight_bytes(layer) == 4 * 44
    quantized = ptq.quantize(layer, calibration, weights=3, activations=8)
    # 40 codes of 3 bits, bias, weight scales, and scale and zero-point of the input
    assert weight_bytes(quantized.model, quantized) == 15 + 16 + 16 + 8
    quantized.model.weight_zero_point[0] = 1.0  # 4 zero-points of 3 bits
    assert weight_bytes(quantized.model, quantized) == 15 + 16 + 16 + 8 + 2
    formatted = ptq.quantize(layer, calibration, weight_format="affine:bits=4", activations=None)
    assert weight_bytes(formatted.model, formatted) == 8 + 20 + 16
