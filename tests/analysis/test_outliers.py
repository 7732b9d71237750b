"""Outlier channels of a made-up calibration, with their cost worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq.analysis.outliers import layer_outliers
from ptq.analysis.watching import watch
from ptq.calibration import LayerStatistics


def statistics(minimum: list[float], maximum: list[float]) -> LayerStatistics:
    low, high = torch.tensor(minimum), torch.tensor(maximum)
    absmax = torch.maximum(low.abs(), high.abs())
    return LayerStatistics(
        kind="Linear", minimum=low, maximum=high, activation_absmax=absmax, weight_absmax=torch.ones(len(low))
    )


def test_two_outliers_and_what_they_cost() -> None:
    """Magnitudes 1, 1, 10, 1, 4, and a dead channel: the median of the living is 1, the whole range -10 … 4."""
    found = layer_outliers("fc", statistics([0, -1, -10, 0, 0, 0], [1, 1, 2, 1, 4, 0]))
    assert found is not None
    assert (found.channels, found.count, found.median) == (6, 2, 1.0)
    assert [channel.channel for channel in found.listed] == [2, 4]
    assert [channel.magnitude for channel in found.listed] == [10, 4]
    # Without channel 2 the range is -1 … 4, without both -1 … 1.
    assert [channel.share for channel in found.listed] == pytest.approx([1 - 5 / 14, 1 - 2 / 14])
    assert found.share == pytest.approx(1 - 2 / 14)
    assert found.finer == pytest.approx(7)
    assert found.bits == pytest.approx(math.log2(7))


@pytest.mark.parametrize(
    ("minimum", "maximum"),
    [([0.0, 0.0], [0.0, 0.0]), ([0.0] * 3, [1.0, 1.5, 1.9]), ([-1.0], [1.0])],
    ids=["always zero", "even", "one channel"],
)
def test_even_channels_have_no_outliers(minimum: list[float], maximum: list[float]) -> None:
    assert layer_outliers("fc", statistics(minimum, maximum)) is None


def test_a_watched_layer_shows_its_tensors(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    """The stem's input channels are 0.1, 1 and 20 times a normal: the last one is an outlier."""
    quantized = ptq.quantize(small_network, ptq.calibrate(small_network, small_batches), bits="W4A4").model
    x = small_batches[0]
    seen = watch(small_network, quantized, "stem", x)
    tensors = {tensor.name: tensor for tensor in seen.tensors}
    of_input = tensors["input"]
    assert (of_input.minimum, of_input.maximum) == (float(x.min()), float(x.max()))
    assert of_input.mean == pytest.approx(x.double().mean().item(), abs=1e-5)
    assert of_input.std == pytest.approx(x.double().numpy().std(), rel=1e-5)
    assert list(seen.outlier_channels) == [2]
    assert seen.outlier_channels[2] == pytest.approx(float(x[:, 2].abs().max()))
    errors = ptq.layer_errors(small_network, quantized, [x])["stem"]
    alone, in_all = tensors["output, both quantized"], tensors["output, whole network quantized"]
    assert alone.distance is not None and in_all.distance is not None and errors.accumulated is not None
    assert alone.distance.sqnr == pytest.approx(errors.isolated.sqnr, abs=1e-3)
    assert in_all.distance.sqnr == pytest.approx(errors.accumulated.sqnr, abs=1e-3)
    levels = torch.unique(quantized.stem.input_quantizer(x))
    assert len(levels) <= 16
    assert tensors["input, quantized"].zeros == pytest.approx(
        float((quantized.stem.input_quantizer(x) == 0).float().mean())
    )
    with pytest.raises(ptq.PtqError, match="layer 'nowhere'"):
        watch(small_network, quantized, "nowhere", x)
