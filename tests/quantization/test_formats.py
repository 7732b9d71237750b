"""Number formats in place of bits: weights rounded once, activations batch by batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq.errors import InputError
from ptq.quantization.modules import FormatQuantize


@pytest.fixture
def calibration(small_network: nn.Module, small_batches: list[Tensor]) -> ptq.Calibration:
    return ptq.calibrate(small_network, small_batches)


@pytest.mark.parametrize("text", ["affine:bits=3,group=4", "alq:bits=3,bucket=16,nearest", "multistep:parts=2,bits=3"])
def test_weights_stand_in_the_format(text: str, small_network: nn.Module, calibration: ptq.Calibration) -> None:
    quantized = ptq.quantize(small_network, calibration, weight_format=text, activations=None).model
    expected = ptq.format(text).decode(ptq.format(text).encode(small_network.head.weight))
    assert torch.equal(quantized.head.weight, expected)
    assert not hasattr(quantized.head, "input_quantizer")


def test_a_symmetric_format_per_channel_is_what_bits_mean(
    small_network: nn.Module, calibration: ptq.Calibration
) -> None:
    by_format = ptq.quantize(small_network, calibration, weight_format="affine:bits=4,symmetric,axis=0").model
    by_bits = ptq.quantize(small_network, calibration, weights=4).model
    for name in ("stem", "depthwise", "grouped", "head"):
        assert torch.equal(by_format.get_submodule(name).weight, by_bits.get_submodule(name).weight)


def test_activations_take_their_range_from_the_batch(
    small_network: nn.Module, calibration: ptq.Calibration, small_batches: list[Tensor]
) -> None:
    text = "topk:ratio=0.5+affine:bits=6"
    model = ptq.quantize(small_network, calibration, weights=None, activation_format=text, include=["stem"]).model
    assert isinstance(model.stem.input_quantizer, FormatQuantize)
    expected = small_network.stem_norm(small_network.stem(ptq.format(text).fake(small_batches[0])))
    torch.testing.assert_close(model.stem_norm(model.stem(small_batches[0])), expected, rtol=1e-4, atol=1e-4)


def test_outer_layers_and_overrides_keep_their_bits(small_network: nn.Module, calibration: ptq.Calibration) -> None:
    bits = ptq.quantize(
        small_network, calibration, weight_format="affine:bits=2", first_last=8, overrides={"up": "W6A6"}
    ).bits
    assert {name: str(value) for name, value in bits.items()} == {
        "stem": "W8A8",
        "depthwise": "W[affine:bits=2]A8",
        "grouped": "W[affine:bits=2]A8",
        "up": "W6A6",
        "head": "W8A8",
    }


def test_a_file_gives_the_same_network(
    small_network: nn.Module, calibration: ptq.Calibration, small_batches: list[Tensor], tmp_path: Path
) -> None:
    saved = ptq.quantize(
        small_network, calibration, weight_format="qsgdinf:bits=4,bucket=32,nearest", activation_format="affine:bits=5"
    )
    saved.save(tmp_path / "q.safetensors")
    loaded = ptq.Quantized.load(tmp_path / "q.safetensors", small_network, calibration)
    with torch.no_grad():
        assert torch.equal(loaded.model(small_batches[0]), saved.model(small_batches[0]))
    with pytest.raises(InputError, match="quantized already"):
        ptq.quantize(loaded.model, calibration)


def test_a_wrong_format_lists_the_names(small_network: nn.Module, calibration: ptq.Calibration) -> None:
    with pytest.raises(InputError, match="'int8' is unknown, the names are raw, affine"):
        ptq.quantize(small_network, calibration, weight_format="int8")
