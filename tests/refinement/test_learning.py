"""Blocks that are learned: the gradients, what counts as a block, and closer to the float network at the end."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq import channels
from ptq.batches import Call
from ptq.quantization import Bits, FakeQuantize, Scheme
from ptq.refinement import blocks, refine
from ptq.refinement import network as whole
from ptq.refinement.learning import Recipe, drawn_parts, learn, parts_of, straight_through
from ptq.refinement.usage import look_at_usage

W3A3 = Scheme(bits=Bits(3, 3))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.second(self.first(x).relu())).relu()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.stage = nn.Sequential(Residual(8), Residual(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stage(self.stem(x).relu()).mean((2, 3)))


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return Network()


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "RECIPE", replace(blocks.RECIPE, steps=20))
    monkeypatch.setitem(whole.RECIPES, "best", replace(whole.RECIPES["best"], steps=50))


def images(seed: int, count: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, 3, 8, 8, generator=generator).split(32))


@torch.no_grad()
def distance(found: nn.Module, expected: nn.Module, batches: list[Tensor]) -> float:
    return float(sum((found(batch) - expected(batch)).square().sum() for batch in batches))


def test_the_gradients_are_those_of_lsq() -> None:
    x = torch.tensor([-9.0, -1.2, 0.3, 0.7, 9.0], requires_grad=True)
    scale = torch.tensor(0.5, requires_grad=True)
    y = straight_through(x, scale, -4, 3)
    np.testing.assert_allclose(y.detach().numpy(), [-2.0, -1.0, 0.5, 0.5, 1.5])
    y.backward(torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0]))
    assert x.grad is not None and scale.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), [0, 10, 100, 1000, 0])
    # -4 and 3 at the ends; round(x/s) - x/s = 0.4, 0.4 and -0.4 inside
    assert float(scale.grad) == pytest.approx(-4 * 1 + 0.4 * 10 + 0.4 * 100 - 0.4 * 1000 + 3 * 10000)


def test_the_gradient_of_scales_by_channel_is_summed_over_the_rest() -> None:
    x, scale = torch.randn(3, 4, 5), torch.rand(4, 1) + 0.5
    whole = scale.clone().requires_grad_()
    straight_through(x, whole, -2, 1).square().sum().backward()
    for channel in range(4):
        one = scale[channel].clone().requires_grad_()
        straight_through(x[:, channel], one, -2, 1).square().sum().backward()
        assert whole.grad is not None and one.grad is not None
        torch.testing.assert_close(whole.grad[channel], one.grad)


def test_blocks_are_the_smallest_modules_with_two_layers(network: nn.Module) -> None:
    usage = look_at_usage(network, Call((images(0)[0],), {}, None))
    assert list(usage.layers) == [
        "stem", "stage.0.first", "stage.0.second", "stage.1.first", "stage.1.second", "head",
    ]  # fmt: skip
    assert usage.blocks(list(usage.layers)) == {
        "stage.0": ["stage.0.first", "stage.0.second"],
        "stage.1": ["stage.1.first", "stage.1.second"],
    }
    assert usage.blocks(["stem", "stage.0.first", "stage.1.first"]) == {"stage": ["stage.0.first", "stage.1.first"]}
    assert usage.largest_map == 8 * 6 * 6 * 4


def test_a_module_that_runs_twice_or_returns_a_tuple_is_no_block() -> None:
    class Pair(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x), x  # type: ignore[return-value]

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.pair = Residual(3), Pair(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.pair(self.twice(self.twice(x)))[0]

    usage = look_at_usage(Odd(), Call((images(0)[0],), {}, None))
    assert usage.layers["twice.first"] == 2
    assert usage.blocks(list(usage.layers)) == {}


def test_learning_brings_a_block_closer(network: nn.Module) -> None:
    """With quantized inputs and free weights, on images that it hasn't seen, too."""
    block = network.stage[0]
    with torch.no_grad():
        seen, others = ([network.stem(batch).relu() for batch in images(seed, 256)] for seed in (0, 1))
        targets = [block(batch) for batch in seen]
    quantized = ptq.quantization.quantize(block, ptq.calibrate(block, seen), bits="W3A3").model
    before = [distance(quantized, block, batches) for batches in (seen, others)]
    calls = [Call((batch,), {}, None) for batch in seen]
    recipe = Recipe(steps=100)
    learn(quantized, dict(channels.layers_of(quantized)), drawn_parts(calls, targets, recipe, 0), recipe)
    after = [distance(quantized, block, batches) for batches in (seen, others)]
    assert after[0] < 0.5 * before[0] and after[1] < 0.5 * before[1]


