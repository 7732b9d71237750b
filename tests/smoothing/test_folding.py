"""Folded smoothing: shared factors, free at run time, undone bit for bit, and understood by all that comes after it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ptq
from ptq import channels
from ptq.calibration import Calibration
from ptq.errors import EquivalenceError, InputError
from ptq.smoothing.modules import ChannelClamp, FoldingNotes, InputScaling


class Mobile(nn.Module):
    """Foldable: three readers of one tensor, a ReLU6 used twice, a residual. Not: SiLU, a cat with the input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(8)
        self.relu6 = nn.ReLU6()
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.depthwise_norm = nn.BatchNorm2d(8)
        self.left = nn.Conv2d(8, 6, 1)
        self.right = nn.Conv2d(8, 6, 3, padding=1, bias=False)
        self.right_norm = nn.BatchNorm2d(6)
        self.bounded = nn.Hardtanh(-2, 3, inplace=True)
        self.mixed = nn.Conv2d(9, 5, 1)
        self.inner = nn.Linear(5, 7)
        self.head = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu6(self.stem_norm(self.stem(x)))
        y = y + self.relu6(self.depthwise_norm(self.depthwise(y)))
        z = self.bounded(self.left(y) + self.right_norm(self.right(y)))
        w = F.silu(self.mixed(torch.cat([z, x], 1)))
        return self.head(self.inner(w.mean((2, 3))).relu())


ACTIONS = {
    "stem": "explicit",  # reads the input of the model
    "depthwise": "folded",
    "left": "folded",
    "right": "folded",
    "mixed": "explicit",  # a part of what it reads is the input
    "inner": "explicit",  # behind SiLU
    "head": "folded",
}


@pytest.fixture
def mobile(random_batchnorms) -> nn.Module:
    torch.manual_seed(0)
    model = random_batchnorms(Mobile())
    for name, layer in channels.layers_of(model):  # outlier channels
        if name != "stem":
            channels.scale_outputs(
                layer.weight.data, layer, 10 ** (2 * torch.rand(channels.output_channels(layer)) - 1)
            )
    return model


@pytest.fixture
def mobile_calibration(mobile: nn.Module, small_batches: list[Tensor]) -> Calibration:
    return ptq.calibrate(mobile, small_batches)


def actions(smoothed: ptq.Smoothed) -> dict[str, str]:
    return {entry.layer: entry.action for entry in smoothed.ledger}


@torch.no_grad()
def difference(model: nn.Module, other: nn.Module, batches: list[Tensor]) -> float:
    """Relative to the largest output, in float64."""
    model, other = copy.deepcopy(model).double(), copy.deepcopy(other).double()
    pairs = [(model(x.double()), other(x.double())) for x in batches]
    return max(float((found - expected).abs().max() / expected.abs().max()) for expected, found in pairs)


def test_each_layer_is_folded_or_explicit_and_the_function_is_the_same(
    mobile: nn.Module, mobile_calibration: Calibration, small_batches: list[Tensor]
) -> None:
    smoothed = ptq.smooth(mobile, mobile_calibration, 0.5, batches=small_batches)
    assert actions(smoothed) == ACTIONS
    assert difference(mobile, smoothed.model, small_batches) < 1e-6
    assert {name for name, layer in channels.layers_of(smoothed.model) if hasattr(layer, "smoothing")} == {
        name for name, action in ACTIONS.items() if action == "explicit"
    }


def test_the_ledger_names_sources_and_sharers(mobile: nn.Module, mobile_calibration: Calibration) -> None:
    ledger = {entry.layer: entry for entry in ptq.smooth(mobile, mobile_calibration, 0.5).ledger}
    assert ledger["left"].reason == ledger["depthwise"].reason == "into stem_norm, depthwise_norm"
    assert ledger["left"].shared_with == ("depthwise", "right")
    assert ledger["depthwise"].shared_with == ("left", "right")
    assert (ledger["head"].reason, ledger["head"].shared_with) == ("into inner", ())
    assert ledger["stem"].reason == "it reads an input of the model"
    assert ledger["inner"].reason.startswith("it reads ")
    for name, entry in ledger.items():
        assert entry.absmax_before == float(mobile_calibration.layers[name].activation_absmax.max())


