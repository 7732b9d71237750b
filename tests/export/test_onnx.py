"""The file against its simulation, the simulation against the run, and both on real data."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ptq
from ptq import channels
from ptq.calibration import Calibration
from ptq.errors import InputError
from ptq.export import OnnxModule, agreement, deployed, export_task, qdq
from ptq.export import onnx as exporting
from ptq.export.deployment import Deployment, prepare
from ptq.export.onnx import Candidate, Exported, choose, export, findings
from ptq.export.placement import Grid
from ptq.export.runtime import Agreement
from ptq.quantization import Quantized
from ptq.tasks import Task

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def quantized(digits: Task, digits_calibration: Calibration) -> Quantized:
    return ptq.quantize(digits.model, digits_calibration)


@pytest.fixture(scope="module")
def deployment(quantized: Quantized, digits: Task) -> Deployment:
    return prepare(quantized, next(iter(digits.evaluation)), digits.calibration)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def exported(quantized: Quantized, digits: Task, folder: Path) -> Exported:
    return export_task(quantized, folder, digits)


def unoptimized(content: bytes, x: Tensor) -> Tensor:
    """What the graph means, without onnxruntime's rewriting it into integer kernels."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


# The float graph -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 3, 32])
def test_the_float_graph_computes_what_the_model_does_at_any_batch_size(
    deployment: Deployment, digits: Task, samples: int
) -> None:
    images = next(iter(digits.evaluation))[0][:samples]
    expected = deployment.model(images)
    file = OnnxModule(deployment.graph.proto.SerializeToString())
    torch.testing.assert_close(file(images), expected, rtol=1e-4, atol=1e-4)


def test_the_file_says_nothing_about_the_machine_it_was_made_on(exported: Exported) -> None:
    content = exported.path.read_bytes()
    assert str(Path(ptq.__file__).parent).encode() not in content
    assert b"stack_trace" not in content


# The run's own numbers are in the file -------------------------------------------------------------------------------


def test_scales_and_codes_in_the_file_are_those_of_the_run(exported: Exported, quantized: Quantized) -> None:
    """Read with nothing but onnx: DequantizeLinear nodes before each Conv and Gemm."""
    proto = onnx.load(exported.path)
    onnx.checker.check_model(proto)
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    producers = {name: node for node in proto.graph.node for name in node.output}
    assert exported.variant in ("u8s8", "s8s8")
    offset = 128 if exported.variant == "u8s8" else 0
    checked = set()
    for node in proto.graph.node:
        if node.op_type not in ("Conv", "Gemm"):
            continue
        activation, weight, bias = (producers[name] for name in node.input)
        name = weight.input[0].removesuffix(".weight_quantized")
        layer = dict(channels.layers_of(quantized.model))[name]
        quantizer = layer.input_quantizer
        assert values[activation.input[1]] == quantizer.scale.numpy()
        assert values[activation.input[2]] == int(quantizer.zero_point) + offset
        codes, scales = values[weight.input[0]], values[weight.input[1]]
        assert codes.dtype == np.int8 and not values[weight.input[2]].any()
        np.testing.assert_array_equal(scales, layer.weight_scale.numpy())
        restored = codes * scales.reshape(-1, *(1 for _ in codes.shape[1:]))
        np.testing.assert_array_equal(restored, layer.weight.detach().numpy())
        assert values[bias.input[0]].dtype == np.int32
        step = values[bias.input[1]]
        np.testing.assert_allclose(step, quantizer.scale.numpy() * scales, rtol=1e-6)
        error = values[bias.input[0]] * step.astype(np.float64) - layer.bias.detach().numpy()
        assert (np.abs(error) <= 0.51 * step + 1e-6).all()
        checked.add(name)
    assert checked == set(quantized.bits)