def test_weights_that_have_bits_are_learned_on_their_grid() -> None:
    """Towards another layer, so that codes have to change."""
    torch.manual_seed(0)
    layer, other, x = nn.Linear(16, 4), nn.Linear(16, 4), torch.randn(256, 16)
    targets, recipe = [other(x).detach()], Recipe(steps=300)
    for bits in (3, None):
        found = ptq.quantization.quantize(layer, ptq.calibrate(layer, [x]), bits="W3").model
        before, scale = found.weight.detach().clone(), found.weight_scale[:, None].clone()
        examples = drawn_parts([Call((x,), {}, None)], targets, recipe, 0)
        learn(found, {"": found}, examples, recipe, bits={"": bits})
        assert distance(found, other, [x]) < 0.3 * distance(layer, other, [x])
        steps = (found.weight / found.weight_scale[:, None]).detach()
        assert float((steps - before / scale).abs().max()) > 1.9
        assert torch.equal(found.weight_scale[:, None], scale) == (bits is None)  # scales of a grid are learned
        assert torch.allclose(steps, steps.round(), atol=1e-5) == (bits is not None)
        assert bits is None or bool(((steps > -4 - 1e-5) & (steps < 3 + 1e-5)).all())


def test_weights_with_zero_points_are_learned_on_their_grid() -> None:
    """A grid that lies above zero: what is on it is found, ends included, and what lies beyond it isn't."""
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 4, bias=False), torch.randn(256, 16)
    layer.weight.data = torch.randint(0, 8, (4, 16)).float()
    recipe = Recipe(steps=600, weights=0.05, scales=0.0)
    for moved in (0, -5):
        found = ptq.quantization.quantize(layer, ptq.calibrate(layer, [x]), bits="W3").model
        found.weight_zero_point.fill_(-4.0)  # codes from 0 to 7
        found.weight.data, found.weight_scale = layer.weight.detach().clone(), torch.ones(4)
        wanted = layer.weight.detach().flip(0) + moved
        learn(found, {"": found}, drawn_parts([Call((x,), {}, None)], [x @ wanted.T], recipe, 0), recipe, bits={"": 3})
        codes = found.weight.detach()
        assert set(codes.round(decimals=4).unique().tolist()) <= set(range(8))
        assert float((codes == wanted).float().mean()) > 0.8 or moved


def test_scales_of_a_grid_are_learned() -> None:
    """Where the codes fit and the scales are wrong, they are what is found."""
    torch.manual_seed(0)
    codes, x = torch.randint(-3, 4, (4, 16)).float(), torch.randn(256, 16)
    codes[:, 0] = 3  # so that the largest weight says the scale
    layer, wanted = nn.Linear(16, 4, bias=False), torch.tensor([0.8, 1.1, 1.3, 1.0])
    layer.weight.data = codes.clone()
    found = ptq.quantization.quantize(layer, ptq.calibrate(layer, [x]), bits="W3").model
    recipe = Recipe(steps=400, weights=0.0, scales=0.01)
    targets = [x @ (codes * wanted[:, None]).T]
    learn(found, {"": found}, drawn_parts([Call((x,), {}, None)], targets, recipe, 0), recipe, bits={"": 3})
    torch.testing.assert_close(found.weight_scale, wanted, atol=1e-3, rtol=0)
    torch.testing.assert_close(found.weight, codes * found.weight_scale[:, None])


