"""Networks side by side: at equal bits, and one network at every precision."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import ptq
from ptq.calibration import Calibration
from ptq.cli import main
from ptq.errors import InputError
from ptq.quantization import Bits
from ptq.report import compare_plots
from ptq.sweeping import Sweep
from ptq.tasks import Task, resolve
from ptq.training.baselines import Baseline
from ptq.training.candidates import best_alpha, trained
from ptq.training.checkpoints import json_line
from ptq.training.comparison import Comparison, correlations_in, weight_bytes
from ptq.training.precision import InPrecision, parse_precisions, precisions, undequantized

Ptq = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_ptq(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ptq:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ptq", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        return int(exit_.value.code or 0), *capsys.readouterr()

    return run


# Equal bits, reached in several ways ----------------------------------------------------------------------------


def test_everything_side_by_side(run_ptq: Ptq, tmp_path: Path) -> None:
    for kind in (("float",), ("qat", "--bits", "W3A3")):
        assert run_ptq("train", *kind, "--epochs", "1", "--images", "256", "--quiet")[0] == 0
    code, out, _ = run_ptq("compare", "--alpha", "0.5", "--images", "120", "--error-batches", "1", "--json")
    assert code == 0
    shown = json.loads(out)
    folder = tmp_path / "reports/digits"
    written = json.loads((folder / "compare.json").read_text())
    assert written["kind"] == "comparison" and written["rows"] == shown["rows"]
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "baselines/float/training.png").exists()
    assert "qat-W3A3" in (folder / "report.html").read_text()

    rows = {row["name"]: row for row in written["rows"]}
    assert [row["training"] for row in written["rows"]] == ["ptq"] * 5 + ["float", "qat"]
    assert list(rows) == [
        "float", "PTQ, not smoothed", "PTQ, α = 0.5", "PTQ, α by layer, clipped",
        "PTQ, α by layer, clipped, refined fast", "float, trained here", "qat-W3A3",
    ]  # fmt: skip
    assert {row["bits"] for name, row in rows.items() if name != "float"} == {"W3A3"}  # the baseline's
    assert all(row["interval"][0] <= row["score"] <= row["interval"][1] and row["n"] == 120 for row in rows.values())
    assert rows["qat-W3A3"]["images"] == 256 and rows["qat-W3A3"]["seconds"] > 0
    assert rows["PTQ, not smoothed"]["images"] is None and rows["float"]["l1"] is None
    assert rows["qat-W3A3"]["weight_bytes"] == rows["PTQ, not smoothed"]["weight_bytes"] < rows["float"]["weight_bytes"]
    assert rows["PTQ, α by layer, clipped"]["l1"] < rows["PTQ, not smoothed"]["l1"]

    digits, said = resolve("digits"), []
    calibration = Calibration.load(folder / "calibration.safetensors")
    found = trained(digits, calibration, None, folder / "baselines", [Bits(4, 4), Bits(2, 8)], said.append)
    assert [(one.name, str(one.scheme.bits)) for one in found] == [
        ("float, trained here", "W4A4"), ("float, trained here", "W2A8")
    ]  # fmt: skip
    assert len(said) == 1 and said[0].endswith("qat-W3A3: trained for W3A3, which is not compared: left out")
    other = resolve("digits", weights="random")
    found = trained(
        other, ptq.calibrate(other.model, other.calibration), None, folder / "baselines", [Bits(3, 3)], said.append
    )
    assert [one.name for one in found] == ["float, trained here"] and "trained from another network" in said[1]


def test_mistakes_are_one_line(run_ptq: Ptq) -> None:
    for arguments in (("--alpha", "much"), ("--refine", "magic"), ("--bits", "W4A4,tiny"), ("--bits", "half,tiny")):
        code, _, err = run_ptq("compare", *arguments)
        assert code == 1 and arguments[1].rpartition(",")[2] in err and len(err.splitlines()) == 1


def test_alpha_is_the_best_of_a_sweep_of_this_network(digits: Task, digits_calibration: Calibration) -> None:
    bits = Bits(3, 3)
    sweep = ptq.sweep(
        digits.model, digits_calibration, digits.calibration, digits.evaluation, (0.25, 0.6), bits=["W3A3"], images=60
    )
    assert best_alpha(digits.model, digits_calibration, bits, sweep)[0] == sweep.best("W3A3").alpha
    of_another = Sweep("another", sweep.data_fingerprint, points=sweep.points)
    alpha, why = best_alpha(digits.model, digits_calibration, bits, of_another)
    assert "least layer error" in why
    errors = {}
    for tried in (0.05, 0.5, alpha, 0.95):
        smoothed = ptq.smooth(digits.model, digits_calibration, tried)
        quantized = ptq.quantize(smoothed.model, smoothed.calibration, 3, 3)
        found = ptq.layer_errors(digits.model, quantized.model, digits.calibration, max_batches=4)
        errors[tried] = np.mean([error.isolated.l1 for error in found.values()])
    assert errors[alpha] <= 1.02 * min(errors.values())  # measured on other rows


def test_notes_of_smoothing_are_no_part_of_the_network() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    batches = [torch.randn(16, 6) for _ in range(2)]
    calibration = ptq.calibrate(model, batches)
    smoothed = ptq.smooth(model, calibration, 0.5, explicit="never", batches=batches)
    assert weight_bytes(smoothed.model) == weight_bytes(model) == 4 * (6 * 8 + 8 + 8 * 3 + 3)


def saved_run(folder: Path, training: str, score: float, l1: float) -> None:
    """A finished training with two recorded transfers."""
    Baseline(
        training=training, task="t", metric="top1", score=score, interval=(0.0, 100.0), n=10, seconds=1.0,
        seconds_per_step=0.1, images=20, recipe={}, settings={},
    ).save(folder)  # fmt: skip
    lines = [
        {"step": step, "boundary": 0, "direction": "forward", "l1": l1 * change, "sqnr": 20.0 - l1, "cosine": None}
        for step, change in enumerate((0.5, 1.5))
    ]
    (folder / "boundaries-0.jsonl").write_text("".join(map(json_line, lines)))


def test_which_distance_ranks_the_runs(tmp_path: Path) -> None:
    distances, scores = [0.1, 0.3, 0.2, 0.8, 0.5], [99.0, 98.0, 98.5, 91.0, 98.2]
    for number, (distance, score) in enumerate(zip(distances, scores, strict=True)):
        saved_run(tmp_path / f"pipeline-{number}", "pipeline", score, distance)
    for number in range(3):
        saved_run(tmp_path / f"ddp-{number}", "ddp", 90.0 + number, 0.1 * number)
    found = correlations_in(tmp_path)
    assert set(found) == {"pipeline"} and set(found["pipeline"]) == {"forward l1", "forward sqnr"}  # ddp: too few
    l1 = found["pipeline"]["forward l1"]
    assert l1.value == pytest.approx(spearmanr(distances, scores).statistic) and l1.runs == 5
    assert -1 <= l1.interval[0] <= l1.value <= l1.interval[1] <= 1
    assert found["pipeline"]["forward sqnr"].value == pytest.approx(-l1.value)
    empty = Comparison(task="t", metric="top1", rows=[], correlations=found)
    assert compare_plots._correlation_table(empty).row_count == 2
    assert empty.save(tmp_path / "compare.json")["correlations"]["pipeline"]["forward l1"]["runs"] == 5


def test_a_training_picture_draws_each_direction_and_boundary() -> None:
    epochs = [{"step": 10 * (n + 1), "loss": 1.0 / (n + 1), "score": 50.0 + n} for n in range(3)]
    recorded = [
        {"step": step, "boundary": boundary, "direction": direction, "l1": value, "sqnr": None, "cosine": 1 - value}
        for step in (0, 5)
        for boundary in (0, 1)
        for direction in ("forward", "backward")
        for value in (0.1, 0.3)
    ]
    figure = compare_plots.training_picture(epochs, recorded, "top1", "title")
    loss, score, l1, cosine = figure.axes
    assert [len(axes.lines) for axes in figure.axes] == [1, 1, 4, 4]
    assert np.allclose(l1.lines[0].get_ydata(), 0.2) and list(l1.lines[0].get_xdata()) == [0, 5]
    assert loss.get_ylabel() and score.get_ylabel() and cosine.get_xlabel() == "step"
    assert len(compare_plots.training_picture(epochs, [], "top1", "title").axes) == 2


# One network at every precision ---------------------------------------------------------------------------------


def test_the_same_network_at_every_precision(run_ptq: Ptq, digits: Task, digits_calibration: Calibration) -> None:
    code, out, _ = run_ptq("compare", "--bits", "float,half,bfloat16,8,4", "--images", "120", "--json")
    assert code == 0
    shown: dict[str, Any] = json.loads(out)
    rows = {row["name"]: row for row in shown["rows"]}
    assert list(rows) == ["float", "half", "bfloat16", "8", "4"] and shown["n"] == 120
    images = ptq.batches.limited(digits.evaluation, 120)
    plain = ptq.evaluate(digits.model, images)
    assert rows["float"]["weights_only"]["score"] == rows["float"]["with_activations"]["score"] == plain.top1
    for bits in (8, 4):
        for way, activations in (("weights_only", None), ("with_activations", bits)):
            quantized = ptq.quantize(digits.model, digits_calibration, bits, activations)
            answers = ptq.evaluate(quantized.model, images)
            assert rows[str(bits)][way] == {"score": answers.top1, "interval": list(answers.interval)}
        assert rows[str(bits)]["undequantized"]["score"] < 30  # ten classes: little more than chance
    assert rows["half"]["undequantized"] is None
    sizes = [row["weight_bytes"] for row in shown["rows"]]
    assert sizes[1] == sizes[2] and sizes[0] > sizes[1] > sizes[3] > sizes[4]
    assert all(Path(name).exists() for name in shown["files"])


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
def test_every_result_is_rounded(kind: torch.dtype) -> None:
    """Against the same steps written out; of float16 in numpy, which has it."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return x * 300 + self.linear(x).exp()

    block, x = Block(), torch.randn(7, 5)
    found = InPrecision(block, kind)(x)

    def rounded(value: Any) -> Any:
        if kind == torch.float16:
            return np.asarray(value, dtype=np.float32).astype(np.float16).astype(np.float32)
        bits = np.asarray(value, dtype=np.float32).view(np.uint32).astype(np.uint64)  # to nearest, ties to even
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)

    given, weight, bias = (rounded(v.detach().numpy()) for v in (x, block.linear.weight, block.linear.bias))
    expected = rounded(rounded(given * np.float32(300)) + rounded(np.exp(rounded(given @ weight.T + bias))))
    steps = np.abs(found.detach().numpy() - expected) / np.maximum(np.abs(expected), 1e-3)
    # Sums in another order may land on the other side of a tie.
    assert np.mean(steps == 0) > 0.9 and steps.max() <= 2 * torch.finfo(kind).eps
    assert InPrecision(nn.Identity(), torch.float16)(torch.tensor([7e4])).isinf().all()