def test_onnxruntime_runs_every_convolution_and_addition_in_integers(deployment: Deployment, tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(deployment.build(qdq.U8S8).content, options, providers=["CPUExecutionProvider"])
    operators = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    convolutions = sum(isinstance(module, nn.Conv2d) for module in deployment.model.modules())
    assert operators.count("QLinearConv") == convolutions
    assert operators.count("QLinearAdd") == 5  # residuals of the digits network
    assert operators.count("QGemm") == operators.count("QLinearGlobalAveragePool") == 1
    assert "Conv" not in operators and "Gemm" not in operators


# The simulation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", qdq.VARIANTS.values(), ids=lambda variant: variant.name)
def test_simulation_and_graph_agree_by_construction(deployment: Deployment, digits: Task, variant: qdq.Variant) -> None:
    """As the graph is written, before any kernel rounds in its own way: the same float operations, the same numbers."""
    built = deployment.build(variant)
    images = next(iter(digits.evaluation))[0]
    difference = (unoptimized(built.content, images) - built.simulation(images)).abs()
    step = 0.1  # a quantization step of a late layer moves logits by about that
    assert float(difference.max()) < step
    assert float(difference.median()) < 1e-4


def test_file_and_simulation_and_run_agree_on_the_task(exported: Exported, quantized: Quantized, digits: Task) -> None:
    measured = exported.agreement
    assert measured.samples == 450
    assert measured.same_top1 >= 99.5
    assert measured.top1 is not None and measured.reference_top1 is not None
    assert abs(measured.top1 - measured.reference_top1) <= 0.2
    file = ptq.evaluate(OnnxModule(exported.path), digits.evaluation)
    assert file.top1 == pytest.approx(measured.top1)
    simulated = ptq.evaluate(exported.simulation, digits.evaluation)
    assert simulated.top1 == pytest.approx(measured.reference_top1)
    run = ptq.evaluate(quantized.model, digits.evaluation)
    assert run.against(simulated).changed <= 5


def test_the_deployed_placement_is_the_simulation_of_the_file(
    quantized: Quantized, digits: Task, deployment: Deployment
) -> None:
    example = next(iter(digits.evaluation))
    network = deployed(quantized, example, digits.calibration)
    torch.testing.assert_close(network(example[0]), deployment.build(qdq.U8S8).simulation(example[0]))
    assert not torch.equal(network(example[0]), quantized.model(example[0]))  # additions are quantized too


def test_a_smoothing_that_did_not_fold_is_one_multiplication() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(48, 5)).eval()
    batches = [torch.randn(4, 2, 8, 8)]
    smoothed = ptq.smooth(model, ptq.calibrate(model, batches), alpha=0.5, form="hook")
    deployment = prepare(ptq.quantize(smoothed.model, smoothed.calibration), batches[0], batches)
    operators = [node.op_type for node in deployment.graph.proto.graph.node]
    assert operators.count("Mul") == len(smoothed.factors) and "Div" not in operators
    float_graph = OnnxModule(deployment.graph.proto.SerializeToString())
    torch.testing.assert_close(float_graph(batches[0]), deployment.model(batches[0]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(float_graph(batches[0]), model(batches[0]), rtol=0.1, atol=0.05)
    built = deployment.build(qdq.U8S8)
    torch.testing.assert_close(unoptimized(built.content, batches[0]), built.simulation(batches[0]))


def test_a_folded_smoothing_runs_in_integers(digits: Task, digits_calibration: Calibration, tmp_path: Path) -> None:
    """Folding gives ReLU6 a bound for each channel. Rounding in front of it on the same grid changes nothing."""
    smoothed = ptq.smooth(digits.model, digits_calibration, alpha=0.5)
    quantized = ptq.quantize(smoothed.model, smoothed.calibration)
    deployment = prepare(quantized, next(iter(digits.evaluation)), digits.calibration)
    built = deployment.build(qdq.U8S8)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(built.content, options, providers=["CPUExecutionProvider"])
    operators = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert "Conv" not in operators and operators.count("QLinearConv") == 23
    nodes = {node.output[0]: node for node in deployment.graph.proto.graph.node}
    bounded = [tensor for tensor in built.grids if nodes.get(tensor) is not None and nodes[tensor].op_type == "Min"]
    assert bounded
    for tensor in bounded:
        assert built.grids[nodes[tensor].input[0]] == built.grids[tensor]
    found = agreement(OnnxModule(built.content), built.simulation, digits.evaluation)
    assert found.holds and found.top1 is not None
    assert found.top1 >= ptq.evaluate(quantized.model, digits.evaluation).top1 - 0.3


class Everything(nn.Module):
    """Concatenation, split, max and average pooling, a tensor with two readers, a Linear on three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.left = nn.Conv2d(4, 4, 3, padding=1)
        self.right = nn.Conv2d(4, 4, 1)
        self.join = nn.Conv2d(8, 8, 1)
        self.down = nn.Conv2d(8, 8, 1, stride=2)
        self.mixed = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(self.stem(x).relu(), 2)
        one, two = x.chunk(2, 1)
        x = torch.cat([self.left(one).relu(), self.right(two)], 1)
        x = functional.avg_pool2d(x, 2)
        x = functional.relu6(self.join(x) + x)
        x = self.down(x).flatten(2).transpose(1, 2)  # [N, positions, 8]
        return self.head(functional.gelu(self.mixed(x)).mean(1))


@pytest.mark.parametrize("observer", ["max", "mse"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["affine", "symmetric"])
def test_other_operators(observer: str, symmetric: bool) -> None:
    torch.manual_seed(0)
    model = Everything().eval()
    batches = [torch.randn(16, 3, 16, 16) for _ in range(4)]
    calibration = ptq.calibrate(model, batches, observer)
    quantized = ptq.quantize(model, calibration, symmetric_activations=symmetric)
    deployment = prepare(quantized, batches[0], batches)
    built = deployment.build(qdq.S8S8 if symmetric else qdq.U8S8)
    for name, layer in channels.layers_of(quantized.model):
        inputs = [node.input for node in deployment.integer_layers if node.layer == name]
        assert [built.grids[tensor] for tensor in inputs] == [Grid.of(layer.input_quantizer)]
    fresh = torch.randn(64, 3, 16, 16)
    meant, simulated = unoptimized(built.content, fresh), built.simulation(fresh)
    assert float((meant - simulated).abs().median()) < 1e-5
    run, original = OnnxModule(built.content)(fresh), model(fresh)
    noise = float((quantized.model(fresh) - original).abs().mean())
    assert float((run - simulated).abs().mean()) < noise
    assert float((simulated - original).abs().mean()) < 3 * noise


def test_what_is_averaged_keeps_its_own_range() -> None:
    """Averages are smaller than what they are of: their reader's grid must not clip it."""

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.after(functional.avg_pool2d(self.before(x), 8)).flatten(1)

    torch.manual_seed(0)
    model, batches = Averaged().eval(), [torch.randn(8, 3, 16, 16)]
    deployment = prepare(ptq.quantize(model, ptq.calibrate(model, batches)), batches[0], batches)
    grids = deployment.build(qdq.U8S8).grids
    before, after = deployment.integer_layers
    values = model.before(batches[0])
    assert grids[before.output].low <= 0.98 * float(values.min())
    assert grids[before.output].high >= 0.98 * float(values.max())
    assert grids[after.input].high < 0.7 * grids[before.output].high


def test_layers_that_share_an_input_share_a_grid() -> None:
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) + self.two(x)

    batches = [torch.randn(8, 4)]
    model = Forked().eval()
    quantized = ptq.quantize(model, ptq.calibrate(model, batches))
    quantized.model.two.input_quantizer.set_range(-9.0, 9.0)
    deployment = prepare(quantized, batches[0], batches)
    assert any("shares its input" in note for note in deployment.notes)
    (grid,) = deployment.build(qdq.U8S8).grids.values()
    assert grid.low <= -8.9 and grid.high >= 8.9


# Where the file stands, and choosing among ways to store integers ----------------------------------------------------


def measured(same: float, top1: float, simulated: float) -> Agreement:
    return Agreement(
        samples=10_000, same_top1=same, largest_difference=1, largest_logit=20, top1=top1, reference_top1=simulated
    )


def candidate(variant: str, found: Agreement, one: float, sixteen: float) -> Candidate:
    return Candidate(variant=variant, bytes=1, agreement=found, milliseconds={1: one, 16: sixteen})


def test_a_saturating_kernel_is_not_chosen_however_fast() -> None:
    """ResNet-20 on a CPU without VNNI: 91.12 from u8s8 where 91.71 was promised, 91.74 from s8s8."""
    wrong = candidate("u8s8", measured(97.9, 91.12, 91.71), 0.55, 0.6)
    right = candidate("s8s8", measured(99.7, 91.74, 91.71), 0.95, 0.98)
    assert choose([wrong, right]) is right
    told = findings(right, [wrong, right], {}, saturates=True)
    assert any("16 bits" in text for text in told) and any("97.90 %" in text for text in told)


def test_a_reduced_range_is_chosen_where_it_is_fast_and_costs_nothing() -> None:
    reduced = candidate("u8s8-reduced", measured(99.8, 91.65, 91.66), 0.6, 0.6)
    signed = candidate("s8s8", measured(99.8, 91.74, 91.71), 0.95, 0.98)
    assert choose([reduced, signed]) is reduced
    worse = candidate("u8s8-reduced", measured(99.8, 91.4, 91.4), 0.6, 0.6)
    assert choose([worse, signed]) is signed


def test_the_first_of_equally_fast_ones_and_the_best_of_bad_ones() -> None:
    one, two = (candidate(name, measured(100, 90, 90), ms, ms) for name, ms in (("a", 1.01), ("b", 1.0)))
    assert choose([one, two]) is one
    bad, worse = (candidate(name, measured(90, top1, 92), 1, 1) for name, top1 in (("a", 88), ("b", 85)))
    assert choose([worse, bad]) is bad


def test_int8_slower_than_float_is_a_finding() -> None:
    chosen = candidate("u8s8", measured(100, 90, 90), 2, 1)
    times = {1: {"int8 ONNX": 2.0, "float ONNX": 1.0}, 16: {"int8 ONNX": 1.0, "float ONNX": 2.0}}
    told = findings(chosen, [chosen], times, saturates=False)
    assert told == ["int8 is slower than float ONNX at batch 1: 2.00 of its time"]


def test_all_ways_are_measured_where_products_saturate(
    quantized: Quantized, digits: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "u8s8_saturates", lambda: True)  # a fact about another CPU
    result = export(
        quantized,
        tmp_path / "a.onnx",
        next(iter(digits.evaluation)),
        labelled_batches=digits.evaluation,
        batch_sizes=(),
    )
    assert [candidate.variant for candidate in result.candidates] == ["u8s8", "u8s8-reduced", "s8s8"]
    assert all(candidate.agreement.holds for candidate in result.candidates)
    assert any("saturate" in text for text in result.findings)


def test_reduced_weights_have_seven_bits(deployment: Deployment) -> None:
    proto = onnx.load_from_string(deployment.build(qdq.U8S7).content)
    weights = [t for t in proto.graph.initializer if t.name.endswith(".weight_quantized")]
    assert weights
    assert all(np.abs(onnx.numpy_helper.to_array(t).astype(int)).max() <= 63 for t in weights)


# The folder ----------------------------------------------------------------------------------------------------------


def test_the_folder_has_the_measurements(exported: Exported, folder: Path) -> None:
    result = json.loads((folder / "export.json").read_text())
    assert result["bytes"] == exported.path.stat().st_size < 0.65 * result["float_bytes"]
    assert set(result["milliseconds"]) == {"1", "16"}
    for times in result["milliseconds"].values():
        assert set(times) == {"int8 ONNX", "float ONNX", "eager torch"} and all(ms > 0 for ms in times.values())
    assert result["agreement"]["same_top1"] >= 99.5
    assert len(result["layers"]["integer"]) == 24 and not result["layers"]["float"]
    assert sorted(path.name for path in folder.iterdir()) == ["export.json", "model.int8.onnx", "model.json", "run.py"]


def test_the_script_runs_without_ptq_and_torch(exported: Exported, folder: Path, digits: Task, tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    data = load_digits()
    raw = functional.interpolate(torch.from_numpy(data.images[:40:4])[:, None].float(), (16, 16), mode="bilinear")
    np.save(tmp_path / "images.npy", raw[:, 0].numpy())
    script = (folder / "run.py").read_text()
    assert len([line for line in script.splitlines() if line.strip()]) <= 24
    alone = "import sys; sys.modules.update(torch=None, ptq=None); sys.argv = sys.argv[1:]; " \
        "import runpy; runpy.run_path(sys.argv[0])"  # fmt: skip
    finished = subprocess.run(
        [sys.executable, "-c", alone, str(folder / "run.py"), str(tmp_path / "images.npy")],
        capture_output=True,
        text=True,
        check=True,
    )
    answers = [line.split()[0] for line in finished.stdout.splitlines()]
    assert answers == [str(label) for label in data.target[:40:4]]


# Bad input -----------------------------------------------------------------------------------------------------------


def linear(**options: object) -> tuple[Quantized, Tensor]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    batches = [torch.randn(8, 4)]
    return ptq.quantize(model, ptq.calibrate(model, batches), **options), batches[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": "W8A4"}, "0: can't be exported, activations of 4 bits"),
        ({"bits": "W16A8"}, "0: can't be exported, weights of 16 bits"),
        ({"weight_format": "affine:bits=4,group=2"}, "no format of ONNX"),
        ({"weights": None, "activations": 8}, "integer activations need integer weights"),
    ],
)
def test_what_onnx_has_no_integers_for(tmp_path: Path, options: dict[str, object], message: str) -> None:
    quantized, example = linear(**options)
    with pytest.raises(InputError, match=message) as caught:
        export(quantized, tmp_path / "model.onnx", example)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"opset": 7}, "opset 7: choose one from"),
        ({"target": "toaster"}, "target 'toaster' is unknown"),
        ({"variant": "u4"}, "variant 'u4' is unknown"),
        ({"target": "tensorrt", "variant": "u8s8"}, "takes s8s8 only"),
    ],
)
def test_options_that_do_not_exist(tmp_path: Path, change: dict[str, object], message: str) -> None:
    quantized, example = linear()
    with pytest.raises(InputError, match=message):
        export(quantized, tmp_path / "model.onnx", example, **change)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    quantized, example = linear()
    (tmp_path / "taken").write_text("a file where a folder should be")
    with pytest.raises(InputError, match="can't write there"):
        export(quantized, tmp_path / "taken" / "model.onnx", example, batch_sizes=())
    with pytest.raises(InputError, match=r"ends in \.onnx"):
        export(quantized, tmp_path / "model.int8", example)


