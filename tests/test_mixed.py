"""Mixed precision: the search against brute force, the sensitivities against a network rounded by hand."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq.cli import main
from ptq.errors import InputError
from ptq.mixed import (
    Allocation,
    Sensitivities,
    answers_changed,
    cheapest,
    choose_bits,
    fewest_bits,
    sensitivities,
    with_bits,
)
from ptq.quantization import Bits, Scheme
from ptq.quantization.apply import quantize_by
from ptq.refinement import rounded_weights

WIDTHS = (2, 3, 4, 8)


@pytest.fixture
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = torch.tensor([0.1, 1.0, 20.0]).reshape(1, 3, 1, 1)
    return [torch.randn(16, 3, 8, 8, generator=generator) * size for _ in range(4)]


@pytest.fixture
def calibration(small_network: nn.Module, batches: list[Tensor]) -> ptq.Calibration:
    return ptq.calibrate(small_network, batches)


def brute_force(errors: list[dict[int, float]], elements: list[int], most: float) -> float:
    costs = [
        sum(of_layer[width] for of_layer, width in zip(errors, widths, strict=True))
        for widths in itertools.product(*errors)
        if sum(count * width for count, width in zip(elements, widths, strict=True)) <= most
    ]
    return min(costs)


@pytest.mark.parametrize("seed", range(12))
def test_the_search_is_as_good_as_trying_everything(seed: int) -> None:
    """Errors over six orders of magnitude, also such as rise with the bits."""
    random = np.random.default_rng(seed)
    errors = [{width: float(10 ** random.uniform(-6, 0)) for width in WIDTHS} for _ in range(6)]
    elements = [int(count) for count in random.integers(1, 5000, 6)]
    most = random.uniform(2.05, 8) * sum(elements)
    found = cheapest(errors, elements, most)
    assert sum(count * width for count, width in zip(elements, found, strict=True)) <= most
    cost = sum(of_layer[width] for of_layer, width in zip(errors, found, strict=True))
    assert cost == pytest.approx(brute_force(errors, elements, most), rel=1e-9)


def test_a_budget_that_fits_exactly_is_used_up() -> None:
    found = Sensitivities({"a": {2: 1.0, 4: 0.5}, "b": {2: 1.0, 4: 0.1}}, {"a": 100, "b": 100}, {})
    assert {name: choice.bits for name, choice in found.allocate(3.0).layers.items()} == {"a": 2, "b": 4}
    assert found.allocate(3.0).average == 3.0 and found.allocate(3.0).predicted == pytest.approx(1.1)
    assert found.allocate(2.99).average == 2.0


def test_fixed_layers_count_in_the_average() -> None:
    found = Sensitivities({"a": {2: 1.0, 4: 0.5}}, {"a": 300, "first": 100}, {"first": 8})
    assert found.allocate(5.0).average == 5.0 and found.allocate(4.9).average == 3.5
    with pytest.raises(InputError, match=r"budget 3: the layers take 3.5 bits on average at least"):
        found.allocate(3.0)


def test_sensitivities_are_those_of_one_rounded_layer(
    small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor]
) -> None:
    found = sensitivities(small_network, calibration, Scheme(), batches, widths=(3, 8), samples=64)
    x = torch.cat(batches).numpy()
    with torch.no_grad():
        expected = small_network(torch.from_numpy(x)).numpy()
        for name in calibration.layers:
            alone = quantize_by(Scheme(bits=Bits(3, None), include=(name,)), small_network, calibration).model
            difference = alone(torch.from_numpy(x)).numpy() - expected
            assert found.errors[name][3] == pytest.approx((difference**2).sum() / (expected**2).sum(), rel=1e-3)
            assert found.errors[name][8] < 0.05 * found.errors[name][3]
    assert found.elements == {name: small_network.get_submodule(name).weight.numel() for name in calibration.layers}


def test_compensated_rounding_costs_less(
    small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor]
) -> None:
    plain, better = (
        sensitivities(small_network, calibration, Scheme(), batches, widths=(3,), compensated=compensated)
        for compensated in (False, True)
    )
    assert sum(errors[3] for errors in better.errors.values()) < 0.7 * sum(
        errors[3] for errors in plain.errors.values()
    )


def test_the_same_again(small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor]) -> None:
    """And the caller's network stays as it is."""
    before = {key: value.clone() for key, value in small_network.state_dict().items()}
    one, other = (
        sensitivities(small_network, calibration, Scheme(), batches, widths=(2, 4), compensated=True) for _ in range(2)
    )
    assert one == other and one.allocate(3.0) == other.allocate(3.0)
    assert all(torch.equal(value, before[key]) for key, value in small_network.state_dict().items())


@pytest.mark.parametrize("name", ["stem", "depthwise", "grouped", "up", "head"])
def test_rounded_weights_are_on_a_grid(name: str, small_network: nn.Module, batches: list[Tensor]) -> None:
    weight = rounded_weights(small_network, [name], [2, 3], batches, Scheme())[name][3]
    layer = small_network.get_submodule(name)
    assert weight.shape == layer.weight.shape
    if isinstance(layer, nn.ConvTranspose2d):  # [in, out/groups, …] → [out, …]
        weight = torch.cat([part.transpose(0, 1) for part in weight.chunk(layer.groups)])
    for channel in weight.flatten(1):
        values = channel.abs().unique()
        step = values[values > 0].min() if (values > 0).any() else torch.tensor(1.0)
        steps = torch.stack([channel / (step / count) for count in range(1, 8)])  # one of them is the grid
        assert ((steps - steps.round()).abs().amax(1) < 1e-3).any()
        assert len(channel.unique()) <= 8


