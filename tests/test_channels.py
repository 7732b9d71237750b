"""Which channel is that: against index-by-index loops in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ptq import channels

LAYERS = {
    "linear": nn.Linear(6, 4),
    "conv1d": nn.Conv1d(6, 4, 3),
    "conv2d": nn.Conv2d(6, 4, (3, 2)),
    "conv3d": nn.Conv3d(6, 4, 2),
    "depthwise": nn.Conv2d(6, 6, 3, groups=6),
    "depthwise with multiplier": nn.Conv2d(6, 12, 3, groups=6),
    "grouped": nn.Conv2d(6, 4, 3, groups=2),
    "transposed": nn.ConvTranspose2d(6, 4, 3),
    "grouped transposed": nn.ConvTranspose2d(6, 4, 3, groups=2),
    "transposed 1d": nn.ConvTranspose1d(6, 9, 2, groups=3),
}


def owners(layer: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    """The input and the output channel of every weight element, found by running one-hot weights through the layer."""
    weight = layer.weight
    inputs, outputs = np.zeros(weight.shape, int), np.zeros(weight.shape, int)
    linear = isinstance(layer, nn.Linear)
    channel_count = layer.in_features if linear else layer.in_channels
    shape = (1,) if linear else tuple(layer.kernel_size)
    saved = weight.detach().clone()
    with torch.no_grad():
        for index in np.ndindex(*weight.shape):
            weight.zero_()
            weight[index] = 1.0
            for channel in range(channel_count):
                x = torch.zeros(1, channel_count) if linear else torch.zeros(1, channel_count, *shape)
                x[0, channel] = 1.0
                y = layer(x) - (layer.bias if linear else layer.bias.reshape(-1, *[1 for _ in shape]))
                if y.abs().max() > 0.5:
                    inputs[index] = channel
                    outputs[index] = (
                        int(y.abs().flatten(2).amax(2)[0].argmax()) if not linear else int(y.abs().argmax())
                    )
        weight.copy_(saved)
    return inputs, outputs


@pytest.mark.parametrize("name", LAYERS)
def test_weight_elements_belong_to_the_channels_they_read_and_write(name: str) -> None:
    layer = LAYERS[name]
    inputs, outputs = owners(layer)
    weight = layer.weight.detach().numpy()
    in_count, out_count = inputs.max() + 1, outputs.max() + 1
    by_input = [np.abs(weight[inputs == c]).max() for c in range(in_count)]
    by_output = [np.abs(weight[outputs == c]).max() for c in range(out_count)]
    np.testing.assert_array_equal(channels.weight_absmax(layer.weight, layer).numpy(), by_input)
    np.testing.assert_array_equal(channels.output_absmax(layer.weight, layer).numpy(), by_output)

    factor = torch.arange(1.0, in_count + 1)
    scaled = layer.weight.detach().clone()
    channels.scale_inputs(scaled, layer, factor)
    np.testing.assert_array_equal(scaled.numpy(), weight * factor.numpy()[inputs])

    factor = torch.arange(1.0, out_count + 1)
    scaled = layer.weight.detach().clone()
    channels.scale_outputs(scaled, layer, factor)
    np.testing.assert_array_equal(scaled.numpy(), weight * factor.numpy()[outputs])
    spread = channels.over_outputs(factor, layer.weight, layer).expand(weight.shape)
    np.testing.assert_array_equal(spread.numpy(), factor.numpy()[outputs])


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 1, 1), (2, 3, 5, 7)),
        (nn.Conv2d(3, 1, 1), (3, 5, 7)),  # unbatched
        (nn.Conv1d(3, 1, 1), (2, 3, 5)),
        (nn.Conv3d(3, 1, 1), (2, 3, 2, 2, 2)),
        (nn.Linear(3, 1), (2, 3)),
        (nn.Linear(3, 1), (2, 5, 3)),
        (nn.Linear(3, 1), (3,)),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_activation_range_leaves_the_channels(layer: channels.Layer, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    axis = channels.channel_axis(layer)
    rows = np.moveaxis(x.numpy(), axis, 0).reshape(3, -1)
    minimum, maximum = channels.activation_range(x, axis)
    np.testing.assert_array_equal(minimum.numpy(), rows.min(1))
    np.testing.assert_array_equal(maximum.numpy(), rows.max(1))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
def test_activation_range_does_not_depend_on_the_memory_layout(layout: str) -> None:
    x = torch.randn(4, 6, 5, 3, generator=torch.Generator().manual_seed(0))
    expected = x.numpy().max((0, 2, 3))
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        x = x.transpose(0, 2).contiguous().transpose(0, 2)
    np.testing.assert_array_equal(channels.activation_range(x, 1)[1].numpy(), expected)


def test_nan_reaches_the_range() -> None:
    x = torch.zeros(2, 3, 4, 4)
    x[1, 2, 0, 0] = torch.nan
    minimum, maximum = channels.activation_range(x, 1)
    assert minimum.isnan().tolist() == maximum.isnan().tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (nn.Conv2d(4, 4, 1), "Conv2d"),
        (nn.Conv2d(4, 8, 1, groups=4), "Conv2d depthwise"),
        (nn.Conv2d(4, 4, 1, groups=2), "Conv2d groups=2"),
        (nn.ConvTranspose1d(4, 4, 1), "ConvTranspose1d"),
        (nn.Linear(4, 4), "Linear"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kind(layer: channels.Layer, kind: str) -> None:
    assert channels.kind_of(layer) == kind


def test_a_tied_weight_is_not_one_layers_own() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.Linear(5, 5))
    model[1].weight = model[0].weight
    owners_of = channels.weight_owners(model)
    assert "shared with 0" in str(channels.why_fixed("1", model[1], owners_of))
    assert channels.why_fixed("2", model[2], owners_of) is None


def test_a_parametrized_weight_is_not_one_layers_own() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 5))
    assert "parametrization" in str(channels.why_fixed("", layer, channels.weight_owners(layer)))
