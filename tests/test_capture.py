"""A layer's input and gradient, against hooks and finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import ptq
from ptq.capture import input_and_gradient
from ptq.errors import InputError


def test_the_input_is_what_the_layer_reads_and_the_gradient_predicts_the_loss(digits: ptq.Task) -> None:
    images, labels = next(iter(digits.calibration))
    batch = (images[:4], labels[:4])
    x, gradient = input_and_gradient(digits.model, batch, "classifier")
    features = digits.model.flatten(digits.model.pool(digits.model.features(images[:4])))
    torch.testing.assert_close(x, features)
    weight, bias = digits.model.classifier.weight.detach().double(), digits.model.classifier.bias.detach().double()

    def loss(values: torch.Tensor) -> float:
        return float(functional.cross_entropy(values.double() @ weight.T + bias, labels[:4]))

    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).double()
    slope = (loss(x.double() + 1e-4 * direction) - loss(x.double() - 1e-4 * direction)) / 2e-4
    assert slope == pytest.approx(float((gradient.double() * direction).sum()), rel=1e-3, abs=1e-7)


def test_the_callers_model_is_left_alone(digits: ptq.Task) -> None:
    input_and_gradient(digits.model, next(iter(digits.calibration)), "features.0.conv")
    assert all(parameter.grad is None for parameter in digits.model.parameters())
    assert not any(module._forward_pre_hooks for module in digits.model.modules())


def test_a_gradient_needs_labels() -> None:
    with pytest.raises(InputError, match="needs labels"):
        input_and_gradient(nn.Linear(3, 3), torch.randn(2, 3), "")
