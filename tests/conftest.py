"""Shared fixtures: the embedded task, and its calibration, made once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq.calibration import Calibration
from ptq.tasks import Task, resolve

torch.set_num_threads(1)  # the suite runs in several processes at once


@pytest.fixture(scope="session")
def digits() -> Task:
    return resolve("digits")


@pytest.fixture(scope="session")
def digits_calibration(digits: Task) -> Calibration:
    return ptq.calibrate(digits.model, digits.calibration)


def randomize_batchnorms(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every BatchNorm statistics and an affine part that are far from the identity."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(like: Tensor, low: float, high: float) -> Tensor:
        return torch.rand(like.shape, generator=generator) * (high - low) + low

    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.copy_(uniform(module.running_mean, -1, 1))
            module.running_var.copy_(uniform(module.running_var, 0.5, 2))
            module.weight.data.copy_(uniform(module.weight, 0.5, 2))
            module.bias.data.copy_(uniform(module.bias, -1, 1))
    return model.eval()


@pytest.fixture
def random_batchnorms() -> Callable[[nn.Module], nn.Module]:
    return randomize_batchnorms


@pytest.fixture
def small_network() -> nn.Module:
    """Dense, depthwise and grouped convolutions, a transposed one and a Linear, with BatchNorm and a residual."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
            self.stem_norm = nn.BatchNorm2d(8)
            self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
            self.depthwise_norm = nn.BatchNorm2d(8)
            self.grouped = nn.Conv2d(8, 12, 1, groups=4)
            self.up = nn.ConvTranspose2d(12, 6, 2, stride=2, groups=2)
            self.up_norm = nn.BatchNorm2d(6)
            self.head = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem_norm(self.stem(x)).relu_()
            x = x + self.depthwise_norm(self.depthwise(x)).clamp(0, 6)
            x = self.up_norm(self.up(self.grouped(x)))
            return self.head(x.mean((2, 3)))

    torch.manual_seed(0)
    return randomize_batchnorms(Network())


@pytest.fixture
def small_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    # Channels of very different size: what smoothing is for.
    size = torch.tensor([0.1, 1.0, 20.0]).reshape(1, 3, 1, 1)
    return [torch.randn(4, 3, 8, 8, generator=generator) * size for _ in range(3)]
