"""What the report says: the verdict, and the sections of comparisons, analysis and export."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from markupsafe import Markup
from scipy.stats import chi2
from torch import nn

from ptq.analysis.measuring import Answers
from ptq.analysis.outliers import OutlierChannel, Outliers
from ptq.analysis.prediction import Correlation, DistancePoint, DistanceStudy
from ptq.analysis.remedies import Remedies, Remedy
from ptq.analysis.sensitivity import Effect, LayerSensitivity, Sensitivities
from ptq.export import Agreement, Exported
from ptq.quantization import Bits, Scheme
from ptq.report.page import RunFiles, render
from ptq.report.page.findings import findings
from ptq.report.page.results import export_section, results
from ptq.report.page.retracing import commands
from ptq.report.page.scores import Score
from ptq.report.page.verdict import verdict
from ptq.sizing import Drift, SizePoint, SizeStudy
from ptq.sweeping import Accuracy, Sweep, SweepPoint
from ptq.training.baselines import Baseline
from ptq.training.comparison import Compared, Comparison
from ptq.training.precision import Precision, Precisions
from ptq.training.precision import Score as PrecisionScore
from ptq.training.record import RankCorrelation

N = 1000


def network(name: str, top1: float, lost: int | None = None, gained: int = 0) -> dict[str, Any]:
    """A row of evaluation.json."""
    paired = None if lost is None else {"changed": lost + gained + 3, "lost": lost, "gained": gained}
    interval = [top1 - 1.5, min(100.0, top1 + 1.5)]
    scores = {"top1": top1, "top5": 99.5, "interval": interval, "n": N, "metric": "top1"}
    return {"name": name, **scores, "against_float": paired}


def evaluated(*networks: dict[str, Any], bits: str = "W4A4") -> RunFiles:
    scheme = Scheme(bits=Bits.parse(bits)).to_json()
    evaluation = {"kind": "evaluation", "task": "digits", "scheme": scheme, "networks": networks, "layers": {}}
    return RunFiles(folder=Path("reports/digits"), evaluation=evaluation)


def sentences(files: RunFiles) -> tuple[str, str]:
    first, second = (Markup(part).striptags().replace("\u00a0", " ") for part in verdict(files))
    return first, second


def swept(points: dict[tuple[str, Any], float], reference: float = 92.0) -> Sweep:
    def accuracy(score: float) -> Accuracy:
        return Accuracy(metric="top1", score=score, interval=(score - 1, score + 1), n=N)

    return Sweep(
        "model",
        "data",
        reference=accuracy(reference),
        points=[
            SweepPoint(bits=bits, alpha=alpha, accuracy=accuracy(score), changed=5, layer_l1={"layer": 0.1})
            for (bits, alpha), score in points.items()
        ],
    )


@pytest.mark.parametrize(("lost", "gained"), [(8, 0), (5, 2), (60, 41), (40, 41), (0, 0), (0, 9)])
def test_a_difference_is_one_where_mcnemar_s_test_says_so(lost: int, gained: int) -> None:
    score = Score.of_network(network("W4A4", 90.0, lost, gained))
    changed = lost + gained
    p = chi2.sf((lost - gained) ** 2 / changed, df=1) if changed else 1.0
    assert score.differs == (p < 0.05)


def test_the_verdict_tells_accuracy_interval_gap_and_gain() -> None:
    files = evaluated(
        network("float", 92.0), network("W4A4", 80.0, 130, 10), network("W4A4, smoothed α=0.5", 88.0, 50, 10)
    )
    first, second = sentences(files)
    assert first == (
        "At W4A4 this network reaches 88.00 % top-1 accuracy (86.50 … 89.50), 4.00 points below float’s 92.00 % "
        "(90.50 … 93.50) on the same 1,000 samples; without smoothing it is 80.00 %, so smoothing gave +8.00 points."
    )
    assert second.startswith("Let rounding make up for its own errors, ptq quantize --bits W4A4 --refine best")


def test_the_verdict_claims_no_more_than_the_samples_do() -> None:
    files = evaluated(network("float", 92.0), network("W4A4", 91.6, 8, 4), network("W4A4, smoothed α=0.5", 91.8, 7, 5))
    first, second = sentences(files)
    assert "−0.20 points and no measurable difference from float’s" in first
    assert "smoothing gave +0.20 points, which 1,000 samples can’t tell from chance" in first
    assert second == (
        "These bits are enough; runtimes compute activations in 8, so for a file that runs take "
        "ptq quantize --bits W4A8 and ptq export."
    )


def test_smoothing_that_hurts_is_left_out() -> None:
    files = evaluated(
        network("float", 92.0), network("W4A4", 88.0, 50, 10), network("W4A4, smoothed α=0.5", 80.0, 130, 10)
    )
    assert sentences(files)[1] == "Leave smoothing out here: ptq quantize --bits W4A4 --no-smooth."


def test_what_is_as_good_as_float_at_8_bits_is_shipped() -> None:
    files = evaluated(network("float", 92.0), network("W8A8", 91.9, 3, 2), bits="W8A8")
    assert sentences(files)[1] == "Ship it: ptq export writes the ONNX file and measures that."
    shipped = replace(files, export=exported(int8=0.5))
    assert sentences(shipped)[1] == (
        "Ship it: export/model.int8.onnx answers as its simulation on 99.80 % of the samples and takes 0.25 of float "
        "ONNX’s time at batch 1."
    )
    assert "but takes 2.00 of float" in sentences(replace(files, export=exported(int8=4.0)))[1]


def test_the_sweep_knows_a_better_way_or_enough_bits() -> None:
    files = evaluated(network("float", 92.0), network("W4A4", 80.0, 130, 10))
    better = swept({("W4A4", None): 80.0, ("W4A4", "auto+clip"): 86.0, ("W8A8", None): 92.0})
    assert sentences(replace(files, sweep=better))[1] == (
        "The sweep has a better way at these bits, α by layer and clipped ranges with 86.00 %: "
        "ptq smooth --alpha auto --bits W4A4 --clip && ptq quantize --bits W4A4."
    )
    wider = swept({("W4A4", 0.5): 80.5, ("W6A6", None): 91.2, ("W6A6", 0.5): 91.7, ("W8A8", None): 92.0})
    assert sentences(replace(files, sweep=wider))[1] == (
        "The fewest bits of the sweep within a point of float are W6A6, α = 0.5 with 91.70 %: "
        "ptq smooth --alpha 0.5 && ptq quantize --bits W6A6."
    )


def test_a_sweep_alone_has_a_verdict() -> None:
    sweep = swept({("W8A8", None): 92.0, ("W4A4", None): 70.0, ("W4A4", 0.5): 75.0})
    first, second = sentences(RunFiles(folder=Path("reports/digits"), sweep=sweep))
    assert first.startswith("At W4A4 the best of the sweep, α = 0.5, reaches 75.00 %")
    assert second.startswith("The fewest bits within a point of float are W8A8, not smoothed with 92.00 %")


def answers(seed: int, right: float) -> Answers:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (200,), generator=torch.Generator().manual_seed(0))
    wrong = torch.rand(200, generator=generator) > right
    logits = nn.functional.one_hot(torch.where(wrong, (labels + 1) % 10, labels), 10) * 4.0
    return Answers.of(logits + torch.randn(200, 10, generator=generator) / 10, labels, "top1")


def analysed() -> dict[str, Any]:
    """An analysis.json made of the analysis' own parts."""
    before, after = answers(1, 0.7), answers(2, 0.95)
    effect = Effect.between(before, after)
    remedy = Remedy(
        name="refine fast", commands=["ptq quantize --refine fast"], answers=after, effect=effect, seconds=1.0
    )
    remedies = Remedies(reference=after, quantized=before, tried=[remedy], skipped={"ranges by mse": "no histograms"})
    layers = [LayerSensitivity(layer=f"layer{i}", enable=effect, disable=effect) for i in range(12)]
    channel = OutlierChannel(channel=7, magnitude=31.5, times_median=21.0, share=0.6)
    outliers = Outliers(layer="layer3", channels=64, count=1, listed=[channel], median=1.5, share=0.6, finer=2.5)
    points = [
        DistancePoint(
            bits=bits, alpha=alpha, distances={"isolated L1, mean": value}, drop=10 * value, loss_increase=value
        )
        for bits, alpha, value in (("W8A8", None, 0.01), ("W4A4", 0.5, 0.2), ("W4A4", "auto", 0.15))
    ]
    correlation = Correlation(
        distance="isolated L1, mean", spearman=0.93, interval=(0.8, 0.99), within=None, with_loss=1.0
    )
    study = DistanceStudy(source="grid", metric="top1", samples=200, points=points, correlations=[correlation])
    found = Sensitivities(samples=200, seconds=1.0, reference=after, quantized=before, layers=layers)
    content = {
        "kind": "analysis",
        "schema": 1,
        "network": {"bits": "W4A4", "scheme": Scheme(bits=Bits(4, 4)).to_json(), "observer": "max", "alpha": None},
        "budget": 60.0,
        "layers": {"samples": 8, "layers": []},
        "outliers": [outliers.to_json()],
        "sensitivities": found.to_json(),
        "remedies": remedies.to_json(),
        "distances": [study.to_json()],
    }
    read: dict[str, Any] = json.loads(json.dumps(content))
    return read