class Unexportable(nn.Module):
    def __init__(self, why: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.why = why

    def forward(self, x: Tensor) -> Tensor:
        return self.why(self.layer(x))


@pytest.mark.parametrize(
    "why",
    [
        lambda x: torch.linalg.pinv(x)[:, :1].T.expand(len(x), 3),  # an operator that ONNX lacks
        lambda x: x * 2 if float(x.detach().sum()) > 0 else x,  # a decision on data
    ],
    ids=["operator", "control flow"],
)
def test_a_model_that_cannot_be_exported_is_one_line(tmp_path: Path, why: Callable[[Tensor], Tensor]) -> None:
    model = Unexportable(why).eval()
    batches = [torch.randn(8, 4)]
    quantized = ptq.quantize(model, ptq.calibrate(model, batches))
    with pytest.raises(InputError, match="can't be exported to ONNX: ") as caught:
        export(quantized, tmp_path / "model.onnx", batches[0])
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_earlier_file_survives_a_failure(tmp_path: Path) -> None:
    quantized, example = linear()
    path = tmp_path / "model.onnx"
    export(quantized, path, example, batch_sizes=())
    before = path.read_bytes()
    with pytest.raises(InputError, match="no batch"):
        export(quantized, path, example, labelled_batches=[], batch_sizes=())
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_a_batchnorm_that_was_kept_is_refused(
    tmp_path: Path, random_batchnorms: Callable[[nn.Module], nn.Module]
) -> None:
    model = random_batchnorms(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()))
    batches = [torch.randn(4, 3, 8, 8)]
    quantized = ptq.quantize(model, ptq.calibrate(model, batches), keep_batchnorm=True)
    with pytest.raises(InputError, match="0: the exporter merged a BatchNorm"):
        export(quantized, tmp_path / "model.onnx", batches[0])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) + x).flatten(1)


