"""The command line, in process: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ptq
from ptq.calibration import Calibration
from ptq.cli import main
from ptq.commands import parse_alphas
from ptq.errors import InputError
from ptq.tasks.digits import WEIGHTS


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        return json.loads(self.out)


Cli = Callable[..., Finished]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run ``ptq …`` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Finished:
        monkeypatch.setattr(sys, "argv", ["ptq", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        return Finished(int(exit_.value.code or 0), out, err)

    return run


def test_the_main_road_without_arguments(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "reports" / "digits"
    assert cli("calibrate").code == 0
    assert cli("smooth", "--alpha", "0.5").code == 0
    assert cli("quantize").code == 0
    evaluated = cli("evaluate")
    assert evaluated.code == 0
    assert "W8A8, smoothed α=0.5, refined" in evaluated.out
    swept = cli("sweep", "--alphas", "0.2,0.5", "--bits", "W4A4", "--images", "100")
    assert swept.code == 0 and "not smoothed" in swept.out
    written = {path.name for path in folder.iterdir()}
    assert written == {
        "log.jsonl",
        "run.json",
        "calibration.safetensors",
        "smoothed.safetensors",
        "smoothed_calibration.safetensors",
        "ledger.json",
        "quantized.safetensors",
        "evaluation.json",
        "sweep.json",
        "alpha_sweep.png",
        "channels.png",
        "channels_layers.png",
        "alpha_sweep_layers.png",
    }
    for name in ("alpha_sweep.png", "alpha_sweep_layers.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert [row["name"] for row in evaluation["networks"]] == ["float", "W8A8", "W8A8, smoothed α=0.5, refined"]
    assert evaluation["networks"][0]["top1"] >= 98
    layer = evaluation["layers"]["features.4.expand.conv"]
    assert layer["absmax_smoothed"] < layer["absmax"]
    assert set(layer["errors"]) == {"W8A8", "W8A8, smoothed α=0.5, refined"}


def test_eight_bits_lose_nothing_on_digits(cli: Cli) -> None:
    rows = cli("evaluate", "--json").json["networks"]
    assert rows[0]["top1"] - rows[1]["top1"] <= 0.25  # one image of 450


def test_the_result_is_that_of_the_library(cli: Cli, digits: ptq.Task) -> None:
    cli("calibrate", "--batches", "4")
    cli("smooth", "--alpha", "0.7")
    cli("quantize", "--weights", "4", "--activations", "4", "--first-last", "8", "--refine", "none")
    shown = cli("evaluate", "--json").json["networks"]

    calibration = ptq.calibrate(digits.model, digits.calibration, max_batches=4)
    smoothed = ptq.smooth(digits.model, calibration, alpha=0.7)
    plain = ptq.quantize(digits.model, calibration, 4, 4, first_last=8)
    both = ptq.quantize(smoothed.model, smoothed.calibration, 4, 4, first_last=8)
    expected = [ptq.evaluate(model, digits.evaluation).top1 for model in (digits.model, plain.model, both.model)]
    assert [row["top1"] for row in shown] == expected


def test_every_command_makes_what_it_builds_on(cli: Cli, tmp_path: Path) -> None:
    finished = cli("quantize", "--bits", "w4a4", "--run", "elsewhere")
    assert finished.code == 0
    assert "calibrating first" in finished.err
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == {
        "log.jsonl",
        "calibration.safetensors",
        "run.json",
        "smoothed.safetensors",
        "smoothed_calibration.safetensors",
        "ledger.json",
        "quantized.safetensors",
    }


def test_json_is_one_object_on_stdout_and_quiet_is_silent(cli: Cli) -> None:
    calibrated = cli("calibrate", "--json", "--batches", "2")
    assert calibrated.json["batches"] == 2
    assert calibrated.json["files"] == ["reports/digits/calibration.safetensors"]
    assert calibrated.out.count("\n") == 1
    quiet = cli("smooth", "--quiet")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")
    assert cli("quantize", "--json", "--bits", "W4A4").json["bits"]["classifier"] == "W4A4"
    assert cli("sweep", "--json", "--alphas", "0.5", "--bits", "W8A8", "--images", "40").json["images"] == 40
    assert cli("smooth", "--json").json["layers"][0]["action"] == "explicit"


def test_the_run_folder_remembers_how_the_task_was_described(cli: Cli, tmp_path: Path) -> None:
    weights = tmp_path / "mine.safetensors"
    save_file({f"module.{name}": value for name, value in load_file(WEIGHTS).items()}, weights)
    cli("calibrate", "--run", "mine", "--weights", "mine.safetensors", "--batch-size", "100", "--batches", "3")
    assert json.loads((tmp_path / "mine" / "run.json").read_text())["options"]["batch_size"] == 100
    assert cli("smooth", "--run", "mine").code == 0
    weights.unlink()
    assert "mine.safetensors" in cli("quantize", "--run", "mine").err


def test_in_quantize_weights_are_bits_or_a_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(WEIGHTS.read_bytes())
    finished = cli("quantize", "--weights", "w.safetensors", "--weights", "3", "--activations", "float", "--json")
    assert finished.json["bits"]["classifier"] == "W3"
    assert json.loads((tmp_path / "reports/digits/run.json").read_text())["options"]["weights"] == "w.safetensors"


def test_patterns_reach_the_layers(cli: Cli) -> None:
    finished = cli(
        "quantize", "--json", "--bits", "W4A4", "--include", "features.1*", "--include", "class*",
        "--exclude", "*depthwise*", "--override", "classifier=W8A8", "--keep-batchnorm",
    )  # fmt: skip
    assert finished.json["bits"] == {
        "features.1.expand.conv": "W4A4",
        "features.1.project.conv": "W4A4",
        "classifier": "W8A8",
    }
    assert finished.json["scheme"]["fold_batchnorm"] is False


def test_images_in_few_bits_are_diffused_unless_told_otherwise(cli: Cli) -> None:
    finished, rounded = (cli("quantize", "--json", "--bits", "W8A3", *more) for more in ([], ["--no-diffuse"]))
    assert len(finished.json["diffused"]) == 1 and finished.json["scheme"]["diffuse_image"] is True
    assert rounded.json["diffused"] == [] and rounded.json["scheme"]["diffuse_image"] is False


@pytest.mark.parametrize("observer", ["percentile", "entropy", "mse"])
def test_observers_go_all_the_way(cli: Cli, observer: str) -> None:
    assert cli("calibrate", "--observer", observer, "--batches", "3").code == 0
    assert cli("smooth").code == 0
    assert cli("quantize", "--bits", "W8A4").code == 0
    finished = cli("evaluate", "--json", "--images", "64", "--error-batches", "1")
    assert finished.code == 0 and len(finished.json["networks"]) == 3


def test_smoothing_again_is_the_same_file(cli: Cli, tmp_path: Path) -> None:
    contents = []
    for _ in range(2):
        assert cli("smooth").code == 0
        contents.append((tmp_path / "reports/digits/smoothed.safetensors").read_bytes())
    assert contents[0] == contents[1]


def test_a_sweep_goes_on_and_draws_what_is_there(cli: Cli, tmp_path: Path) -> None:
    common = ("--bits", "W4A4", "--images", "64")
    cli("sweep", "--alphas", "0.5", *common)
    first = json.loads((tmp_path / "reports/digits/sweep.json").read_text())["points"]
    cli("sweep", "--alphas", "0.3:0.7:0.2", *common)
    second = json.loads((tmp_path / "reports/digits/sweep.json").read_text())["points"]
    assert second[: len(first)] == first
    assert [point["alpha"] for point in second] == [None, 0.5, "auto", "auto+clip", 0.3, 0.7]


def test_calibration_sizes(cli: Cli, tmp_path: Path) -> None:
    shown = cli("sweep", "--calibration-batches", "2,5,1500", "--bits", "W4A4", "--images", "64", "--json").json
    study = json.loads((tmp_path / "reports/digits/calibration_sizes.json").read_text())
    assert shown.items() >= study.items()
    sizes = [drift["batches"] for drift in study["drifts"]]
    assert sizes[:2] == [2, 5] and 5 < sizes[2] < 1500  # the data ends before
    missing = [drift["tensors_median"] for drift in study["drifts"]]
    assert missing[0] >= missing[1] >= missing[2] == 0
    assert [(p["batches"], p["alpha"]) for p in study["points"]] == [(n, a) for n in sizes for a in (None, 0.5)]
    assert (tmp_path / "reports/digits/calibration_sizes.png").stat().st_size > 10_000


def test_number_formats_in_quantize_and_pack(cli: Cli, tmp_path: Path, digits: ptq.Task) -> None:
    shown = cli("quantize", "--weight-format", "alq:bits=4,bucket=64,nearest", "--activations", "float", "--json")
    assert shown.json["bits"]["classifier"] == "W[alq:bits=4,bucket=64,nearest]"
    assert cli("evaluate", "--json", "--images", "64").json["networks"][1]["name"] == "W[alq:bits=4,bucket=64,nearest]"

    packed = cli("pack", "--conv", "affine:bits=8", "--linear", "affine:bits=4", "--json").json
    file = tmp_path / "reports/digits/packed.safetensors"
    assert packed["file_bytes"] == file.stat().st_size < packed["source_bytes"] / 2
    state = ptq.PackedCheckpoint.load(file).state_dict()
    source = digits.model.state_dict()
    assert state.keys() == source.keys()
    expected = ptq.format("affine:bits=4").fake(source["classifier.weight"])
    assert torch.equal(state["classifier.weight"], expected)
    assert torch.equal(state["features.0.norm.running_mean"], source["features.0.norm.running_mean"])


def test_formats_are_listed_and_drawn(cli: Cli, tmp_path: Path) -> None:
    assert "multistep:parts=4,bits=6" in cli("formats").out
    rows = {row["format"]: row for row in cli("formats", "--json", "--shape", "3,1000").json["formats"]}
    assert rows["affine:bits=4"]["nbytes"] == 8 + 1500
    assert cli("formats", "--json", "--layer", "classifier").json["what"] == "input of classifier"
    drawn = cli("formats", "--plot", "--json")
    assert (tmp_path / "reports/digits/formats.png").read_bytes().startswith(b"\x89PNG")
    assert drawn.json["reasonable_sets"]["relu"]["l2"] == 1


def recalibrated(cli: Cli, tmp_path: Path) -> None:
    cli("smooth")
    cli("calibrate", "--batches", "2")


def other_weights(cli: Cli, tmp_path: Path) -> None:
    cli("calibrate")
    state = load_file(WEIGHTS)
    state["classifier.bias"] += 1
    save_file(state, tmp_path / "other.safetensors")


def truncated_calibration(cli: Cli, tmp_path: Path) -> None:
    cli("calibrate")
    path = tmp_path / "reports/digits/calibration.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def broken_sweep(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "reports/digits").mkdir(parents=True)
    (tmp_path / "reports/digits/sweep.json").write_text('{"kind": "sweep"}')


def a_file_in_the_way(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "reports").write_text("")


def nan_weights(cli: Cli, tmp_path: Path) -> None:
    state = load_file(WEIGHTS)
    state["features.1.expand.conv.weight"][0, 0] = torch.nan
    save_file(state, tmp_path / "nan.safetensors")


BAD_INPUT: dict[str, tuple[list[str], str, Callable[[Cli, Path], None] | None]] = {
    "alpha above 1": (["smooth", "--alpha", "1.5"], "alpha = 1.5", None),
    "alpha nan": (["smooth", "--alpha", "nan"], "alpha = nan", None),
    "alpha text": (["smooth", "--alpha", "half"], "--alpha", None),
    "bits 1": (["quantize", "--weights", "1"], "bits = 1: choose a whole number from 2 to 16", None),
    "bits 33": (["quantize", "--bits", "W33A8"], "33", None),
    "bits twice": (["quantize", "--bits", "W4A4", "--activations", "8"], "give one of them", None),
    "bits words": (["quantize", "--bits", "int8"], "write W8A8", None),
    "no such pattern": (["quantize", "--exclude", "fc"], "'fc' matches no layer", None),
    "bad override": (["quantize", "--override", "W8A8"], "PATTERN=BITS", None),
    "unknown format": (["quantize", "--weight-format", "int8"], "the names are raw, affine", None),
    "unknown format option": (["pack", "--conv", "affine:bit=8"], "its options are bits", None),
    "unknown distribution": (["formats", "--distribution", "cauchy"], "choose one of normal, laplace", None),
    "unknown layer": (["formats", "--layer", "fc"], "layer 'fc'", None),
    "shape": (["formats", "--shape", "4,x"], "--shape '4,x'", None),
    "unknown observer": (["calibrate", "--observer", "kl"], "choose one of max, percentile", None),
    "no batches": (["calibrate", "--batches", "0"], "at least one batch", None),
    "unknown task": (["calibrate", "--task", "imagenet"], "no task 'imagenet'", None),
    "task without data": (["calibrate", "--task", "cifar10-resnet20"], "--data npz:FILE or cifar10:DIR", None),
    "unknown model": (["calibrate", "--model", "torchvision:resnet19", "--data", "npz:x"], "resnet18", None),
    "missing checkpoint": (["calibrate", "--weights", "none.safetensors"], "none.safetensors", None),
    "two checkpoints": (["calibrate", "--weights", "a", "--weights", "b"], "one checkpoint is enough", None),
    "missing data": (["calibrate", "--data", "npz:none.npz"], "none.npz", None),
    "unknown option": (["calibrate", "--batch", "3"], "--batch", None),
    "unknown command": (["calibrat"], "calibrat", None),
    "unknown device": (["calibrate", "--device", "tpu9"], "--device tpu9", None),
    "alphas": (["sweep", "--alphas", "0.1:0.9"], "START:STOP:STEP", None),
    "no alphas": (["sweep", "--alphas", ","], "no α to sweep", None),
    "no images": (["sweep", "--images", "0"], "0 images", None),
    "no images to evaluate": (["evaluate", "--images", "-1"], "-1 images", None),
    "smoothing of another calibration": (["quantize"], "made from another calibration: run `ptq smooth`", recalibrated),
    "other weights": (["smooth", "--weights", "other.safetensors"], "recalibrate", other_weights),
    "truncated calibration": (["smooth"], "not a readable safetensors file", truncated_calibration),
    "broken sweep file": (["sweep"], "incomplete", broken_sweep),
    "a file in the way": (["calibrate"], "can't write there", a_file_in_the_way),
    "NaN weights": (["calibrate", "--weights", "nan.safetensors"], "NaN or Inf in the weight", nan_weights),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_line_and_writes_nothing(cli: Cli, name: str, tmp_path: Path) -> None:
    arguments, message, prepare = BAD_INPUT[name]
    if prepare:
        prepare(cli, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    finished = cli(*arguments, "--batch-size", "64")
    assert finished.code in (1, 2)
    lines = [line for line in finished.err.splitlines() if line.startswith("ptq: ")]
    assert len(lines) == 1 and message in lines[0]
    assert "Traceback" not in finished.err and finished.out == ""
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    made = {path.name for path in after.keys() - before.keys()}
    # The names of the layers are known only after calibration, which then stays, whole.
    assert made == ({"calibration.safetensors", "run.json"} if name == "no such pattern" else set())
    assert all(after[path] == content for path, content in before.items())


def test_debug_shows_the_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ptq", "smooth", "--alpha", "2", "--debug"])
    with pytest.raises(InputError):
        main()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.05:0.95:0.05", list(ptq.ALPHAS)), ("0.25,0.5", [0.25, 0.5]), ("0:1:0.5", [0, 0.5, 1]), ("0.3", [0.3])],
)
def test_alphas(text: str, expected: list[float]) -> None:
    assert parse_alphas(text) == expected


def test_version_and_help(cli: Cli) -> None:
    assert re.fullmatch(r"ptq \d+\.\d+\.\d+\n", cli("--version").out)
    for command in ("calibrate", "smooth", "quantize", "evaluate", "sweep", "pack", "formats"):
        shown = cli(command, "--help").out
        assert "--json" in shown and "--task" in shown


def test_help_is_quick_and_completion_works(tmp_path: Path) -> None:
    """In a process of its own: torch stays out, so the shell need not wait."""
    command = [sys.executable, "-m", "ptq", "--help"]
    subprocess.run(command, capture_output=True, check=True, cwd=tmp_path)
    elapsed = []
    for _ in range(3):
        start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime  # a busy machine doesn't count
        subprocess.run(command, capture_output=True, check=True, cwd=tmp_path)
        elapsed.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start)
    assert min(elapsed) < 0.5
    shown = subprocess.run(
        [sys.executable, "-m", "ptq", "--show-completion", "bash"], capture_output=True, text=True, cwd=tmp_path
    )
    assert shown.returncode == 0


def test_calibration_file_is_what_the_library_writes(cli: Cli, digits: ptq.Task, tmp_path: Path) -> None:
    cli("calibrate", "--batches", "3")
    ptq.calibrate(digits.model, digits.calibration, max_batches=3).save(tmp_path / "by_library.safetensors")
    by_command = tmp_path / "reports/digits/calibration.safetensors"
    assert by_command.read_bytes() == (tmp_path / "by_library.safetensors").read_bytes()
    assert Calibration.load(by_command).batches == 3


def test_export_measures_the_file_and_doctor_tells_the_facts(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    shown = cli("export", "--images", "64", "--json").json
    folder = tmp_path / "reports/digits/export"
    assert {path.name for path in folder.iterdir()} == {"model.int8.onnx", "export.json", "model.json", "run.py"}
    written = json.loads((folder / "export.json").read_text())
    assert shown["agreement"] == written["agreement"] and written["agreement"]["same_top1"] >= 99.5
    facts = cli("doctor", "--json").json
    assert facts["torch"]["version"] == torch.__version__ and facts["cpu"]["u8s8_saturates"] in (True, False)
    wrong = cli("export", "--for", "toaster")
    assert wrong.code == 1 and "toaster" in wrong.err and len(wrong.err.splitlines()) == 1


def test_a_baseline_is_trained_and_named(cli: Cli, tmp_path: Path) -> None:
    shown = cli("train", "float", "--epochs", "1", "--images", "256", "--json").json
    folder = tmp_path / "reports/digits/baselines/float"
    assert {path.name for path in folder.iterdir()} >= {"baseline.json", "metrics.jsonl", "model.safetensors"}
    assert shown["n"] == 450 and json.loads((folder / "baseline.json").read_text())["score"] == shown["score"]
    wrong = cli("train", "ddp", "--gradients", "nonsense:bits=3", "--epochs", "1")
    assert wrong.code == 1 and "nonsense" in wrong.err and len(wrong.err.splitlines()) == 1


def test_refinement_goes_all_the_way(cli: Cli) -> None:
    cli("calibrate", "--batches", "2")
    cli("quantize", "--bits", "W3A4")
    refined = cli("evaluate", "--json", "--images", "128", "--error-batches", "1").json
    names = [row["name"] for row in refined["networks"]]
    assert names == ["float", "W3A4", "W3A4, smoothed α by layer, refined"]
    wrong = cli("quantize", "--refine", "magic")
    assert wrong.code == 1 and "magic" in wrong.err and len(wrong.err.splitlines()) == 1


def test_quantize_smooths_for_its_bits_unless_told_otherwise(cli: Cli, tmp_path: Path) -> None:
    """What it smoothed by itself is nobody else's; what ``ptq smooth`` made is taken as it is."""
    folder = tmp_path / "reports/digits"

    def quantized(*options: str) -> tuple[str, str, dict[str, object]]:
        finished = cli("quantize", *options)
        assert finished.code == 0
        ledger = json.loads((folder / "ledger.json").read_text()) if (folder / "ledger.json").exists() else {}
        evaluated = cli("evaluate", "--json", "--images", "32", "--error-batches", "1").json
        return finished.err, evaluated["networks"][-1]["name"], {key: ledger.get(key) for key in ("by", "bits", "clip")}

    cli("calibrate", "--batches", "2")
    assert quantized("--no-smooth", "--refine", "bias")[1:] == (
        "W8A8, refined",
        {"by": None, "bits": None, "clip": None},
    )
    for bits in ("W4A4", "W8A8"):
        said, name, ledger = quantized("--bits", bits, "--refine", "alpha,bias")
        assert "smoothing first" in said and name == f"{bits}, smoothed α by layer, refined"
        assert ledger == {"by": "quantize", "bits": bits, "clip": True}
    assert "as it is" in quantized("--refine", "bias")[0]
    cli("smooth", "--alpha", "0.3")
    said, name, ledger = quantized("--bits", "W4A4", "--refine", "alpha,bias")
    assert "smoothing first" not in said and name == "W4A4, smoothed α=0.3, refined" and ledger["by"] == "smooth"