def rows(blocks: list[Any], id: str) -> list[list[str]]:
    """The texts of the table with this id, wherever it stands."""
    part = next(part for block in blocks for part in block.parts if part.id == id)
    return [[cell.text or " && ".join(cell.lines) for cell in row] for row in part.table.rows]


def test_the_analysis_says_what_helps_and_the_verdict_repeats_it() -> None:
    analysis = analysed()
    files = replace(evaluated(network("float", 92.0), network("W4A4", 80.0, 130, 10)), analysis=analysis)
    (remedy,) = rows(findings(files), "remedies-table")
    gain = analysis["remedies"]["tried"][0]["change"]["score"]["change"]
    assert gain > 10
    assert (remedy[0], remedy[1], remedy[5], remedy[6]) == (
        "refine fast", f"+{gain:.2f}", "yes", "ptq quantize --refine fast",
    )  # fmt: skip
    assert sentences(files)[1] == (
        f"What helped most here, measured, is “refine fast” (+{gain:.2f} points): ptq quantize --refine fast."
    )
    assert "What helped" not in sentences(replace(files, analysis={**analysis, "network": {"bits": "W8A8"}}))[1]


def test_the_analysis_shows_layers_channels_and_distances() -> None:
    blocks = findings(replace(evaluated(network("float", 92.0)), analysis=analysed()))
    assert [block.id for block in blocks] == ["remedies", "sensitivity", "outliers", "distances"]
    assert len(rows(blocks, "sensitivity-table")) == 10, "the others are behind a line to open"
    assert rows(blocks, "outliers-table") == [["layer3", "64", "1", "60", "1.32", "7 (21.0×)"]]
    assert rows(blocks, "distances-grid") == [["isolated L1, mean", "+0.93", "+0.80 … +0.99", "", "+1.00"]]
    chart = next(part.chart for part in blocks[-1].parts)
    assert chart.count("<circle") == 3 + 2, "a dot for each network, and one for each width in the key"
    assert "W4A4, α by layer: isolated L1, mean 0.15, 1.50 points lost" in chart


