"""The CIFAR ResNets of He et al. (2015), section 4.2, with option-A shortcuts."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional

STAGES = ((16, 1), (32, 2), (64, 2))  # (channels, stride of the first block)


class CifarResNet(nn.Module):
    """A 3 x 3 stem, three stages of ``blocks`` basic blocks and a linear classifier: 6 · blocks + 2 layers."""

    def __init__(self, blocks: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, STAGES[0][0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(STAGES[0][0])
        self.relu = nn.ReLU()
        channels = STAGES[0][0]
        stages: list[nn.Sequential] = []
        for out_channels, stride in STAGES:
            first = BasicBlock(channels, out_channels, stride)
            stages.append(nn.Sequential(first, *(BasicBlock(out_channels, out_channels) for _ in range(1, blocks))))
            channels = out_channels
        self.layer1, self.layer2, self.layer3 = stages
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, images: Tensor) -> Tensor:  # [N, 3, 32, 32] -> [N, classes]
        features = self.relu(self.bn1(self.conv1(images)))
        features = self.layer3(self.layer2(self.layer1(features)))
        return cast(Tensor, self.linear(self.flatten(self.pool(features))))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut without parameters."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu2 = nn.ReLU()
        plain = stride == 1 and in_channels == out_channels
        self.shortcut: nn.Module = nn.Identity() if plain else PaddedShortcut(out_channels - in_channels, stride)

    def forward(self, features: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(features)))))
        return cast(Tensor, self.relu2(inner + self.shortcut(features)))


class PaddedShortcut(nn.Module):
    """Option A: every ``stride``-th pixel, and zeros for the channels that are new, half before and half after."""

    def __init__(self, new_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = new_channels // 2
        self.after = new_channels - self.before

    def forward(self, features: Tensor) -> Tensor:
        strided = features[:, :, :: self.stride, :: self.stride]
        return functional.pad(strided, (0, 0, 0, 0, self.before, self.after))


def resnet20() -> CifarResNet:
    """0.27M parameters."""
    return CifarResNet(blocks=3)


def resnet56() -> CifarResNet:
    """0.85M parameters."""
    return CifarResNet(blocks=9)
