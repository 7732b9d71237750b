"""Cross-layer equalization: weights that make a channel and weights that read it get one size."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq.errors import InputError
from ptq.smoothing.modules import ChannelClamp


@pytest.fixture
def two_layers() -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        network[0].bias.zero_()
        network[0].weight.mul_(torch.logspace(-2, 2, 6)[:, None])
    return network


class DepthwiseChain(nn.Module):
    """Depthwise layers make channels and read them: their factors hang together."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(3, 8, 1), (8, 8, 8), (8, 12, 1), (12, 12, 12), (12, 6, 2)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(inputs, outputs, 3, padding=1, groups=groups) for inputs, outputs, groups in widths
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _, outputs, _ in widths)
        self.bounded = nn.ModuleList(nn.ReLU6() for _ in widths)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm, bounded in zip(self.convolutions, self.norms, self.bounded, strict=True):
            x = bounded(norm(convolution(x)))
        return self.head(x.mean((2, 3)))


@pytest.fixture
def chain(random_batchnorms) -> nn.Module:
    torch.manual_seed(1)
    network = DepthwiseChain()
    with torch.no_grad():
        for convolution in network.convolutions:
            convolution.weight.mul_(torch.randn(len(convolution.weight), 1, 1, 1).exp())
    return random_batchnorms(network).eval()


def test_two_layers_by_the_formula(two_layers: nn.Module) -> None:
    x = torch.randn(64, 5)
    smoothed = ptq.smooth(two_layers, ptq.calibrate(two_layers, [x]), "equalize", batches=[x])
    first, last = (two_layers[index].weight.detach().numpy() for index in (0, 2))
    expected = np.sqrt(np.abs(first).max(1) / np.abs(last).max(0))
    np.testing.assert_allclose(smoothed.factors["2"].numpy(), expected, rtol=1e-4)
    made, read = smoothed.model[0].weight, smoothed.model[2].weight
    torch.testing.assert_close(made.abs().amax(1), read.abs().amax(0), rtol=1e-3, atol=0)
    assert [entry.action for entry in smoothed.ledger] == ["skipped", "folded"]
    assert smoothed.title == "equalized"


def test_no_data_counts_and_no_scale_of_the_channels(two_layers: nn.Module) -> None:
    x = torch.randn(64, 5)
    found = ptq.smooth(two_layers, ptq.calibrate(two_layers, [x]), "equalize").model
    other = copy.deepcopy(two_layers)
    stretch = torch.logspace(1, -1, 6)
    with torch.no_grad():
        other[0].weight.mul_(stretch[:, None])
        other[2].weight.div_(stretch)
    same = ptq.smooth(other, ptq.calibrate(other, [x[:8] * 3]), "equalize").model
    for parameter, equal in zip(found.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(parameter, equal, rtol=1e-3, atol=1e-6)


def test_a_chain_of_depthwise_layers_settles_and_computes_the_same(
    chain: nn.Module, small_batches: list[Tensor]
) -> None:
    calibration = ptq.calibrate(chain, small_batches)
    smoothed = ptq.smooth(chain, calibration, "equalize", batches=small_batches)
    assert any(isinstance(module, ChannelClamp) for module in smoothed.model.modules())
    with torch.no_grad():
        x = small_batches[0]
        torch.testing.assert_close(smoothed.model(x), chain(x), rtol=1e-4, atol=1e-4)
    # With BatchNorm folded in, as quantization sees it; the layout of the weights is written out here once more.
    plain = ptq.quantize(smoothed.model, smoothed.calibration, None, None).model
    for maker, reader in zip(plain.convolutions, [*plain.convolutions[1:], plain.head], strict=True):
        made = torch.maximum(maker.weight.abs().amax((1, 2, 3)), maker.bias.abs())
        weight = reader.weight.detach().abs()
        if isinstance(reader, nn.Linear):
            read = weight.amax(0)
        else:
            groups = reader.groups
            parts = [part.amax((0, 2, 3)) for part in weight.chunk(groups)]
            read = torch.cat(parts)
        torch.testing.assert_close(made, read, rtol=1e-2, atol=0)


def test_a_channel_that_is_all_bias_is_not_stretched(two_layers: nn.Module) -> None:
    """By its weight alone its factor would be 3e-5, and what is read 1 / 3e-5 times the range of all others."""
    with torch.no_grad():
        two_layers[0].weight[0] = 1e-9
        two_layers[0].bias[0] = 1.0
    x = torch.randn(64, 5)
    smoothed = ptq.smooth(two_layers, ptq.calibrate(two_layers, [x]), "equalize")
    read = float(two_layers[2].weight[:, 0].detach().abs().max())
    assert float(smoothed.factors["2"][0]) == pytest.approx(read**-0.5, rel=1e-3)


def test_it_helps_where_the_sizes_of_channels_are_an_accident(two_layers: nn.Module) -> None:
    with torch.no_grad():
        two_layers[2].weight.div_(torch.logspace(-2, 2, 6))
    x = torch.randn(256, 5)
    calibration = ptq.calibrate(two_layers, [x])
    equalized = ptq.smooth(two_layers, calibration, "equalize")
    with torch.no_grad():
        expected = two_layers(x)
        errors = [
            float((ptq.quantize(model, ranges, 4, 4).model(x) - expected).square().mean())
            for model, ranges in ((two_layers, calibration), (equalized.model, equalized.calibration))
        ]
    assert errors[1] < errors[0] / 2


def test_a_file_gives_the_equalized_model_back(two_layers: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(64, 5)
    smoothed = ptq.smooth(two_layers, ptq.calibrate(two_layers, [x]), "equalize")
    smoothed.save(tmp_path / "smoothed.safetensors")
    loaded = ptq.Smoothed.load(tmp_path / "smoothed.safetensors", two_layers, smoothed.calibration)
    assert loaded.title == "equalized"
    assert torch.equal(loaded.model(x), smoothed.model(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"form": "hook"}, "needs the form fold"), ({"clip": True}, "use alpha='auto'")],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_it_cannot_be_combined_with(two_layers: nn.Module, options: dict[str, object], message: str) -> None:
    calibration = ptq.calibrate(two_layers, [torch.randn(8, 5)])
    with pytest.raises(InputError, match=message):
        ptq.smooth(two_layers, calibration, "equalize", **options)  # type: ignore[arg-type]


def test_a_network_with_nothing_to_equalize() -> None:
    network = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(InputError, match="no layer was smoothed"):
        ptq.smooth(network, ptq.calibrate(network, [torch.randn(8, 4)]), "equalize")