@pytest.mark.parametrize("alpha", [0.0, 0.35, 1.0])
def test_readers_of_one_tensor_share_the_factor_of_the_larger_weight(alpha: float) -> None:
    """``s = a^α / max(w_1, w_2)^(1-α)``, worked out in numpy."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 3, groups=2)
            self.c = nn.Conv2d(6, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x).relu()
            return self.b(y).mean() + self.c(y)

    torch.manual_seed(0)
    model, x = Two(), torch.randn(4, 3, 5, 5) * torch.tensor([0.1, 1.0, 20.0]).view(3, 1, 1)
    smoothed = ptq.smooth(model, ptq.calibrate(model, [x]), alpha)
    with torch.no_grad():
        activation = model.a(x).relu().amax((0, 2, 3)).numpy()
    grouped, dense = model.b.weight.detach().numpy(), model.c.weight.detach().numpy()
    expected = np.empty(6)
    for c in range(6):
        group, place = divmod(c, 3)  # 6 channels in 2 groups; 2 outputs in each
        w = max(np.abs(grouped[2 * group : 2 * group + 2, place]).max(), np.abs(dense[:, c]).max())
        expected[c] = activation[c] ** alpha / w ** (1 - alpha) if activation[c] > 0 else 1
    np.testing.assert_allclose(smoothed.factors["b"].numpy(), expected, rtol=1e-5)
    assert torch.equal(smoothed.factors["b"], smoothed.factors["c"])
    produced, read = smoothed.model.a.weight.detach().numpy(), smoothed.model.c.weight.detach().numpy()
    by_input = smoothed.factors["a"].numpy().reshape(1, 3, 1, 1)
    rows = model.a.weight.detach().numpy() / expected.reshape(6, 1, 1, 1) * by_input
    np.testing.assert_allclose(produced, rows, rtol=1e-5)
    np.testing.assert_allclose(read, dense * expected.reshape(1, 6, 1, 1), rtol=1e-5)


def test_positions_of_one_channel_share_a_factor() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 2))
    x = torch.randn(8, 3, 3, 3)
    calibration = ptq.calibrate(model, [x])
    factor = ptq.smooth(model, calibration, 0.5).factors["3"].view(4, 9)
    activation = calibration.layers["3"].activation_absmax.view(4, 9).amax(1)
    weight = model[3].weight.detach().abs().amax(0).view(4, 9).amax(1)
    torch.testing.assert_close(factor, (activation / weight).sqrt()[:, None].expand(4, 9))


def test_never_explicit_costs_nothing_at_run_time(
    mobile: nn.Module, mobile_calibration: Calibration, small_batches: list[Tensor]
) -> None:
    smoothed = ptq.smooth(mobile, mobile_calibration, 0.5, explicit="never", batches=small_batches)
    assert actions(smoothed) == {
        name: "folded" if action == "folded" else "skipped" for name, action in ACTIONS.items()
    }
    assert all("can't be folded: " in entry.reason for entry in smoothed.ledger if entry.action == "skipped")
    modules = list(smoothed.model.modules())
    assert not any(isinstance(module, InputScaling) for module in modules)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in modules)
    assert called(smoothed.model, small_batches[0]) == called(mobile, small_batches[0])
    assert isinstance(smoothed.model.relu6, ChannelClamp) and isinstance(smoothed.model.bounded, nn.Hardtanh)
    assert difference(mobile, smoothed.model, small_batches) < 1e-6


def test_what_arrives_scaled_is_made_good_in_layers_that_are_not_smoothed(
    mobile: nn.Module, small_batches: list[Tensor]
) -> None:
    """A reader whose weight is zero has no say in the factor, and its bias still counts."""
    mobile.left.weight.data.zero_()
    smoothed = ptq.smooth(mobile, ptq.calibrate(mobile, small_batches), 0.5, batches=small_batches)
    weights = mobile.depthwise, mobile.right
    absmax = []
    for layer, norm in zip(weights, (mobile.depthwise_norm, mobile.right_norm), strict=True):
        gain = norm.weight / (norm.running_var + norm.eps).sqrt()
        scaled = (layer.weight * gain.view(-1, 1, 1, 1)).detach().abs().amax((2, 3))
        absmax.append(scaled.flatten() if layer.groups > 1 else scaled.amax(0))
    largest = torch.maximum(*absmax)
    calibration = ptq.calibrate(mobile, small_batches)
    activation = torch.maximum(
        calibration.layers["depthwise"].activation_absmax, calibration.layers["right"].activation_absmax
    )
    torch.testing.assert_close(smoothed.factors["right"], (activation / largest).sqrt())


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """What each module returned, in the order of execution."""
    outputs: list[tuple[str, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda _, __, y, name=name: outputs.append((name, y.clone())))
        for name, module in model.named_modules()
    ]
    with torch.no_grad():
        yield outputs
    for handle in handles:
        handle.remove()


def called(model: nn.Module, x: Tensor) -> list[str]:
    with recorded(model) as outputs:
        model(x)
    return [name for name, _ in outputs]


@pytest.mark.parametrize("explicit", ["allow", "never"])
def test_undo_is_bit_exact_and_brings_the_clamps_back(
    explicit: str, mobile: nn.Module, small_batches: list[Tensor]
) -> None:
    mobile.relu6_too = mobile.relu6  # a second name
    calibration = ptq.calibrate(mobile, small_batches)
    smoothed = ptq.smooth(mobile, calibration, 0.5, explicit=explicit)
    assert isinstance(smoothed.model.relu6_too, ChannelClamp) and smoothed.model.relu6_too is smoothed.model.relu6
    assert not torch.equal(smoothed.model.left.weight, mobile.left.weight)
    restored = smoothed.undo()
    assert repr(restored) == repr(mobile) and restored.relu6_too is restored.relu6
    expected = mobile.state_dict()
    assert restored.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in restored.state_dict().items())
    assert not any(module._forward_pre_hooks for module in restored.modules())
    calibration.check(restored)


def test_hooks_and_mode_of_a_clamp_stay(mobile: nn.Module, small_batches: list[Tensor]) -> None:
    seen: list[Tensor] = []
    mobile.relu6.register_forward_hook(lambda _, __, y: seen.append(y))
    smoothed = ptq.smooth(mobile, ptq.calibrate(mobile, small_batches), 0.5)
    seen.clear()
    smoothed.model(small_batches[0])
    assert len(seen) == 2 and smoothed.model.relu6.training == mobile.relu6.training


@pytest.mark.parametrize("explicit", ["allow", "never"])
def test_a_file_gives_the_folded_model_back(
    explicit: str, mobile: nn.Module, mobile_calibration: Calibration, small_batches: list[Tensor], tmp_path: Path
) -> None:
    saved = ptq.smooth(mobile, mobile_calibration, 0.5, explicit=explicit, batches=small_batches)
    saved.save(tmp_path / "smoothed.safetensors")
    saved.calibration.save(tmp_path / "calibration.safetensors")
    calibration = Calibration.load(tmp_path / "calibration.safetensors")
    loaded = ptq.Smoothed.load(tmp_path / "smoothed.safetensors", mobile, calibration)
    assert (loaded.ledger, loaded.proof, loaded.factors.keys()) == (saved.ledger, saved.proof, saved.factors.keys())
    assert repr(loaded.model) == repr(saved.model) and isinstance(loaded.model.relu6, ChannelClamp)
    with torch.no_grad():
        for x in small_batches:
            assert torch.equal(loaded.model(x), saved.model(x))
    quantized = [ptq.quantize(s.model, s.calibration, 8, 8).model for s in (saved, loaded)]
    errors = [ptq.layer_errors(mobile, model, small_batches) for model in quantized]
    assert errors[0] == errors[1]  # the notes of what was folded came along


def test_the_forms_compute_the_same_and_share_or_not(
    mobile: nn.Module, mobile_calibration: Calibration, small_batches: list[Tensor]
) -> None:
    folded = ptq.smooth(mobile, mobile_calibration, 0.5)
    hooked = ptq.smooth(mobile, mobile_calibration, 0.5, form="hook")
    assert set(actions(hooked).values()) == {"explicit"}
    assert difference(folded.model, hooked.model, small_batches) < 1e-6
    for alone in ("stem", "mixed", "inner", "head"):  # nothing to share: the same factors
        torch.testing.assert_close(folded.factors[alone], hooked.factors[alone])
    assert not torch.allclose(hooked.factors["left"], hooked.factors["right"])


def test_a_folded_model_is_smoothed_already(mobile: nn.Module, mobile_calibration: Calibration) -> None:
    smoothed = ptq.smooth(mobile, mobile_calibration, 0.5, explicit="never")
    with pytest.raises(InputError, match="smoothed already"):
        ptq.smooth(smoothed.model, smoothed.calibration, 0.5)


def test_a_partly_foldable_layer_divides_the_rest() -> None:
    """``mixed`` reads the model's input beside channels that ``other`` has scaled already."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.other, self.mixed = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1), nn.Conv2d(7, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.other(y) + self.mixed(torch.cat([y, x], 1))

    torch.manual_seed(0)
    model, batches = Partly(), [torch.randn(4, 3, 5, 5) for _ in range(2)]
    smoothed = ptq.smooth(model, ptq.calibrate(model, batches), 0.5, batches=batches)
    assert actions(smoothed) == {"a": "explicit", "other": "folded", "mixed": "explicit"}
    rest = smoothed.model.mixed.smoothing.factor
    torch.testing.assert_close(rest[:4] * smoothed.factors["other"], smoothed.factors["mixed"][:4])
    torch.testing.assert_close(rest[4:], smoothed.factors["mixed"][4:])
    assert difference(model, smoothed.model, batches) < 1e-6
    free = ptq.smooth(model, ptq.calibrate(model, batches), 0.5, explicit="never", batches=batches)
    torch.testing.assert_close(free.factors["mixed"][:4], free.factors["other"])
    assert bool((free.factors["mixed"][4:] == 1).all())
    assert difference(model, free.model, batches) < 1e-6