def test_the_known_mistake_is_the_one_of_the_specification() -> None:
    layer = nn.Linear(5, 1, bias=False)
    layer.weight.data = torch.tensor([[-0.5, -0.13, 0.0, 0.07, 0.25]])
    codes = {bits: undequantized(layer, bits).get_parameter("weight") for bits in (8, 4)}
    assert codes[8].flatten().tolist() == pytest.approx([-128, -2.2, 42, 65.8, 127], abs=1e-4)  # not rounded
    assert torch.allclose(codes[4], (codes[8] + 128) / 255 * 15 - 8, atol=1e-4)  # an affine copy
    assert layer.weight[0, 2] == 0  # the model itself is untouched


def test_precisions_are_named() -> None:
    assert parse_precisions("float, half,16,8,8") == ["float", "half", "16", "8"]
    for wrong in ("", "quarter", "float,1", "33"):
        with pytest.raises(InputError):
            parse_precisions(wrong)


def test_a_picture_has_a_bar_for_every_score(digits: Task, digits_calibration: Calibration) -> None:
    found = precisions(digits, digits_calibration, ["half", "4"], images=40)
    (axes,) = compare_plots.precision_picture(found, "title").axes
    heights = sorted(bar.get_height() for bar in axes.patches)
    rows = found.rows
    expected = [rows[0].weights_only, rows[0].with_activations, rows[1].weights_only, rows[1].with_activations]
    assert rows[1].undequantized is not None and rows[0].undequantized is None
    assert heights == sorted(score.score for score in [*expected, rows[1].undequantized])
    assert axes.get_ylabel() == "top-1 accuracy (%)"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["half", "4 bits"]
