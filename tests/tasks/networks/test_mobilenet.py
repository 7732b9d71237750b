from __future__ import annotations

import torch

from ptq.tasks.networks.mobilenet import cifar10_mobilenetv2
from ptq.vision import torchvision


def test_the_resolution_ends_at_four_pixels() -> None:
    model = cifar10_mobilenetv2().eval()
    with torch.inference_mode():
        features = model.get_submodule("features")(torch.zeros(1, 3, 32, 32))
        assert features.shape == (1, 1280, 4, 4)
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_weights_have_torchvisions_names_and_shapes() -> None:
    """Strides carry no weights: a torchvision checkpoint of 10 classes fits."""
    reference = torchvision("models").mobilenet_v2(num_classes=10).state_dict()
    ours = cifar10_mobilenetv2().state_dict()
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: tensor.shape for name, tensor in reference.items()
    }
