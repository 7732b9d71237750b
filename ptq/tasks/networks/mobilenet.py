"""torchvision's MobileNetV2 at the resolution of CIFAR."""

from __future__ import annotations

from typing import cast

from torch import nn

from ptq.vision import torchvision

# (expansion, channels, repeats, stride): the second stage keeps the resolution, which halves at 224 px
STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def cifar10_mobilenetv2() -> nn.Module:
    """MobileNetV2 with a first convolution and a second stage of stride 1, so that 32 px end as 4 x 4, not 1 x 1."""
    model = torchvision("models").mobilenet_v2(
        num_classes=10, inverted_residual_setting=[list(stage) for stage in STAGES]
    )
    model.features[0][0].stride = (1, 1)
    return cast(nn.Module, model)
