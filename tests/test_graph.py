"""Which BatchNorm may be folded into which layer, and that folding is exact."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ptq
from ptq.batchnorm import FoldedBatchNorm, fold_batchnorms
from ptq.vision import torchvision


class Block(nn.Module):
    """A convolution and a BatchNorm, wired by a function."""

    def __init__(self, wiring) -> None:
        super().__init__()
        self.conv, self.norm, self.wiring = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), wiring

    def forward(self, x: Tensor) -> Tensor:
        return self.wiring(self, x)


def second_reader(block: Block, x: Tensor) -> Tensor:
    y = block.conv(x)
    return block.norm(y) + y


def overwritten(block: Block, x: Tensor) -> Tensor:
    y = block.conv(x)
    y.add_(1)
    return block.norm(y)


def returned(block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    y = block.conv(x)
    return block.norm(y), y


WIRINGS = {
    "right behind": (lambda block, x: block.norm(block.conv(x)), True),
    "shape asked for": (lambda block, x: block.norm(block.conv(x)).view(len(x), -1), True),
    "second reader": (second_reader, False),
    "written in between": (overwritten, False),
    "also returned": (returned, False),
    "relu in between": (lambda block, x: block.norm(F.relu(block.conv(x))), False),
    "convolution twice": (lambda block, x: block.norm(block.conv(block.conv(x))), False),
    "norm twice": (lambda block, x: block.norm(block.norm(block.conv(x))), False),
    "norm first": (lambda block, x: block.conv(block.norm(x)), False),
}


@pytest.mark.parametrize("name", WIRINGS)
def test_only_a_sole_reader_is_found(name: str) -> None:
    wiring, found = WIRINGS[name]
    model = Block(wiring)
    calibration = ptq.calibrate(model, [torch.randn(2, 3, 4, 4)])
    assert calibration.batchnorms == ({"conv": "norm"} if found else {})


def test_folding_keeps_the_function_and_leaves_a_mark(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    calibration = ptq.calibrate(small_network, small_batches)
    folded = copy.deepcopy(small_network)
    fold_batchnorms(folded, calibration.batchnorms)
    assert isinstance(folded.up_norm, FoldedBatchNorm) and folded.up_norm.into == "up"
    with torch.no_grad():
        for batch in small_batches:
            expected = copy.deepcopy(small_network).double()(batch.double())
            torch.testing.assert_close(folded.double()(batch.double()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "pairs"), [("resnet18", 20), ("mobilenet_v2", 52), ("densenet121", 59)])
def test_real_networks(name: str, pairs: int, random_batchnorms) -> None:
    """ResNet-18 and MobileNetV2 have a BatchNorm behind each convolution, DenseNet-121
    behind the first one and between the two of each of its 58 dense layers.
    """
    torch.manual_seed(0)
    model = random_batchnorms(torchvision("models").get_model(name, weights=None))
    x = torch.randn(2, 3, 64, 64)
    found = ptq.calibrate(model, [x]).batchnorms
    assert len(found) == pairs
    folded = copy.deepcopy(model)
    fold_batchnorms(folded, found)
    with torch.no_grad():
        expected = model.double()(x.double())
        difference = (folded.double()(x.double()) - expected).abs().max() / expected.abs().max()
    assert difference < 1e-5


def test_a_shared_weight_keeps_its_batchnorm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval()
    model[2].weight = model[0].weight
    model[1].running_var.fill_(4.0)
    x = torch.randn(1, 3, 2, 2)
    expected = model(x)
    fold_batchnorms(model, {"0": "1", "2": "3"})
    assert isinstance(model[1], nn.BatchNorm2d) and isinstance(model[3], nn.BatchNorm2d)
    assert torch.equal(model(x), expected)