def exported(int8: float) -> dict[str, Any]:
    agreement = Agreement(
        samples=N, same_top1=99.8, largest_difference=0.05, largest_logit=12.0, top1=91.0, reference_top1=91.1
    )
    times = {1: {"int8 ONNX": int8, "float ONNX": 2.0, "eager torch": 5.0}}
    content = Exported(
        path=Path("model.int8.onnx"), target="onnxruntime", opset=20, variant="u8s8", bytes=1000, float_bytes=4000,
        agreement=agreement, milliseconds=times, candidates=(), layers={}, quantized_tensors=9, cpu={"model": "a CPU"},
        findings=("u8s8 chosen",), simulation=nn.Identity(), inputs=("x",), output=0,
    ).to_json()  # fmt: skip
    return {**content, "task": "digits", "scheme": Scheme().to_json()}


def test_the_export_shows_parity_and_latency() -> None:
    (block,) = export_section(RunFiles(folder=Path("x"), export=exported(int8=0.5)))
    facts = dict(block.parts[0].pairs)
    assert facts["file"] == "export/model.int8.onnx, 1,000 bytes, 0.25 of the float file"
    assert facts["equal answers"] == "99.80 % of file and simulation, 1,000 samples"
    assert rows([block], "latency-table") == [["1", "0.500", "2.000", "5.000", "0.25"]]


