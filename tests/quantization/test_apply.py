"""Quantized networks: on the grid, with the bits that were asked for, and back from a file."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq.errors import InputError, MismatchError
from ptq.quantization import FakeQuantize


@pytest.fixture
def calibration(small_network: nn.Module, small_batches: list[Tensor]) -> ptq.Calibration:
    return ptq.calibrate(small_network, small_batches)


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_a_linear_layer_equals_integer_arithmetic(bits: int) -> None:
    """The fake-quantized layer gives what integers give: codes multiplied as int64, scaled once at the end."""
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 8), torch.randn(32, 16)
    quantized = ptq.quantize(layer, ptq.calibrate(layer, [x]), bits, bits).model

    w, half = layer.weight.detach().double().numpy(), 2 ** (bits - 1)
    w_scale = (np.abs(w).max(1, keepdims=True) / (half - 1)).astype(np.float32)
    w_codes = np.clip(np.rint(w.astype(np.float32) / w_scale), 1 - half, half - 1).astype(np.int64)
    low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
    x_scale = np.float32((high - low) / (2**bits - 1))
    zero = np.clip(np.rint(-half - low / ((high - low) / (2**bits - 1))), -half, half - 1).astype(np.int64)
    x_codes = np.clip(np.rint(x.numpy() / x_scale) + zero, -half, half - 1).astype(np.int64)
    expected = ((x_codes - zero) @ w_codes.T) * (x_scale * w_scale.T) + layer.bias.detach().numpy()
    np.testing.assert_allclose(quantized(x).detach().numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["stem", "depthwise", "grouped", "up", "head"])
def test_each_output_channel_has_few_values_on_its_own_grid(
    name: str, small_network: nn.Module, calibration: ptq.Calibration
) -> None:
    layer = ptq.quantize(small_network, calibration, weights=3, activations=8).model.get_submodule(name)
    weight = layer.weight.detach()
    if isinstance(layer, nn.ConvTranspose2d):  # [in, out/groups, …] → [out, …]
        weight = torch.cat([part.transpose(0, 1) for part in weight.chunk(layer.groups)])
    steps = weight.flatten(1) / layer.weight_scale[:, None]
    torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0)
    assert steps.abs().amax(1).round().tolist() == [3] * len(steps)


def test_many_bits_change_little_and_few_change_much(
    small_network: nn.Module, calibration: ptq.Calibration, small_batches: list[Tensor]
) -> None:
    expected = small_network(small_batches[0])

    def error(bits: str) -> float:
        found = ptq.quantize(small_network, calibration, bits=bits).model(small_batches[0])
        return float(((found - expected).norm() / expected.norm()).detach())

    errors = [error(f"W{bits}A{bits}") for bits in (16, 12, 8, 6, 4, 2)]
    assert errors == sorted(errors)
    assert errors[0] < 1e-3


def test_batchnorm_is_folded_unless_kept(small_network: nn.Module, calibration: ptq.Calibration) -> None:
    folded = ptq.quantize(small_network, calibration).model
    kept = ptq.quantize(small_network, calibration, keep_batchnorm=True).model
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert sum(isinstance(module, nn.BatchNorm2d) for module in kept.modules()) == 3
    assert isinstance(small_network.stem_norm, nn.BatchNorm2d)


def test_bits_by_layer(small_network: nn.Module, calibration: ptq.Calibration) -> None:
    quantized = ptq.quantize(
        small_network,
        calibration,
        bits="w4a4",
        first_last=8,
        exclude=["up"],
        overrides={"gr*": "W6A5", "depth*": "W3"},
    )
    assert {name: str(bits) for name, bits in quantized.bits.items()} == {
        "stem": "W8A8",
        "depthwise": "W3",
        "grouped": "W6A5",
        "head": "W8A8",
    }
    assert quantized.model.grouped.input_quantizer.bits == 5
    assert not hasattr(quantized.model.depthwise, "input_quantizer")
    assert not hasattr(quantized.model.up, "weight_scale")


def test_an_excluded_layer_is_computed_as_before(
    small_network: nn.Module, calibration: ptq.Calibration, small_batches: list[Tensor]
) -> None:
    only_head = ptq.quantize(small_network, calibration, weights=2, activations=2, include=["head"]).model
    with torch.no_grad():
        torch.testing.assert_close(
            only_head.stem_norm(only_head.stem(small_batches[0])),
            small_network.stem_norm(small_network.stem(small_batches[0])),
        )


def test_symmetric_activations_have_no_zero_point(small_network: nn.Module, calibration: ptq.Calibration) -> None:
    model = ptq.quantize(small_network, calibration, symmetric_activations=True).model
    quantizers = [module for module in model.modules() if isinstance(module, FakeQuantize)]
    assert len(quantizers) == 5
    assert all(float(quantizer.zero_point) == 0 for quantizer in quantizers)


@pytest.mark.parametrize("smoothed", [False, True], ids=["plain", "smoothed"])
def test_a_file_gives_the_same_network(
    smoothed: bool, small_network: nn.Module, calibration: ptq.Calibration, small_batches: list[Tensor], tmp_path: Path
) -> None:
    model = small_network
    if smoothed:
        result = ptq.smooth(model, calibration, 0.5)
        model, calibration = result.model, result.calibration
    saved = ptq.quantize(model, calibration, bits="W4A6", first_last=8, overrides={"up": "W5A5"})
    saved.save(tmp_path / "q.safetensors")
    loaded = ptq.Quantized.load(tmp_path / "q.safetensors", model, calibration)
    assert (loaded.scheme, loaded.bits) == (saved.scheme, saved.bits)
    with torch.no_grad():
        assert torch.equal(loaded.model(small_batches[0]), saved.model(small_batches[0]))


def test_a_file_of_another_source_is_refused(
    small_network: nn.Module, calibration: ptq.Calibration, tmp_path: Path
) -> None:
    ptq.quantize(small_network, calibration).save(tmp_path / "q.safetensors")
    smoothed = ptq.smooth(small_network, calibration, 0.5)
    with pytest.raises(MismatchError, match="another model or smoothing"):
        ptq.Quantized.load(tmp_path / "q.safetensors", smoothed.model, smoothed.calibration)


def test_a_quantized_model_can_be_copied_and_pickled(
    small_network: nn.Module, calibration: ptq.Calibration, small_batches: list[Tensor]
) -> None:
    layer = ptq.quantize(small_network, calibration, bits="W4A4").model.head
    x = torch.randn(3, 6)
    with torch.no_grad():
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(twin(x), layer(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": 1}, "weights = 1: choose a whole number from 2 to 16"),
        ({"activations": 33}, "activations = 33"),
        ({"bits": "8"}, "write W8A8"),
        ({"include": ["nothing*"]}, r"'nothing\*' matches no layer: the layers are stem, depthwise"),
        ({"exclude": ["*"]}, "leave no layer"),
        ({"overrides": {"stem": "W99"}}, "choose a whole number"),
        ({"first_last": 1}, "first_last = 1"),
        ({"observer": "best"}, "observer 'best' is unknown"),
    ],
    ids=str,
)
def test_bad_options(
    options: dict[str, object], message: str, small_network: nn.Module, calibration: ptq.Calibration
) -> None:
    with pytest.raises(InputError, match=message):
        ptq.quantize(small_network, calibration, **options)


def test_quantizing_twice_is_refused(small_network: nn.Module, calibration: ptq.Calibration) -> None:
    quantized = ptq.quantize(small_network, calibration)
    with pytest.raises(InputError, match="quantized already"):
        ptq.quantize(quantized.model, calibration)


@pytest.mark.parametrize("observer", ["percentile", "entropy", "mse"])
def test_observers_reach_the_quantizer(observer: str, digits: ptq.Task) -> None:
    calibration = ptq.calibrate(digits.model, digits.calibration, observer, 8)
    clipped = ptq.quantize(digits.model, calibration, bits="W8A4").model
    full = ptq.quantize(digits.model, calibration, bits="W8A4", observer="max").model
    scales = [
        (float(a.scale), float(b.scale))
        for a, b in zip(clipped.modules(), full.modules(), strict=True)
        if isinstance(a, FakeQuantize)
    ]
    assert all(a <= b * (1 + 1e-6) for a, b in scales) and any(a < b for a, b in scales)