def test_the_scheme_keeps_what_the_user_said(
    small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor]
) -> None:
    scheme = Scheme(bits=Bits(4, 6), first_last=8, overrides=(("grouped", Bits(5, 5)),))
    found = sensitivities(small_network, calibration, scheme, batches, widths=WIDTHS)
    names = list(calibration.layers)
    assert set(found.errors) == set(names) - {names[0], names[-1], "grouped"}
    assert found.fixed == {names[0]: 8, names[-1]: 8, "grouped": 5}
    allocation = found.allocate(6.0)
    assigned = with_bits(scheme, allocation).assign(names)
    assert assigned[names[0]] == Bits(8, 8) and assigned["grouped"] == Bits(5, 5)
    for name, choice in allocation.layers.items():
        assert assigned[name] == Bits(choice.bits, 6)
    bits = {name: assigned[name].weights or 0 for name in names}
    total = sum(found.elements.values())
    assert sum(found.elements[name] * bits[name] for name in names) / total == pytest.approx(allocation.average)
    assert 5.19 < allocation.average <= 6.0


def test_nothing_to_choose(small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor]) -> None:
    with pytest.raises(InputError, match="no layer whose bits could be chosen"):
        sensitivities(small_network, calibration, Scheme(overrides=(("*", Bits(4, 4)),)), batches)


def test_a_mixed_network_is_better_than_a_uniform_one(digits: ptq.Task, digits_calibration: ptq.Calibration) -> None:
    """At the same bits on average, without labels and on images that it hasn't seen."""
    scheme = Scheme(bits=Bits(3, None))
    found = sensitivities(digits.model, digits_calibration, scheme, digits.calibration)
    mixed = with_bits(scheme, found.allocate(3.0))
    changes = [
        answers_changed(digits.model, quantize_by(one, digits.model, digits_calibration).model, digits.evaluation, 450)
        for one in (scheme, mixed)
    ]
    assert changes[1] < changes[0]


@pytest.mark.parametrize("refined_on", [0, 32, 64])
def test_answers_are_compared_on_other_samples_where_there_are_some(
    refined_on: int, small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor]
) -> None:
    seen: list[int] = []

    def quantize(scheme: Scheme) -> nn.Module:
        model = quantize_by(scheme, small_network, calibration).model
        model.register_forward_pre_hook(
            lambda _, args: seen.append(next(i for i, batch in enumerate(batches) if torch.equal(batch, args[0])))
        )
        return model

    scheme = Scheme(bits=Bits(4, None))
    found = choose_bits(small_network, calibration, scheme, batches, quantize, max_drop=20.0, refined_on=refined_on)
    assert set(seen) == ({0, 1, 2, 3} if refined_on in (0, 64) else {2, 3})
    assert found.changed is not None and found.changed <= 20


def test_one_of_budget_and_drop(small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor]) -> None:
    for options in ({}, {"budget": 4.0, "max_drop": 1.0}):
        with pytest.raises(InputError, match="give either --budget, in bits, or --max-drop"):
            choose_bits(small_network, calibration, Scheme(), batches, lambda _: small_network, **options)
    with pytest.raises(InputError, match="--max-drop -1: give per cent"):
        choose_bits(small_network, calibration, Scheme(), batches, lambda _: small_network, max_drop=-1.0)
    with pytest.raises(InputError, match="--budget 1: give the bits of a weight on average, 2 or more"):
        choose_bits(small_network, calibration, Scheme(), batches, lambda _: small_network, budget=1.0)


def test_the_command_says_what_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["ptq", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        assert not exit_.value.code
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    run("calibrate", "--batches", "2")
    found = json.loads(run("quantize", "--bits", "W4A6", "--budget", "3.5", "--refine", "none", "--json"))
    assert found["mixed"] == json.loads(Path("reports/digits/mixed.json").read_text())
    layers = found["mixed"]["layers"]
    assert found["bits"] == {name: f"W{choice['bits']}A6" for name, choice in layers.items()}
    total = sum(choice["elements"] for choice in layers.values())
    assert sum(choice["bits"] * choice["elements"] for choice in layers.values()) / total <= 3.5
    shown = run("quantize", "--bits", "W4A6", "--budget", "3.5", "--refine", "none")
    assert f"mixed precision: {found['mixed']['average']:.2f} bits a weight on average" in shown
    run("quantize", "--bits", "W4A6", "--refine", "none")
    assert not Path("reports/digits/mixed.json").exists()


def test_answers_are_counted() -> None:
    x = [torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [0.0, 3.0]])]
    assert answers_changed(nn.Identity(), nn.Softmax(1), x, 4) == 0
    other = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        other.weight.copy_(torch.tensor([[1.0, 0.0], [2.0, 1.0]]))
    assert answers_changed(nn.Identity(), other, x, 4) == 50  # [1, 0] → [1, 2] and [2, 1] → [2, 5]
    assert answers_changed(nn.Identity(), other, x, 1) == 100


def test_the_fewest_bits_that_change_little() -> None:
    """Of a network whose answers change by 10 / 2^bits per cent, in layers of one size."""
    errors = {str(layer): {width: 4.0**-width for width in range(2, 9)} for layer in range(8)}
    found = Sensitivities(errors, dict.fromkeys(errors, 10), {})

    def changed(allocation: Allocation) -> float:
        return 10 / 2**allocation.average

    best = fewest_bits(found, changed, 0.5)
    assert best.changed is not None and best.changed <= 0.5
    assert best.average - np.log2(20) < 0.25  # 10 / 2^b = 0.5, in steps of an eighth
    with pytest.raises(InputError, match=r"0.04 % of the answers change already at 8 bits"):
        fewest_bits(found, changed, 0.01)