def test_outputs_within_a_block_count_by_their_share() -> None:
    """Two layers may share the work in many ways: only what the first is to return tells which."""
    torch.manual_seed(0)
    x, start = torch.randn(256, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    outputs = {"": start(x).detach(), "0": 1.5 * start[0](x).detach()}
    recipe = Recipe(steps=400, weights=0.02, biases=0.02)
    alone, both = copy.deepcopy(start), copy.deepcopy(start)
    for block, shares in ((alone, {"": 1.0}), (both, {"": 1.0, "0": 1.0})):
        examples = [(Call((x,), {}, None), outputs)] * recipe.steps
        learn(block, dict(channels.layers_of(block)), examples, recipe, shares=shares)
    torch.testing.assert_close(alone[0](x), start[0](x))  # the answer was right from the start
    torch.testing.assert_close(both[0](x), outputs["0"], atol=0.02, rtol=0)
    torch.testing.assert_close(both(x), outputs[""], atol=0.02, rtol=0)


def test_what_learning_makes_worse_is_left_as_it_was(network: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    calibration = ptq.calibrate(network, images(0))
    wild = whole.NetworkRecipe(steps=50, weights=100.0, scales=5.0, biases=100.0, blocks=1.0, vary_each=1)
    monkeypatch.setattr(blocks, "RECIPE", replace(wild, steps=5))
    for effort in whole.RECIPES:
        monkeypatch.setitem(whole.RECIPES, effort, wild)
    fast, best = (refine(network, calibration, W3A3, images(0), effort) for effort in ("fast", "best"))
    assert fast.learned_as_a_whole and best.learned_as_a_whole
    monkeypatch.setattr(whole, "_WORK", 0)
    without = refine(network, calibration, W3A3, images(0), "fast")
    assert not without.learned_as_a_whole
    for key, value in without.model.state_dict().items():
        assert torch.equal(value, fast.model.state_dict()[key]) and torch.equal(value, best.model.state_dict()[key])


@pytest.mark.usefixtures("few_steps")
def test_best_learns_each_block(network: nn.Module) -> None:
    calibration = ptq.calibrate(network, images(0, 256))
    fast, best = (refine(network, calibration, W3A3, images(0, 256), effort) for effort in ("fast", "best"))
    assert list(best.blocks) == ["stage.0", "stage.1"] and fast.blocks == {}
    assert best.learned_as_a_whole and fast.learned_as_a_whole


def test_large_networks_are_learned_in_fewer_steps_by_fast_and_the_largest_not_at_all() -> None:
    """ResNet-20, with 41 million multiplications an image, takes all 320, ResNet-56 136 and ResNet-18 none."""
    steps = [
        recipe.steps if (recipe := whole.recipe_for("fast", count)) else 0
        for count in (41_000_000, 125_500_000, 1_800_000_000)
    ]
    assert steps == [320, 136, 0]
    assert whole.recipe_for("best", 10**12) == whole.RECIPES["best"]


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (nn.Conv2d(4, 6, 3, padding=1, stride=2, groups=2), (4, 8, 8), 6 * 2 * 9 * 4 * 4),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), (4, 5, 5), 4 * 6 * 9 * 5 * 5),
        (nn.Linear(4, 6), (7, 4), 4 * 6 * 7),
    ],
    ids=["convolution", "transposed", "linear"],
)
def test_multiplications_are_counted(layer: nn.Module, shape: tuple[int, ...], expected: int) -> None:
    assert look_at_usage(layer, Call((torch.randn(2, *shape),), {}, None)).multiplications == expected


def test_the_whole_network_is_learned_from_what_the_float_one_answers() -> None:
    x = torch.arange(40.0).view(40, 1)
    double = nn.Linear(1, 1)
    nn.init.constant_(double.weight, 2.0), nn.init.zeros_(double.bias)
    parts = [Call((part,), {}, None) for part in x.split(16)]
    found, again = (list(whole.examples_of(double, parts, 30, seed=0)) for _ in range(2))
    assert [len(target[""]) for _, target in found[:3]].count(8) == 1  # the last part is smaller, and comes along
    assert all(torch.equal(target[""], 2 * call.args[0]) for call, target in found)
    assert all(torch.equal(one[0].args[0], other[0].args[0]) for one, other in zip(found, again, strict=True))