def test_other_ways_are_read_from_their_files_and_shown(tmp_path: Path) -> None:
    folder = tmp_path / "reports" / "digits"
    common: dict[str, Any] = {"interval": (88.0, 92.0), "n": N, "layers": {}, "weight_bytes": 1234, "float_score": 92.0}
    missing: dict[str, Any] = {"l1": None, "accumulated_l1": None, "seconds": None, "images": None}
    trained: dict[str, Any] = {"l1": 0.1, "accumulated_l1": 0.25, "seconds": 61.0, "images": 50_000}
    Comparison(
        task="digits",
        metric="top1",
        rows=[
            Compared(name="float", training="ptq", bits="float", score=92.0, **common, **missing),
            Compared(name="qat-W4A4", training="qat", bits="W4A4", score=91.0, **common, **trained),
        ],
        correlations={"pipeline": {"forward l1": RankCorrelation(value=-0.9, interval=(-1.0, -0.6), runs=8)}},
    ).save(folder / "compare.json")
    high, low = (PrecisionScore(score=score, interval=(score - 2, score + 2)) for score in (91.0, 11.0))
    Precisions(
        task="digits",
        metric="top1",
        n=N,
        rows=[
            Precision(name="half", weights_only=high, with_activations=high, undequantized=None, weight_bytes=500),
            Precision(name="4", weights_only=high, with_activations=high, undequantized=low, weight_bytes=150),
        ],
    ).save(folder / "compare_bits.json")
    Baseline(
        training="qat", task="digits", metric="top1", score=91.0, interval=(89.0, 93.0), n=N, seconds=61.0,
        seconds_per_step=0.1, images=50_000, recipe={"epochs": 5, "learning_rate": 0.01, "seed": 3},
        settings={"scheme": Scheme(bits=Bits(4, 4)).to_json(), "steps": "learned", "freeze_after": None},
    ).save(folder / "baselines" / "qat-W4A4")  # fmt: skip
    accuracy = Accuracy(metric="top1", score=90.0, interval=(88.0, 92.0), n=N)
    drift = Drift(batches=4, tensors_median=0.1, tensors_max=0.2, channels_median=0.1, channels_max=0.3)
    point = SizePoint(batches=4, samples=128, bits="W4A4", alpha=None, accuracy=accuracy)
    study = SizeStudy(observer="max", reference=accuracy, drifts=[drift], points=[point])
    (folder / "calibration_sizes.json").write_text(json.dumps(study.to_json()))

    files = RunFiles.read(folder)
    blocks = results(files)
    assert [block.id for block in blocks] == ["compare", "precisions", "baselines", "sizes"]
    assert rows(blocks, "compare-table")[1][:4] == ["qat-W4A4", "W4A4", "91.00", "88.00 … 92.00"]
    assert rows(blocks, "compare-table")[1][5:] == ["92.00", "0.1000", "0.2500", "1,234", "61", "50,000"]
    assert rows(blocks, "precisions-table")[1][::2][:4] == ["4 bits", "89.00 … 93.00", "89.00 … 93.00", "9.00 … 13.00"]
    assert rows(blocks, "baselines-table") == [["qat-W4A4", "qat", "W4A4", "91.00", "89.00 … 93.00", "1000", "61", ""]]
    assert rows(blocks, "sizes-table") == [["4", "128", "W4A4", "none", "90.00", "88.00 … 92.00"]]
    page = render(files)
    assert "−0.90" in page and "forward l1" in page
    assert re.search(r"<dt>baseline qat-W4A4</dt><dd>3</dd>", page)
    assert "ptq compare --bits W4A4" in commands(files) and "ptq compare --bits half,4" in commands(files)
    assert "ptq train qat --bits W4A4 --steps learned --epochs 5 --learning-rate 0.01 --name qat-W4A4" in commands(
        files
    )


def test_a_training_is_told_with_all_that_was_said(tmp_path: Path) -> None:
    recipe = {"epochs": 2, "learning_rate": 0.1, "batch_size": 64, "micro_batches": 4, "images": 512, "tokens": None}
    settings: dict[str, dict[str, Any]] = {
        "pipeline": {"split": ["a", "b"], "schedule": "1f1b", "activations": "affine:bits=8", "gradients": None},
        "ddp": {
            "ranks": 3, "form": "alq:bits=3", "error_feedback": True, "normalised": True, "record_every": None,
            "updates": {"at": [5], "every": 50},
        },
    }  # fmt: skip
    for kind, said in settings.items():
        Baseline(
            training=kind, task="digits", metric="top1", score=91.0, interval=(89.0, 93.0), n=N, seconds=61.0,
            seconds_per_step=0.1, images=50_000, recipe={**recipe, "label_smoothing": 0.1}, settings=said,
        ).save(tmp_path / "baselines" / kind)  # fmt: skip
    same = "--epochs 2 --learning-rate 0.1 --batch 64 --images 512 --label-smoothing 0.1"
    where = "--run " + tmp_path.name
    found = [command for command in commands(RunFiles.read(tmp_path)) if " train " in command]
    assert found == [
        f"ptq train ddp --ranks 3 --gradients alq:bits=3 --update-levels 5,50 --error-feedback --normalised {same}"
        f" --name ddp {where}",
        "ptq train pipeline --schedule 1f1b --activations affine:bits=8 --split a --split b --stages 3"
        f" --micro-batches 4 {same} --name pipeline {where}",
    ]