@pytest.mark.parametrize("explicit", ["allow", "never"])
def test_the_calibration_of_a_folded_model_is_that_of_a_fresh_pass(
    explicit: str, mobile: nn.Module, mobile_calibration: Calibration, small_batches: list[Tensor]
) -> None:
    smoothed = ptq.smooth(mobile, mobile_calibration, 0.6, explicit=explicit)
    again = ptq.calibrate(smoothed.model, small_batches)
    assert again.model_fingerprint == smoothed.calibration.model_fingerprint
    assert again.batchnorms == smoothed.calibration.batchnorms
    for name, layer in again.layers.items():
        rescaled = smoothed.calibration.layers[name]
        for statistic in ("minimum", "maximum", "activation_absmax", "weight_absmax"):
            expected, found = getattr(layer, statistic), getattr(rescaled, statistic)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("keep_batchnorm", [False, True])
@pytest.mark.parametrize("explicit", ["allow", "never"])
def test_layer_errors_are_told_in_the_original_scale(
    explicit: str,
    keep_batchnorm: bool,
    mobile: nn.Module,
    mobile_calibration: Calibration,
    small_batches: list[Tensor],
) -> None:
    """``Σ|y-ŷ| / Σ|y|`` by hand, where what folding divided outputs by is seen by comparing the two float networks."""
    smoothed = ptq.smooth(mobile, mobile_calibration, 0.5, explicit=explicit)
    quantized = ptq.quantize(smoothed.model, smoothed.calibration, 6, 6, keep_batchnorm=keep_batchnorm)
    errors = ptq.layer_errors(mobile, quantized.model, small_batches)
    assert errors.keys() == ACTIONS.keys()
    pairs = {} if keep_batchnorm else {"stem": "stem_norm", "depthwise": "depthwise_norm", "right": "right_norm"}
    assert mobile_calibration.batchnorms.items() >= pairs.items()
    for name in ACTIONS:
        place = pairs.get(name, name)
        layer = quantized.model.get_submodule(name)
        axis = channels.channel_axis(layer)
        isolated, accumulated, whole = 0.0, 0.0, 0.0
        for x in small_batches:
            read, y = input_and_output(mobile, name, place, x)
            _, scaled = input_and_output(smoothed.model, name, place, x)
            factor = (y * scaled).transpose(axis, -1).flatten(0, -2).sum(0)
            factor = channels.over_inputs(
                factor / scaled.square().transpose(axis, -1).flatten(0, -2).sum(0), axis, y
            )  # least squares, channel by channel
            divisor = torch.ones(read.shape[axis])
            if ACTIONS[name] == "folded" or (name == "mixed" and explicit == "never"):
                divisor = smoothed.factors.get(name, divisor)
            with torch.no_grad():
                alone = layer(read / channels.over_inputs(divisor, axis, read)) * factor
            _, together = input_and_output(quantized.model, name, name, x)
            isolated += float((y - alone).abs().sum())
            accumulated += float((y - together * factor).abs().sum())
            whole += float(y.abs().sum())
        assert errors[name].isolated.l1 == pytest.approx(isolated / whole, rel=1e-3)
        assert errors[name].accumulated.l1 == pytest.approx(accumulated / whole, rel=1e-3)
        assert 0 < errors[name].isolated.l1 < 0.5


