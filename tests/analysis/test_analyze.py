"""A whole analysis: of a small network through the library, of the embedded task through the command line."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import ptq
from ptq.analysis.prediction import distances_of_grid, distances_of_sweep
from ptq.analysis.recipes import Kitchen, Recipe, scheme_options
from ptq.cli import main
from ptq.quantization import Bits, Scheme
from ptq.report.plots import save
from ptq.storage import read_json
from ptq.tasks import Task, resolve


@pytest.fixture
def labelled(small_batches: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [(batch, torch.randint(5, (len(batch),), generator=generator)) for batch in small_batches]


def test_everything_about_a_small_network(
    small_network: nn.Module, small_batches: list[Tensor], labelled: list[tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    calibration = ptq.calibrate(small_network, small_batches, max_batches=1)
    quantized = ptq.quantize(small_network, calibration, bits="W4A4")
    analysis = ptq.analyze(small_network, quantized, calibration, small_batches, labelled, budget=5)
    assert analysis.sensitivities is not None and analysis.remedies is not None
    assert analysis.sensitivities.samples == 4  # a third of the twelve
    assert analysis.remedies.quantized.n == 8  # the others
    names = {remedy.name: remedy for remedy in analysis.remedies.tried}
    assert {"smooth, α = 0.5", "ranges by mse", "refine fast", "calibrate on 2 batches in place of 1"} <= set(names)
    scores = [remedy.answers.evaluation.score() for remedy in analysis.remedies.tried]
    assert scores == sorted(scores, reverse=True)
    # Each is what the library gives when it is told to do the same.
    rest = [(x, y) for x, y in labelled[1:]]
    more = ptq.calibrate(small_network, small_batches, max_batches=2)
    smoothed = ptq.smooth(small_network, calibration, 0.5)
    histograms = ptq.calibrate(small_network, small_batches, "mse", max_batches=1)
    for name, network in {
        "smooth, α = 0.5": ptq.quantize(smoothed.model, smoothed.calibration, bits="W4A4"),
        "ranges by mse": ptq.quantize(small_network, histograms, bits="W4A4"),
        "calibrate on 2 batches in place of 1": ptq.quantize(small_network, more, bits="W4A4"),
        "first and last layer at 8 bits": ptq.quantize(small_network, calibration, bits="W4A4", first_last=8),
    }.items():
        answers = ptq.evaluate(network.model, rest)
        assert torch.equal(names[name].answers.evaluation.predictions, answers.predictions), name
    content = json.loads(json.dumps(analysis.to_json(), allow_nan=False))
    assert (content["kind"], content["schema"]) == ("analysis", 1)
    assert [layer["layer"] for layer in content["layers"]["layers"]] == ["stem", "depthwise", "grouped", "up", "head"]
    assert content["outliers"][0]["layer"] == "stem"  # its input channels are 0.1, 1 and 20
    grid = content["distances"][0]
    assert grid["source"] == "grid" and len(grid["points"]) == 27
    correlations = [entry["spearman"] for entry in grid["correlations"]]
    assert correlations == sorted(correlations, reverse=True) and all(-1 <= rho <= 1 for rho in correlations)


def test_without_labels_there_are_layers_and_outliers(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    calibration = ptq.calibrate(small_network, small_batches)
    analysis = ptq.analyze(small_network, ptq.quantize(small_network, calibration), calibration, small_batches)
    assert len(analysis.layers) == 5
    assert analysis.sensitivities is None and analysis.remedies is None and analysis.distances == []


def test_frames_need_pandas(
    small_network: nn.Module, small_batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration = ptq.calibrate(small_network, small_batches)
    analysis = ptq.analyze(small_network, ptq.quantize(small_network, calibration), calibration, small_batches)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pandas", None)  # as if it weren't installed
        with pytest.raises(ptq.PtqError, match="pip install pandas"):
            analysis.to_frame()
    pytest.importorskip("pandas")
    frame = analysis.to_frame()
    assert list(frame["layer"]) == ["stem", "depthwise", "grouped", "up", "head"]
    assert frame["isolated.weights.l1"][0] == analysis.layers[0].isolated.weights.l1


def test_the_recipe_of_a_network_is_recognised(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    calibration = ptq.calibrate(small_network, small_batches)
    kitchen = Kitchen(small_network, calibration, small_batches)
    for alpha, refine, explicit in (
        (None, "none", "allow"),
        (0.5, "none", "never"),
        ("auto+clip", "none", "allow"),
        (None, "fast", "allow"),
    ):
        recipe = Recipe(
            scheme=Scheme(bits=Bits(4, 4)),
            batches=calibration.batches,
            alpha=alpha,
            explicit=explicit,
            refine=refine,
        )
        smoothed = None
        if alpha is not None:
            auto = alpha != 0.5
            smoothed = ptq.smooth(
                small_network,
                calibration,
                "auto" if auto else 0.5,
                explicit=explicit,
                weights=4,
                activations=4,
                clip=auto,
            )
        assert Recipe.of(calibration, kitchen.build(recipe), smoothed) == recipe


def test_options_say_the_whole_scheme() -> None:
    scheme = Scheme(
        bits=Bits(4, None),
        first_last=8,
        exclude=("head",),
        overrides=(("features.1*", Bits(8, 8)),),
        symmetric_activations=True,
        symmetric_weights=True,
        fold_batchnorm=False,
    )
    assert " ".join(scheme_options(scheme)) == (
        "--bits W4Afloat --first-last 8 --exclude head --override 'features.1*=W8A8' --symmetric "
        "--symmetric-weights --keep-batchnorm"
    )


def test_a_sweep_tells_which_of_its_distances_predicts(digits: Task, digits_calibration: ptq.Calibration) -> None:
    sweep = ptq.sweep(
        digits.model, digits_calibration, digits.calibration, digits.evaluation, [0.5], bits=["W8A8", "W2A2"], images=64
    )
    study = distances_of_sweep(sweep)
    assert study.samples == 64 and len(study.points) == 4
    assert study.points[-1].drop == pytest.approx(sweep.reference.score - sweep.points[-1].accuracy.score)
    mean = study.correlations[0]
    assert mean.spearman > 0.7  # two bits lose more than eight, by any measure


def test_the_command_and_one_of_the_commands_it_recommends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ptq", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        return int(exit_.value.code or 0), out, err

    assert run("calibrate", "--batches", "2")[0] == 0
    quick = ("--budget", "0.001", "--error-batches", "1", "--no-distances", "--no-remedies")
    code, out, err = run("analyze", "--bits", "W4A4", *quick)
    assert code == 0, err
    folder = Path("reports/digits")
    content = read_json(folder / "analysis.json")
    assert content["network"]["bits"] == "W4A4" and content["task"] == "digits"
    assert "features.1.expand.conv" in out and "weights" in out
    assert (folder / "analysis_layers.png").stat().st_size > 10_000
    assert content["sensitivities"]["samples"] == 32  # the budget ended after the first batch

    # What a remedy's commands leave in the folder is the network that is measured for it.
    layers = [layer["layer"] for layer in content["layers"]["layers"][:3]]
    scheme = Scheme(bits=Bits(4, 4), overrides=tuple((layer, Bits(8, 8)) for layer in layers))
    recipe = Recipe(scheme=scheme, batches=2, alpha="auto")
    commands = recipe.commands(Recipe(scheme=Scheme(bits=Bits(4, 4)), batches=2))
    assert [command.split()[1] for command in commands] == ["smooth", "quantize"]
    for command in commands:
        code, out, err = run(*shlex.split(command)[1:])
        assert code == 0, err
    task = resolve("digits")
    calibration = ptq.Calibration.load(folder / "calibration.safetensors")
    built = Kitchen(task.model, calibration, task.calibration).build(recipe)
    left = load_file(folder / "quantized.safetensors")
    assert {name: str(bits) for name, bits in built.bits.items() if str(bits) != "W4A4"} == dict.fromkeys(
        layers, "W8A8"
    )
    for name, tensor in built.model.state_dict().items():
        assert torch.equal(tensor, left[name]), name

    code, out, err = run("analyze", "--watch", "classifier")
    assert code == 0, err
    assert "SQNR" in out and "zeros" in out and "classifier" in out
    code, _, err = run("analyze", "--watch", "nowhere")
    assert code == 1 and "the model has none of that name" in err
    code, _, err = run("analyze", "--budget", "0")
    assert code == 1 and "above zero" in err and len(err.strip().splitlines()) == 1


def test_pictures(
    small_network: nn.Module, small_batches: list[Tensor], labelled: list[tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    from ptq.report.analysis_plots import analysis_tables, distances_figure, layer_errors_figure, remedies_figure

    calibration = ptq.calibrate(small_network, small_batches)
    quantized = ptq.quantize(small_network, calibration, bits="W4A4")
    analysis = ptq.analyze(
        small_network, quantized, calibration, small_batches, labelled, budget=0.001, distances=False
    )
    study = distances_of_grid(
        small_network, Kitchen(small_network, calibration, small_batches), labelled, widths=["W8A8", "W2A2", "W4A4"]
    )
    assert analysis.remedies is not None
    for name, figure in {
        "layers": layer_errors_figure(analysis, "layers"),
        "remedies": remedies_figure(analysis.remedies, "remedies"),
        "distances": distances_figure([study], "distances"),
    }.items():
        save(figure, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    heat_map = layer_errors_figure(analysis, "").axes[0]
    shown = heat_map.images[0].get_array()
    assert shown[0, 1] == pytest.approx(analysis.layers[0].isolated.weights.l1)
    assert shown[4, 5] == pytest.approx(analysis.layers[4].accumulated.activations.l1)
    assert len(analysis_tables(analysis)) == 3
