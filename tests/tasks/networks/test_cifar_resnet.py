from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from ptq.tasks.networks.cifar_resnet import BasicBlock, PaddedShortcut, resnet20, resnet56


@pytest.mark.parametrize(
    ("network", "parameters", "layers"), [(resnet20, 269_722, 20), (resnet56, 853_018, 56)], ids=["20", "56"]
)
def test_sizes_of_the_paper(network: Callable[[], nn.Module], parameters: int, layers: int) -> None:
    """He et al., table 6: 0.27M and 0.85M parameters; the name counts the layers with weights."""
    model = network()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert sum(isinstance(module, (nn.Conv2d, nn.Linear)) for module in model.modules()) == layers


def test_names_and_shapes_of_published_checkpoints() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in resnet20().state_dict().items()}
    expected = {"conv1.weight": (16, 3, 3, 3), "linear.weight": (10, 64), "linear.bias": (10,)}
    norms = [("bn1", 16)]
    channels = 16
    for stage, width in ((1, 16), (2, 32), (3, 64)):
        for block in range(3):
            expected[f"layer{stage}.{block}.conv1.weight"] = (width, channels, 3, 3)
            expected[f"layer{stage}.{block}.conv2.weight"] = (width, width, 3, 3)
            norms += [(f"layer{stage}.{block}.bn{index}", width) for index in (1, 2)]
            channels = width
    for name, width in norms:
        for field in ("weight", "bias", "running_mean", "running_var"):
            expected[f"{name}.{field}"] = (width,)
        expected[f"{name}.num_batches_tracked"] = ()
    assert shapes == expected


def test_option_a_shortcut_by_hand() -> None:
    features = np.random.default_rng(0).normal(size=(2, 16, 8, 8)).astype(np.float32)
    expected = np.zeros((2, 32, 4, 4), np.float32)
    for channel in range(16):
        for row in range(4):
            for column in range(4):
                expected[:, 8 + channel, row, column] = features[:, channel, 2 * row, 2 * column]
    shortcut = BasicBlock(16, 32, stride=2).shortcut
    assert isinstance(shortcut, PaddedShortcut)
    np.testing.assert_array_equal(shortcut(torch.from_numpy(features)).numpy(), expected)


def test_forward_gives_ten_logits() -> None:
    assert resnet20().eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