def test_ranges_from_the_example_alone_are_said(tmp_path: Path) -> None:
    model, example = Residual().eval(), torch.randn(4, 3, 8, 8)
    quantized = ptq.quantize(model, ptq.calibrate(model, [example]))
    result = export(quantized, tmp_path / "m.onnx", example, batch_sizes=())
    assert any("the example alone" in text for text in result.findings)
    assert not any("alone" in note for note in prepare(quantized, example, [example]).notes)
    with pytest.raises(InputError, match="the calibration lacks this tensor"):
        prepare(quantized, example, [])


class Encoder(nn.Module):
    """Token embeddings, one attention over the unmasked ones, a residual, LayerNorm and a head: keyword inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 4
        scores = scores.masked_fill(attention_mask[:, None] == 0, -1e9)
        hidden = self.norm(x + scores.softmax(-1) @ self.value(x))
        return {"hidden": hidden, "logits": self.head(hidden.mean(1))}


def test_keyword_inputs_integers_and_several_outputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Encoder().eval()
    batches = [
        {
            "input_ids": torch.randint(0, 50, (8, 6)),
            "attention_mask": (torch.arange(6) < torch.randint(2, 7, (8, 1))).long(),
            "labels": torch.randint(0, 4, (8,)),
        }
        for _ in range(4)
    ]
    quantized = ptq.quantize(model, ptq.calibrate(model, batches))
    result = export(
        quantized, tmp_path / "m.onnx", batches[0], batches=batches, labelled_batches=batches, batch_sizes=(1,)
    )
    assert result.inputs == ("input_ids", "attention_mask") and result.output == 1
    assert result.agreement.same_top1 >= 96  # of 32: one near tie at most
    proto = onnx.load(result.path)
    weights = [tensor for tensor in proto.graph.initializer if tensor.data_type == 3 and len(tensor.dims) == 2]
    assert len(weights) == 4
