"""Our ranges in NVIDIA's quantizers and back, against ModelOpt's own arithmetic."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq.calibration import Calibration
from ptq.errors import InputError, MismatchError
from ptq.export import nvidia
from ptq.hooks import attached
from ptq.tasks import Task

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ModelOpt tells which plugins it can't load
    modelopt = pytest.importorskip("modelopt.torch.quantization")


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def batches() -> list[Tensor]:
    return [torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(196, 5)
    ).eval()


@pytest.mark.parametrize("bits", ["W8A8", "W4A8", "W8"])
def test_modelopt_computes_what_we_do(model: nn.Module, batches: list[Tensor], bits: str) -> None:
    quantized = ptq.quantize(model, ptq.calibrate(model, batches), bits=bits, symmetric_activations=True)
    theirs = nvidia.with_nvidia_quantizers(quantized)
    kinds = {type(module).__name__ for module in theirs.modules()}
    assert {"QuantConv2d", "QuantLinear", "TensorQuantizer"} <= kinds
    for batch in batches:
        torch.testing.assert_close(theirs(batch), quantized.model(batch), rtol=0, atol=1e-5)


def inputs_of(model: nn.Module, names: Iterable[str], images: Tensor) -> dict[str, Tensor]:
    """What each layer reads, before its quantizer."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, args: seen.update({name: args[0]})

    with attached(
        model.get_submodule(f"{name}.input_quantizer").register_forward_pre_hook(keep(name)) for name in names
    ):
        model(images)
    return seen


def test_on_the_task_smoothed_or_not(digits: Task, digits_calibration: Calibration) -> None:
    """Each quantizer on the same input. ModelOpt multiplies by 127 / amax where we divide by the scale: values half
    way between two codes, which the last bit of that decides, may go to the other one."""
    images = next(iter(digits.evaluation))[0]
    smoothed = ptq.smooth(digits.model, digits_calibration, alpha=0.5)
    tables = []
    for source, calibration in ((digits.model, digits_calibration), (smoothed.model, smoothed.calibration)):
        quantized = ptq.quantize(source, calibration, symmetric_activations=True)
        theirs = nvidia.with_nvidia_quantizers(quantized)
        tables.append(nvidia.amax_table(theirs))
        assert tables[-1].keys() == nvidia.amax_of(quantized).keys()
        for name, x in inputs_of(quantized.model, quantized.bits, images).items():
            ours = quantized.model.get_submodule(f"{name}.input_quantizer")
            difference = (theirs.get_submodule(f"{name}.input_quantizer")(x) - ours(x)).abs()
            steps = x / ours.scale
            half_way = ((steps - steps.floor()) - 0.5).abs() < 1e-4
            assert float(difference[~half_way].max()) <= 1e-5
            layer, other = quantized.model.get_submodule(name), theirs.get_submodule(name)
            restored = other.get_submodule("weight_quantizer")(other.weight)
            torch.testing.assert_close(restored, layer.weight, rtol=0, atol=1e-5)
        assert float((theirs(images) - quantized.model(images)).abs().median()) < 1e-5
    before, after = tables
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_an_amax_table_of_modelopts_own_calibration_becomes_ours(model: nn.Module, batches: list[Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = modelopt.quantize(
            nvidia._bare_copy(model),
            modelopt.INT8_DEFAULT_CFG,
            forward_loop=lambda network: [network(batch) for batch in batches],
        )
    calibration = ptq.calibrate(model, batches)
    table = nvidia.amax_table(theirs)
    for name, amax in nvidia.amax_of_calibration(calibration).items():
        torch.testing.assert_close(table[name], amax)  # both saw the same maxima
    quantized = ptq.quantize(model, calibration, symmetric_activations=True)
    halved = {name: amax / 2 for name, amax in table.items()}
    nvidia.set_ranges(quantized, halved)
    assert float(quantized.model.get_submodule("0").input_quantizer.scale) == pytest.approx(
        float(table["0.input_quantizer"]) / 2 / 127
    )
    nvidia.load_amax(theirs, halved)
    torch.testing.assert_close(nvidia.amax_table(theirs)["0.input_quantizer"], halved["0.input_quantizer"])


def test_unsigned_inputs(batches: list[Tensor]) -> None:
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 3)).eval()
    quantized = ptq.quantize(model, ptq.calibrate(model, batches))
    assert int(quantized.model.get_submodule("1").input_quantizer.zero_point) == -128
    theirs = nvidia.with_nvidia_quantizers(quantized)
    torch.testing.assert_close(theirs(batches[0]), quantized.model(batches[0]), rtol=0, atol=1e-5)


def test_a_diffused_image_is_refused(batches: list[Tensor]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 5), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    calibration = ptq.calibrate(model, batches)
    made = ptq.quantize(model, calibration, bits="W8A3", symmetric_activations=True, refine="fast", batches=batches)
    assert made.diffused
    with pytest.raises(InputError, match=r"0: its image is diffused.* --no-diffuse"):
        nvidia.amax_of(made)


def test_zero_points_of_weights_are_refused(model: nn.Module, batches: list[Tensor]) -> None:
    calibration = ptq.calibrate(model, batches)
    options = {"bits": "W4A8", "symmetric_activations": True, "refine": "fast", "batches": batches}
    with pytest.raises(InputError, match=r"0: its weights have zero-points.* symmetric weights"):
        nvidia.amax_of(ptq.quantize(model, calibration, **options))
    symmetric = ptq.quantize(model, calibration, symmetric_weights=True, **options)
    assert set(nvidia.amax_of(symmetric)) >= {"0.weight_quantizer", "0.input_quantizer"}


def test_what_does_not_fit_is_named(model: nn.Module, batches: list[Tensor]) -> None:
    calibration = ptq.calibrate(model, batches)
    with pytest.raises(InputError, match=r"0: its input has zero-point .* symmetric activations"):
        nvidia.amax_of(ptq.quantize(model, calibration))
    with pytest.raises(InputError, match="no quantizer of the model has an amax"):
        nvidia.amax_table(model)
    theirs = nvidia.with_nvidia_quantizers(ptq.quantize(model, calibration, symmetric_activations=True))
    with pytest.raises(MismatchError, match=r"9\.input_quantizer: the model has no such quantizer"):
        nvidia.load_amax(theirs, {"9.input_quantizer": torch.tensor(1.0)})
    with pytest.raises(MismatchError, match="granularity"):
        nvidia.load_amax(theirs, {"0.weight_quantizer": torch.ones(9)})