def test_one_in_so_many_examples_is_varied() -> None:
    parts = [Call((torch.randn(16, 1, 8, 8),), {}, None) for _ in range(3)]
    found = whole.examples_of(nn.Identity(), parts, 6, seed=0, vary_each=3)
    plain = [any(torch.equal(call.args[0], part.args[0]) for part in parts) for call, _ in found]
    assert plain == [False, True, True, False, True, True]


@pytest.mark.usefixtures("few_steps")
def test_what_is_close_is_not_learned_as_a_whole(network: nn.Module) -> None:
    calibration = ptq.calibrate(network, images(0))
    learned = [
        refine(network, calibration, Scheme(bits=Bits(bits, bits)), images(0), "best").learned_as_a_whole
        for bits in (8, 3)
    ]
    assert learned == [False, True]


@pytest.mark.usefixtures("few_steps")
def test_tokens_are_not_mixed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    tokens = [torch.randint(0, 10, (16, 4)) for _ in range(4)]
    refined = refine(model, ptq.calibrate(model, tokens), W3A3, tokens, "best")
    assert refined.samples == 64 and not refined.learned_as_a_whole


@pytest.mark.usefixtures("few_steps")
def test_what_was_learned_is_on_the_grid_and_in_the_file(network: nn.Module, tmp_path: Path) -> None:
    calibration = ptq.calibrate(network, images(0))
    best = refine(network, calibration, W3A3, images(0), "best")
    for name in best.bits:
        layer = best.model.get_submodule(name)
        steps = layer.weight.detach().flatten(1) / layer.weight_scale[:, None]
        torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0)
        codes = steps + layer.weight_zero_point[:, None]
        assert float(codes.min()) > -4 - 1e-4 and float(codes.max()) < 3 + 1e-4
        assert isinstance(layer.input_quantizer, FakeQuantize)
    best.save(tmp_path / "best.safetensors")
    loaded = ptq.Quantized.load(tmp_path / "best.safetensors", network, calibration)
    assert distance(loaded.model, best.model, images(1)) == 0


@pytest.mark.usefixtures("few_steps")
def test_blocks_that_change_their_input_in_place(network: nn.Module) -> None:
    """What such a block gets is run several times; the result is that of a block that leaves its input alone."""

    class Careless(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x.relu_()).relu_()).add_(x)

    class Careful(Residual):
        def forward(self, x: Tensor) -> Tensor:
            x = x.relu()
            return self.second(self.first(x).relu()) + x

    states = []
    for kind in (Careless, Careful):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), kind(8), nn.Flatten(), nn.Linear(288, 5))
        refined = refine(model, ptq.calibrate(model, images(0)), W3A3, images(0), "best")
        assert list(refined.blocks) == ["1"]
        states.append(refined.model.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_only_what_belongs_to_samples_is_cut() -> None:
    mask, x = torch.ones(3, 3), torch.arange(10.0)
    parts = list(parts_of(Call((x, (x, "word")), {"mask": mask}, None), x[:, None], 4))
    assert [call.args[0].tolist() for call, _ in parts] == [x[:4].tolist(), x[4:8].tolist(), x[8:].tolist()]
    assert [len(target) for _, target in parts] == [4, 4, 2]
    assert all(call.kwargs["mask"] is mask and len(call.args[1][0]) == len(target) for call, target in parts)


@pytest.mark.usefixtures("few_steps")
def test_learning_is_the_same_each_time(network: nn.Module) -> None:
    calibration = ptq.calibrate(network, images(0))
    states = [refine(network, calibration, W3A3, images(0), "best", seed=3).model.state_dict() for _ in range(2)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
