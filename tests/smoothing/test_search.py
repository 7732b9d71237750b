"""α per layer: the factors by brute force, the error against layers that are really quantized, the choice by both."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq import channels
from ptq.errors import InputError
from ptq.formats import affine
from ptq.smoothing import smoothing_factor
from ptq.smoothing.search import GRID, Choice, Member, _on_grid, _Trial, output_error, search_group, shared_factors

# No padding: a row, shaped as a map of the size of the kernel, gives exactly one output position.
LAYERS: dict[str, Callable[[], channels.Layer]] = {
    "Conv1d": lambda: nn.Conv1d(6, 8, 5),
    "Conv2d": lambda: nn.Conv2d(6, 8, 3),
    "Conv2d 1x1": lambda: nn.Conv2d(6, 8, 1),
    "Conv2d grouped": lambda: nn.Conv2d(6, 8, 3, groups=2),
    "Conv2d depthwise": lambda: nn.Conv2d(6, 12, 3, groups=6),
    "Conv3d": lambda: nn.Conv3d(6, 4, (1, 2, 3)),
    "Linear": lambda: nn.Linear(6, 8),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(6, 4, 4),
    "ConvTranspose2d grouped": lambda: nn.ConvTranspose2d(6, 8, 3, groups=2),
    "ConvTranspose2d depthwise": lambda: nn.ConvTranspose2d(6, 6, 2, groups=6),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def inputs(layer: channels.Layer, rows: int = 40, seed: int = 0, sizes: Tensor | None = None) -> Tensor:
    """What the layer reads for one output position each: channels of different sizes, some of them one-sided."""
    generator = torch.Generator().manual_seed(seed)
    shape = [rows, channels.input_channels(layer)]
    if not isinstance(layer, nn.Linear):
        shape += [1] * len(layer.kernel_size) if layer.transposed else list(layer.kernel_size)
    x = torch.randn(shape, generator=generator)
    x[:, ::3] = x[:, ::3].relu()
    if sizes is None:
        sizes = torch.logspace(-1, 1, shape[1])
    return x * channels.over_inputs(sizes, 1, x)


def member(layer: channels.Layer, x: Tensor, name: str = "", classes: Tensor | None = None) -> Member:
    minimum, maximum = channels.activation_range(x, 1)
    count = channels.input_channels(layer)
    return Member(
        name=name,
        layer=layer,
        weight=layer.weight.detach(),
        rows=x.reshape(len(x), count, -1),
        minimum=minimum,
        maximum=maximum,
        activation_absmax=channels.absmax_of(minimum, maximum),
        classes=torch.arange(count) if classes is None else classes,
    )


def scaled_numpy(layer: channels.Layer, x: Tensor, factor: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """X / s and W · s, the input channel of every weight looked up one element at a time."""
    weight = layer.weight.detach().numpy().copy()
    groups = 1 if isinstance(layer, nn.Linear) else layer.groups
    transposed = not isinstance(layer, nn.Linear) and layer.transposed
    for place in itertools.product(*map(range, weight.shape)):
        per_group = channels.input_channels(layer) // groups
        channel = place[0] if transposed else (place[0] * groups // len(weight)) * per_group + place[1]
        weight[place] *= factor[channel].item()
    return (x / channels.over_inputs(factor, 1, x)).numpy(), weight


# Factors


def test_factors_of_one_layer_are_the_plain_ones() -> None:
    for make in LAYERS.values():
        layer = make()
        alone = member(layer, inputs(layer))
        for alpha in (0.0, 0.35, 1.0):
            expected = smoothing_factor(alone.activation_absmax, channels.weight_absmax(layer.weight, layer), alpha)
            (found,) = shared_factors([alone], alpha)
            assert torch.equal(found, expected)


def test_shared_factors_by_brute_force() -> None:
    convolution, head = nn.Conv2d(4, 8, 3), nn.Linear(12, 5)  # the Linear reads three positions of each channel
    classes = [torch.tensor([2, 0, 1, 2]), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])]
    layers: list[channels.Layer] = [convolution, head]
    members = [member(layer, inputs(layer), "", own) for layer, own in zip(layers, classes, strict=True)]
    for alpha in (0.0, 0.25, 0.5, 1.0):
        found = shared_factors(members, alpha)
        for k in range(4):
            a = w = 0.0
            for one, own in zip(members, classes, strict=True):
                for c in range(len(own)):
                    if own[c] == k:
                        a = max(a, float(one.rows[:, c].abs().max()))
                        w = max(w, float(one.weight[:, c].abs().max()))
            for factor, own in zip(found, classes, strict=True):
                assert factor[own == k].tolist() == pytest.approx([a**alpha / w ** (1 - alpha)] * int((own == k).sum()))


def test_a_channel_without_activations_keeps_factor_one() -> None:
    layer = nn.Linear(3, 2)
    x = torch.randn(9, 3) * torch.tensor([1.0, 0.0, 5.0])
    (factor,) = shared_factors([member(layer, x)], 0.5)
    assert factor[1] == 1


# Errors


@pytest.mark.parametrize("bits", ["W4A4", "W8A8", "W2A8", "W8A3", "W4A32", "W32A4"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("alpha", [None, 0.0, 0.5])
def test_the_error_is_that_of_the_really_smoothed_and_quantized_layer(
    name: str, bits: str, alpha: float | None
) -> None:
    layer = LAYERS[name]()
    x = inputs(layer)
    weights, activations = (None if part == "32" else int(part) for part in bits[1:].split("A"))
    model: nn.Module = layer
    calibration = ptq.calibrate(layer, [x])
    factor = torch.ones(6)
    if alpha is not None:
        smoothed = ptq.smooth(layer, calibration, alpha)
        model, calibration, factor = smoothed.model, smoothed.calibration, smoothed.factors[""]
    quantized = ptq.quantize(model, calibration, weights, activations).model
    with torch.no_grad():
        bias = layer(torch.zeros_like(x))
        expected, found = layer(x).double() - bias, quantized(x).double() - bias
    reference = float((expected - found).square().sum() / expected.square().sum())
    assert output_error(member(layer, x), factor, weights, activations) == pytest.approx(reference, rel=1e-3)


@pytest.mark.parametrize("name", LAYERS)
def test_weights_and_inputs_are_rounded_to_the_same_last_bit(name: str) -> None:
    layer = LAYERS[name]()
    x = inputs(layer)
    smoothed = ptq.smooth(layer, ptq.calibrate(layer, [x]), 0.5)
    quantized = ptq.quantize(smoothed.model, smoothed.calibration, 4, 3).model
    trial = _Trial(member(layer, x), 4, 3)
    scaled = trial.scaled(smoothed.factors[""])

    weight = trial.quantized_weight(scaled, 1.0)  # [g, O/g, m, n]
    view = channels.grouped_view(quantized.weight.detach(), layer)
    if weight.shape[2] > 1:  # transposed
        view = view.flatten(3).transpose(2, 3)
    assert torch.equal(weight, view.reshape(weight.shape))

    rows = trial.quantized_rows(scaled, 1.0)  # [g, R, n]
    read = quantized.get_submodule("input_quantizer")(smoothed.model.get_submodule("smoothing")(x))
    assert torch.equal(rows, read.reshape(len(x), len(rows), -1).transpose(0, 1))


def test_the_grid_is_that_of_the_format() -> None:
    x = torch.cat([torch.randn(1000) * 3, torch.arange(-8, 8) * 0.25 + 0.125])  # halves too
    for bits, low, high in [(2, -1.0, 4.0), (4, -2.0, 1.75), (8, 0.0, 3.0)]:
        scale, zero_point = affine.affine_parameters(torch.tensor(low), torch.tensor(high), bits)
        first, last = affine.code_range(bits)
        found = _on_grid(x, scale, first - float(zero_point), last - float(zero_point))
        assert torch.equal(found, affine.fake(x, scale, zero_point, first, last))


@pytest.mark.parametrize("name", ["Conv2d grouped", "Linear", "ConvTranspose2d grouped"])
def test_clips_shorten_both_ranges(name: str) -> None:
    layer = LAYERS[name]()
    x, factor = inputs(layer), torch.rand(6) + 0.5
    rows, weight = scaled_numpy(layer, x, factor)
    low, high = min(0.0, rows.min()) * 0.6, max(0.0, rows.max()) * 0.6
    step = (high - low) / 7
    zero = np.clip(np.rint(-4 - low / step), -4, 3)
    rows = (np.clip(np.rint(rows / step) + zero, -4, 3) - zero) * step
    for output in range(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels):
        if not isinstance(layer, nn.Linear) and layer.transposed:
            per_group, inputs_per_group = weight.shape[1], len(weight) // layer.groups
            group = output // per_group
            view = weight[group * inputs_per_group : (group + 1) * inputs_per_group, output % per_group]
        else:
            view = weight[output]
        size = np.abs(view).max() * 0.8 / 7
        view[...] = np.clip(np.rint(view / size), -7, 7) * size
    quantized = copy.deepcopy(layer)
    with torch.no_grad():
        bias = layer(torch.zeros_like(x))
        quantized.weight.copy_(torch.from_numpy(weight))
        expected, found = layer(x) - bias, quantized(torch.from_numpy(rows).float()) - bias
    reference = float((expected - found).square().sum() / expected.square().sum())
    assert output_error(member(layer, x), factor, 4, 3, 0.6, 0.8) == pytest.approx(reference, rel=1e-3)


def test_float_has_no_error_and_empty_layers_have_none_either() -> None:
    layer = nn.Linear(6, 8)
    x = inputs(layer)
    assert output_error(member(layer, x), torch.rand(6) + 0.5, None, None) < 1e-12
    silent = nn.Linear(6, 8)
    nn.init.zeros_(silent.weight)
    assert output_error(member(silent, x), torch.ones(6), 4, 4) == 0
    unseen = replace(member(layer, x), rows=x[:0, :, None])
    assert output_error(unseen, torch.ones(6), 4, 4) == 0


# Choices


def brute_force(members: list[Member], weights: int | None, activations: int | None) -> dict[float | None, float]:
    errors: dict[float | None, float] = {}
    for alpha in (None, *GRID):
        factors = [torch.ones(len(one.classes)) for one in members] if alpha is None else shared_factors(members, alpha)
        each = [output_error(one, s, weights, activations) for one, s in zip(members, factors, strict=True)]
        errors[alpha] = sum(each) / len(each)
    return errors


@pytest.mark.parametrize("name", LAYERS)
def test_the_chosen_alpha_has_the_least_error(name: str) -> None:
    layer = LAYERS[name]()
    alone = [member(layer, inputs(layer), name)]
    for weights, activations in [(4, 4), (8, 4), (3, None)]:
        errors = brute_force(alone, weights, activations)
        choice = search_group(alone, weights, activations)
        assert choice.alpha == min(errors, key=lambda alpha: errors[alpha])
        assert choice.error == min(errors.values()) and list(choice.curve) == [None, *GRID]
        assert {alpha: by_name[name] for alpha, by_name in choice.curve.items()} == errors
        assert choice.activation_clips == choice.weight_clips == {name: 1.0}


def group_of_three() -> list[Member]:
    """Three layers that read one tensor, as the queries, keys and values of attention do."""
    x = inputs(nn.Linear(16, 1), rows=200)
    return [member(nn.Linear(16, outputs), x, name) for name, outputs in zip("qkv", (8, 8, 24), strict=True)]


def test_a_group_has_one_alpha_and_counts_its_members_alike() -> None:
    members = group_of_three()
    errors = brute_force(members, 4, 4)
    choice = search_group(members, 4, 4)
    assert choice.alpha == min(errors, key=lambda alpha: errors[alpha])
    assert choice.error == pytest.approx(min(errors.values()), rel=1e-12)
    assert sum(choice.curve[choice.alpha].values()) / 3 == pytest.approx(choice.error, rel=1e-12)


def test_an_outlier_channel_is_smoothed() -> None:
    layer = nn.Conv2d(16, 16, 3)
    sizes = torch.ones(16)
    sizes[5] = 60
    with torch.no_grad():
        layer.weight[:, 5] /= 60  # it matters no more than the others, but takes their range
    choice = search_group([member(layer, inputs(layer, 200, sizes=sizes), "layer")], 4, 4)
    assert choice.alpha is not None and choice.alpha > 0.3
    assert choice.error < 0.2 * choice.curve[None]["layer"]


def test_even_channels_are_not_made_worse() -> None:
    layer = nn.Linear(32, 32)
    for seed in range(5):
        choice = search_group([member(layer, inputs(layer, 100, seed, torch.ones(32)), "layer")], 4, 4)
        assert choice.error <= choice.curve[None]["layer"]


def test_no_smoothing_wins_ties() -> None:
    layer = nn.Linear(1, 4)  # one channel: a factor changes nothing but the last bits
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0], [2.0], [-4.0], [0.5]]))
    x = torch.tensor([[4.0], [1.0], [-2.0], [0.25]])  # and here with α = 1 or 0 not even those: powers of two
    choice = search_group([member(layer, x, "layer")], 4, 4, alphas=(0.0, 1.0))
    assert choice.alpha is None
    assert choice.curve[None] == choice.curve[0.0] == choice.curve[1.0]
    assert search_group([member(layer, x, "layer")], None, None, alphas=(0.0, 1.0)).alpha is None


def clipped_error(members: list[Member], choice: Choice, weights: int | None, activations: int | None) -> float:
    factors = [torch.ones(len(one.classes)) for one in members]
    if choice.alpha is not None:
        factors = shared_factors(members, choice.alpha)
    errors = [
        output_error(one, s, weights, activations, choice.activation_clips[one.name], choice.weight_clips[one.name])
        for one, s in zip(members, factors, strict=True)
    ]
    return sum(errors) / len(errors)


@pytest.mark.parametrize(("weights", "activations"), [(2, 2), (3, 4), (8, 8), (4, None), (None, 4)])
def test_clips_never_raise_the_error_and_are_what_they_say(weights: int | None, activations: int | None) -> None:
    groups = [[member(layer, inputs(layer, seed=3), name)] for name, layer in ((n, f()) for n, f in LAYERS.items())]
    for members in [*groups, group_of_three()]:
        plain, clipped = (search_group(members, weights, activations, clip=clip) for clip in (False, True))
        assert clipped.error <= plain.error and clipped.curve == plain.curve
        assert clipped_error(members, clipped, weights, activations) == clipped.error
        for ratios, bits in ((clipped.activation_clips, activations), (clipped.weight_clips, weights)):
            assert set(ratios) == {one.name for one in members}
            assert all(0 < ratio <= 1 and (bits is not None or ratio == 1) for ratio in ratios.values())


def test_clips_find_a_range_near_the_best_one() -> None:
    """Normal values at 3 bits: the best ratios of a fine two-dimensional grid are hardly any better."""
    layer = nn.Linear(64, 32)
    nn.init.normal_(layer.weight)
    alone = member(layer, torch.randn(400, 64), "layer")
    choice = search_group([alone], 3, 3, alphas=(), clip=True)
    ratios = [0.3 + 0.02 * i for i in range(36)]
    best = min(output_error(alone, torch.ones(64), 3, 3, a, w) for a in ratios for w in ratios)
    assert best < 0.8 * choice.curve[None]["layer"]
    assert choice.error < 1.02 * best
    activation, weight = choice.activation_clips["layer"], choice.weight_clips["layer"]
    for neighbour in (weight - 0.025, weight + 0.025):
        assert choice.error < output_error(alone, torch.ones(64), 3, 3, activation, neighbour)


def test_what_cannot_be_searched_is_said() -> None:
    alone = [member(nn.Linear(6, 8), inputs(nn.Linear(6, 8)))]
    with pytest.raises(InputError, match="a group without layers"):
        search_group([], 4, 4)
    with pytest.raises(InputError, match=r"alpha = 1\.5"):
        search_group(alone, 4, 4, alphas=(0.5, 1.5))
    with pytest.raises(InputError, match=r"bits = 1"):
        search_group(alone, 1, 4)
