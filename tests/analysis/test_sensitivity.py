"""Enable-one and disable-one against networks that were quantized that way from the start."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq.analysis.measuring import answers, loss_change, score_change
from ptq.analysis.sensitivity import sensitivities

LAYERS = ["stem", "depthwise", "grouped", "up", "head"]


@pytest.fixture
def labelled(small_batches: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [(batch, torch.randint(5, (len(batch),), generator=generator)) for batch in small_batches]


def test_every_layer_alone_and_left_out(
    small_network: nn.Module, small_batches: list[Tensor], labelled: list[tuple[Tensor, Tensor]]
) -> None:
    calibration = ptq.calibrate(small_network, small_batches)
    found = sensitivities(
        small_network, ptq.quantize(small_network, calibration, bits="W3A3").model, labelled, samples=10
    )
    assert found.samples == 10
    first_ten = [*labelled[:2], tuple(part[:2] for part in labelled[2])]

    def measured(**choice: list[str]) -> object:
        return answers(ptq.quantize(small_network, calibration, bits="W3A3", **choice).model, first_ten)

    reference, quantized = answers(small_network, first_ten), measured()
    assert found.reference.loss == pytest.approx(reference.loss, rel=1e-5)
    assert found.quantized.loss == pytest.approx(quantized.loss, rel=1e-4)
    assert [layer.layer for layer in found.layers] == LAYERS
    for layer in found.layers:
        alone, without = measured(include=[layer.layer]), measured(exclude=[layer.layer])
        for effect, before, later in ((layer.enable, reference, alone), (layer.disable, quantized, without)):
            expected = loss_change(before, later)
            assert effect.loss.change == pytest.approx(expected.change, rel=1e-3, abs=1e-5)
            assert effect.loss.interval == pytest.approx(expected.interval, rel=1e-3, abs=1e-4)
            assert effect.score.change == pytest.approx(score_change(before, later).change)


def test_the_most_sensitive_layers_lose_or_regain_most(
    small_network: nn.Module, small_batches: list[Tensor], labelled: list[tuple[Tensor, Tensor]]
) -> None:
    quantized = ptq.quantize(small_network, ptq.calibrate(small_network, small_batches), bits="W3A3").model
    found = sensitivities(small_network, quantized, labelled)
    changes = {layer.layer: (layer.enable.loss.change, layer.disable.loss.change) for layer in found.layers}
    assert found.most(2, "enable") == sorted(LAYERS, key=lambda name: -changes[name][0])[:2]
    assert found.most(2, "disable") == sorted(LAYERS, key=lambda name: changes[name][1])[:2]


def test_a_budget_takes_fewer_samples_and_says_so(
    small_network: nn.Module, small_batches: list[Tensor], labelled: list[tuple[Tensor, Tensor]]
) -> None:
    quantized = ptq.quantize(small_network, ptq.calibrate(small_network, small_batches), bits="W4A4").model
    found = sensitivities(small_network, quantized, labelled, budget=0)
    assert found.samples == 4  # one piece, all layers on it
    assert len(found.layers) == len(LAYERS)


def test_data_without_labels_is_refused(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    quantized = ptq.quantize(small_network, ptq.calibrate(small_network, small_batches)).model
    with pytest.raises(ptq.PtqError, match="without labels"):
        sensitivities(small_network, quantized, small_batches)