def input_and_output(model: nn.Module, name: str, place: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the layer reads, before any hook of its own, and what the module at ``place`` returns."""
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(
        lambda _, args: seen.append(args[0].clone()), prepend=True
    )
    with recorded(model) as outputs:
        model(x)
    handle.remove()
    return seen[0], dict(outputs)[place]


def test_quantizing_a_folded_model_folds_its_batchnorms(
    mobile: nn.Module, mobile_calibration: Calibration, small_batches: list[Tensor]
) -> None:
    smoothed = ptq.smooth(mobile, mobile_calibration, 0.5)
    quantized = ptq.quantize(smoothed.model, smoothed.calibration, 16, 16).model
    assert not any(isinstance(module, nn.BatchNorm2d) for module in quantized.modules())
    assert difference(mobile, quantized, small_batches) < 1e-3
    assert any(isinstance(module, FoldingNotes) for module in quantized.modules())


@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("explicit", ["allow", "never"])
def test_auto_is_never_worse_than_none_on_the_sampled_rows(
    bits: int, explicit: str, mobile: nn.Module, mobile_calibration: Calibration, small_batches: list[Tensor]
) -> None:
    """Group by group, and by the definition for the two Linears: ``Σ(y-ŷ)² / Σy²`` in numpy."""
    smoothed = ptq.smooth(
        mobile, mobile_calibration, "auto", explicit=explicit, weights=bits, activations=bits, batches=small_batches
    )
    ledger = {entry.layer: entry for entry in smoothed.ledger}
    for group in (["depthwise", "left", "right"], *([name] for name in ("stem", "mixed", "inner", "head"))):
        if any(name not in smoothed.curves for name in group):
            assert explicit == "never" and ACTIONS[group[0]] == "explicit"
            continue
        chosen, none = (sum(smoothed.curves[name][alpha] for name in group) for alpha in (ledger[group[0]].alpha, None))
        assert chosen <= none
        assert chosen == min(sum(smoothed.curves[name][alpha] for name in group) for alpha in smoothed.curves[group[0]])
    for name in ("inner", "head"):
        if name not in smoothed.curves:
            continue
        statistics, weight = mobile_calibration.layers[name], mobile.get_submodule(name).weight.detach().numpy()
        rows = statistics.rows.float().numpy()[:, :, 0]
        factor = smoothed.factors.get(name, torch.ones(statistics.channels)).numpy()
        low = min(0, (statistics.minimum.numpy() / factor).min())
        high = max(0, (statistics.maximum.numpy() / factor).max())
        step = (high - low) / (2**bits - 1)
        zero = np.clip(np.round(-low / step), 0, 2**bits - 1)
        codes = np.clip(np.round(rows / factor / step) + zero, 0, 2**bits - 1)
        scale = np.abs(weight * factor).max(1, keepdims=True) / (2 ** (bits - 1) - 1)
        rounded = np.round(weight * factor / scale) * scale
        y, found = rows @ weight.T, (codes - zero) * step @ rounded.T
        assert smoothed.curves[name][ledger[name].alpha] == pytest.approx(
            ((y - found) ** 2).sum() / (y**2).sum(), rel=0.02
        )


def test_a_wrong_fold_is_refused(
    mobile: nn.Module, mobile_calibration: Calibration, small_batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that is wrong about who reads what: the proof names the first layer that differs."""
    graph = mobile_calibration.graph
    monkeypatch.delitem(graph.parameters, "depthwise_norm.bias")
    with pytest.raises(EquivalenceError, match=r"^(left|right): first layer that differs"):
        ptq.smooth(mobile, mobile_calibration, 0.5, batches=small_batches)


def test_a_calibration_from_a_file_folds_the_same(
    mobile: nn.Module, mobile_calibration: Calibration, tmp_path: Path
) -> None:
    mobile_calibration.save(tmp_path / "calibration.safetensors")
    loaded = Calibration.load(tmp_path / "calibration.safetensors")
    for kind in ("readers", "producers", "parameters", "clamps"):
        expected, found = getattr(mobile_calibration.graph, kind), getattr(loaded.graph, kind)
        assert list(found) == list(expected) and expected
        assert all(torch.equal(found[name], classes) for name, classes in expected.items())
    for kind in ("clamp_axes", "reasons", "batchnorms", "fixed"):
        assert getattr(loaded.graph, kind) == getattr(mobile_calibration.graph, kind)
    models = [ptq.smooth(mobile, calibration, 0.5).model for calibration in (mobile_calibration, loaded)]
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
