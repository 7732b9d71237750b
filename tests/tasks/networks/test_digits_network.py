from __future__ import annotations

import torch
from torch import nn

from ptq.tasks.networks.digits import DigitsNet, InvertedResidual


def test_size_and_output() -> None:
    model = DigitsNet().eval()
    assert 35_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 50_000
    assert model(torch.zeros(3, 1, 16, 16)).shape == (3, 10)


def test_it_has_the_shape_of_mobilenetv2() -> None:
    model = DigitsNet()
    depthwise = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.groups == m.in_channels > 1]
    blocks = [m for m in model.modules() if isinstance(m, InvertedResidual)]
    assert len(depthwise) == len(blocks) > 0
    assert any(block.residual for block in blocks)
    assert not all(block.residual for block in blocks)


def test_a_residual_block_adds_its_input() -> None:
    block = InvertedResidual(4, 4, expansion=2, stride=1).eval()
    nn.init.zeros_(block.get_parameter("project.norm.weight"))
    features = torch.randn(1, 4, 6, 6)
    assert torch.equal(block(features), features)
