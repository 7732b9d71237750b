"""A small network in the shape of MobileNetV2, for 16 x 16 gray images."""

from __future__ import annotations

from collections import OrderedDict
from typing import cast

from torch import Tensor, nn

# (expansion, channels, stride) of each inverted residual
BLOCKS = ((6, 8, 1), (6, 16, 2), (6, 16, 1), (6, 24, 2), (6, 24, 1), (6, 24, 1), (6, 24, 1))
STEM_CHANNELS = 8
HEAD_CHANNELS = 96


class DigitsNet(nn.Module):
    """Stem, seven inverted residuals, a 1 x 1 head and a linear classifier: 42,754 parameters."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = [convolution(1, STEM_CHANNELS, kernel=3)]
        channels = STEM_CHANNELS
        for expansion, out_channels, stride in BLOCKS:
            layers.append(InvertedResidual(channels, out_channels, expansion, stride))
            channels = out_channels
        layers.append(convolution(channels, HEAD_CHANNELS, kernel=1))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(HEAD_CHANNELS, classes)

    def forward(self, images: Tensor) -> Tensor:  # [N, 1, 16, 16] -> [N, classes]
        return cast(Tensor, self.classifier(self.flatten(self.pool(self.features(images)))))


class InvertedResidual(nn.Module):
    """Expand 1 x 1, depthwise 3 x 3, project 1 x 1 without activation; added to its input where the shapes agree."""

    def __init__(self, in_channels: int, out_channels: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.expand = convolution(in_channels, hidden, kernel=1)
        self.depthwise = convolution(hidden, hidden, kernel=3, stride=stride, groups=hidden)
        self.project = convolution(hidden, out_channels, kernel=1, activation=False)
        self.residual = stride == 1 and in_channels == out_channels

    def forward(self, features: Tensor) -> Tensor:
        projected = cast(Tensor, self.project(self.depthwise(self.expand(features))))
        return features + projected if self.residual else projected


def convolution(
    in_channels: int, out_channels: int, *, kernel: int, stride: int = 1, groups: int = 1, activation: bool = True
) -> nn.Sequential:
    """Convolution, BatchNorm and, unless told otherwise, ReLU6, as ``conv``, ``norm`` and ``relu``."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv2d(
            in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False
        ),
        norm=nn.BatchNorm2d(out_channels),
    )
    if activation:
        layers["relu"] = nn.ReLU6()
    return nn.Sequential(layers)
