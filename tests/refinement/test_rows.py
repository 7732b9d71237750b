"""Rows and weight matrices: together they are the layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ptq import channels
from ptq.refinement.layer import output_shift
from ptq.refinement.rows import sampled_rows, weight_matrix, write_weight

EVERYTHING = 10**6

LAYERS = {
    "linear": (nn.Linear(6, 4), (3, 6)),
    "linear on tokens": (nn.Linear(6, 4), (3, 5, 6)),
    "conv1d": (nn.Conv1d(6, 4, 3, stride=2, padding=1), (3, 6, 11)),
    "conv2d": (nn.Conv2d(6, 4, 3, padding=1), (3, 6, 7, 5)),
    "strided and dilated": (nn.Conv2d(6, 4, (3, 2), stride=2, padding=(2, 1), dilation=(2, 1)), (3, 6, 9, 8)),
    "same": (nn.Conv2d(6, 4, 5, padding="same", dilation=2), (3, 6, 7, 5)),
    "reflected": (nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"), (3, 6, 7, 5)),
    "grouped": (nn.Conv2d(6, 4, 3, groups=2), (3, 6, 7, 5)),
    "depthwise": (nn.Conv2d(6, 6, 3, padding=1, groups=6), (3, 6, 7, 5)),
    "conv3d": (nn.Conv3d(2, 4, 3, padding=1), (2, 2, 4, 5, 3)),
    "unbatched": (nn.Conv2d(6, 4, 3), (6, 7, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_all_rows_times_the_matrix_is_what_the_layer_computes(name: str) -> None:
    layer, shape = LAYERS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = sampled_rows(x, layer, EVERYTHING) @ weight_matrix(layer.weight, layer).mT  # [g, R, O/g]
        expected = layer(x) if layer.bias is None else layer(x) - over_outputs(layer.bias, layer)
    if isinstance(layer, nn.Linear):
        expected = expected.reshape(-1, 4)
    else:
        expected = expected if expected.dim() == len(shape) and name != "unbatched" else expected[None]
        expected = expected.flatten(2).transpose(1, 2).flatten(0, 1)  # [R, O]
    torch.testing.assert_close(found.transpose(0, 1).flatten(1), expected, atol=1e-5, rtol=1e-5)


def over_outputs(bias: Tensor, layer: channels.Layer) -> Tensor:
    return bias if isinstance(layer, nn.Linear) else bias.reshape(-1, *(1 for _ in layer.kernel_size))


def test_a_transposed_convolution_scatters_the_products() -> None:
    """Stride and kernel are equal, so that each product is one output."""
    layer = nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2, bias=False)
    x = torch.randn(3, 6, 5, 4)
    with torch.no_grad():
        products = sampled_rows(x, layer, EVERYTHING) @ weight_matrix(layer.weight, layer).mT  # [g, R, O/g · k]
        expected = layer(x)  # [3, 4, 10, 8]
    found = products.reshape(2, 3, 5, 4, 2, 2, 2).permute(1, 0, 4, 2, 5, 3, 6).reshape(3, 4, 10, 8)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (4, 2), (3, 1)])
def test_the_shift_of_a_transposed_convolution_is_the_mean_of_its_output(kernel: int, stride: int) -> None:
    """On a constant map, and away from the borders, where fewer products add up."""
    layer = nn.ConvTranspose2d(4, 6, kernel, stride=stride, groups=2, bias=False)
    x = torch.randn(4).reshape(1, 4, 1, 1).expand(1, 4, 12, 12).contiguous()
    with torch.no_grad():
        rows = sampled_rows(x, layer, EVERYTHING)
        mean = (rows @ weight_matrix(layer.weight, layer).mT).mean(1, keepdim=True)
        inside = layer(x)[:, :, 2 * stride : -2 * stride, 2 * stride : -2 * stride]
        size = inside.shape[2] // stride * stride
        expected = inside[:, :, :size, :size].mean((0, 2, 3))
    torch.testing.assert_close(output_shift(mean, layer), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(6, 4),
        nn.Conv2d(6, 4, 3, groups=2),
        nn.ConvTranspose2d(6, 4, 3, groups=2),
        nn.Conv1d(6, 6, 3, groups=6),
    ],
    ids=str,
)
def test_a_written_matrix_is_read_back(layer: channels.Layer) -> None:
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
        write_weight(other, weight_matrix(layer.weight, layer))
    assert torch.equal(other.weight, layer.weight)


def test_positions_depend_on_the_sample_not_on_the_batch() -> None:
    layer, x = nn.Conv2d(3, 4, 3, padding=1), torch.randn(6, 3, 9, 9)
    whole = sampled_rows(x, layer, 5, seed=3)
    parts = [sampled_rows(x[:2], layer, 5, seed=3), sampled_rows(x[2:], layer, 5, first=2, seed=3)]
    assert torch.equal(whole, torch.cat(parts, 1))
    assert not torch.equal(whole, sampled_rows(x, layer, 5, seed=4))


def test_positions_are_spread_evenly_and_none_comes_twice() -> None:
    layer = nn.Conv2d(1, 1, 1)
    x = torch.arange(64.0).reshape(1, 1, 8, 8).expand(4000, 1, 8, 8)
    rows = sampled_rows(x, layer, 4).reshape(4000, 4).long()
    assert all(len(set(of_sample.tolist())) == 4 for of_sample in rows)
    counts = torch.bincount(rows.flatten(), minlength=64)  # 250 expected, with a standard deviation of 15
    assert int(counts.min()) > 185 and int(counts.max()) < 315
    assert int((rows[1:] == rows[:-1]).all(1).sum()) == 0


def test_padding_tokens_are_left_out() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 6, 3)
    valid = torch.tensor([[True] * length + [False] * (6 - length) for length in (6, 1, 3, 2)])
    assert torch.equal(sampled_rows(x, layer, EVERYTHING, valid=valid)[0], x[valid])
    assert sampled_rows(x, layer, 2, valid=valid).shape[1] == 2 + 1 + 2 + 2
    x[~valid] = torch.nan
    assert bool(sampled_rows(x, layer, 2, valid=valid).isfinite().all())
