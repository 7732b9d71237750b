"""Calibration: exact statistics, hooks that go away, files that are whole, and errors that say where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import ptq
from ptq.calibration import Calibration, calibrate, calibrate_in_steps
from ptq.errors import ActivationError, InputError, MismatchError


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._forward_hooks_with_kwargs)
        for module in model.modules()
    )


def inputs_of(model: nn.Module, name: str, batches: list[Tensor]) -> np.ndarray:
    """All that a layer read, kept."""
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda m, args: seen.append(args[0].clone()))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    handle.remove()
    return torch.cat(seen).numpy()


@pytest.mark.parametrize("name", ["stem", "depthwise", "grouped", "up", "head"])
def test_statistics_equal_those_of_all_inputs_kept(
    name: str, small_network: nn.Module, small_batches: list[Tensor]
) -> None:
    layer = calibrate(small_network, small_batches, observer="mse").layers[name]
    x = inputs_of(small_network, name, small_batches)
    others = tuple(i for i in range(x.ndim) if i != 1)
    np.testing.assert_array_equal(layer.activation_absmax.numpy(), np.abs(x).max(others))
    np.testing.assert_array_equal(layer.minimum.numpy(), x.min(others))
    np.testing.assert_array_equal(layer.maximum.numpy(), x.max(others))
    assert layer.histogram is not None
    counted = x[..., 1::2, :] if x.ndim == 4 and x.shape[2] > 6 else x  # at most six rows of a map
    counts, _ = np.histogram(counted.astype(np.float64), bins=layer.histogram.edges.numpy())
    np.testing.assert_array_equal(layer.histogram.counts.numpy(), counts)


def test_every_form_of_batch_gives_the_same(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = small_network

        def forward(self, pixels: Tensor) -> Tensor:
            return self.network(pixels)

    plain = calibrate(small_network, small_batches)
    labelled = calibrate(small_network, [(x, torch.zeros(4)) for x in small_batches])
    generator = calibrate(small_network, (x for x in small_batches))
    keyword = calibrate(Keyword(), [{"pixels": x, "labels": torch.zeros(4)} for x in small_batches])
    for other in (labelled, generator):
        assert other.data_fingerprint == plain.data_fingerprint
        assert torch.equal(other.layers["head"].activation_absmax, plain.layers["head"].activation_absmax)
    assert torch.equal(keyword.layers["network.head"].activation_absmax, plain.layers["head"].activation_absmax)


def test_a_layer_called_by_keyword_is_seen() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(input=x)

    x = torch.randn(5, 3)
    assert torch.equal(calibrate(Keyword(), [x]).layers["linear"].activation_absmax, x.abs().amax(0))


def test_batch_size_does_not_change_the_result(digits: ptq.Task) -> None:
    images = torch.cat([x for x, _ in digits.calibration])[:96]
    whole = calibrate(digits.model, [images])
    for size in (1, 7, 64):
        split = calibrate(digits.model, images.split(size), max_batches=1000)
        assert split.data_fingerprint == whole.data_fingerprint
        for name, layer in whole.layers.items():
            # What is left is the rounding of the convolution kernels, which choose their blocking by batch size.
            torch.testing.assert_close(
                split.layers[name].activation_absmax, layer.activation_absmax, rtol=1e-5, atol=1e-6
            )


def test_max_batches_stops_reading() -> None:
    read = []

    def batches():
        for index in range(10):
            read.append(index)
            yield torch.randn(2, 3)

    assert calibrate(nn.Linear(3, 3), batches(), max_batches=4).batches == 4
    assert read == [0, 1, 2, 3]


def test_hooks_modes_and_weights_are_as_before(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    small_network.stem_norm.train()
    before = {key: value.clone() for key, value in small_network.state_dict().items()}
    calibrate(small_network, small_batches)
    assert hooks_of(small_network) == 0
    assert small_network.stem_norm.training and not small_network.up_norm.training
    assert all(torch.equal(value, before[key]) for key, value in small_network.state_dict().items())


@pytest.mark.parametrize(("value", "word"), [(torch.nan, "NaN"), (torch.inf, "Inf"), (-torch.inf, "Inf")])
def test_nan_and_inf_stop_with_layer_batch_and_channel(value: float, word: str) -> None:
    model = nn.Sequential(nn.Identity(), nn.Conv2d(3, 4, 1))
    batches = [torch.zeros(1, 3, 2, 2) for _ in range(3)]
    batches[1][0, 2, 1, 1] = value
    with pytest.raises(ActivationError, match=rf"^1: {word} in the input, batch 1, channel 2"):
        calibrate(model, batches)
    assert hooks_of(model) == 0


def test_a_layer_that_never_ran_is_listed() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    calibration = calibrate(Unused(), [torch.randn(2, 3)])
    assert calibration.never_ran == ("unused",)
    assert list(calibration.layers) == ["used"]


@pytest.mark.parametrize(
    ("model", "batches", "message"),
    [
        (nn.ReLU(), [torch.zeros(1)], "no Conv or Linear"),
        (nn.Linear(3, 3), [], "no batch"),
        (nn.Linear(3, 3), ["text"], "a batch is str"),
    ],
    ids=["no layers", "no data", "no tensor"],
)
def test_nothing_to_calibrate_is_an_error(model: nn.Module, batches: list[object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        calibrate(model, batches)


@pytest.mark.parametrize("observer", ["max", "entropy"])
def test_a_file_gives_everything_back(
    observer: str, small_network: nn.Module, small_batches: list[Tensor], tmp_path: Path
) -> None:
    saved = calibrate(small_network, small_batches, observer=observer)
    saved.save(tmp_path / "a.safetensors")
    loaded = Calibration.load(tmp_path / "a.safetensors")
    loaded.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert list(loaded.layers) == list(saved.layers)
    assert (
        loaded.batchnorms == saved.batchnorms == {"stem": "stem_norm", "depthwise": "depthwise_norm", "up": "up_norm"}
    )
    for name, layer in saved.layers.items():
        assert torch.equal(loaded.layers[name].minimum, layer.minimum)
        assert loaded.layers[name].range(observer, 4) == layer.range(observer, 4)
    loaded.check(small_network)


def test_the_same_calibration_gives_the_same_bytes(digits: ptq.Task, tmp_path: Path) -> None:
    for name in ("a", "b"):
        calibrate(digits.model, digits.calibration, "mse", 5).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_another_model_is_refused_with_the_difference(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    calibration = calibrate(small_network, small_batches)
    with pytest.raises(MismatchError, match=r"stem: calibrated, but the model has no such layer"):
        calibration.check(nn.Linear(3, 3))
    small_network.stem.weight.data += 1
    with pytest.raises(MismatchError, match="other weights"):
        calibration.check(small_network)
    small_network.grouped = nn.Conv2d(16, 12, 1)
    with pytest.raises(MismatchError, match="grouped: the calibration has 8 channels, the layer reads 16"):
        calibration.check(small_network)


def test_training_afterwards_is_possible(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    """Statistics made under inference_mode must not poison autograd."""
    layer = calibrate(small_network, small_batches).layers["head"]
    scale = nn.Parameter(torch.ones(6))
    (scale * layer.activation_absmax).sum().backward()
    assert torch.equal(scale.grad, layer.activation_absmax)


def test_histograms_of_large_maps_count_six_rows_whatever_the_batches() -> None:
    x = torch.randn(5, 3, 40, 20, generator=torch.Generator().manual_seed(0))
    model = nn.Conv2d(3, 1, 1)
    whole = calibrate(model, [x], observer="mse").layers[""]
    split = calibrate(model, x.split(2), observer="mse").layers[""]
    assert whole.histogram is not None and split.histogram is not None
    counts, _ = np.histogram(x[:, :, 3::7].double().numpy(), bins=whole.histogram.edges.numpy())
    np.testing.assert_array_equal(whole.histogram.counts.numpy(), counts)
    assert torch.equal(split.histogram.counts, whole.histogram.counts)
    assert torch.equal(whole.activation_absmax, x.abs().amax((0, 2, 3)))


def test_watching_the_model_does_not_see_the_statistics() -> None:
    """Statistics read every layer's input: counted as readers, they would keep a BatchNorm from being folded."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).eval()
    assert calibrate(model, [torch.randn(4, 3)], observer="entropy").batchnorms == {"0": "1"}


@pytest.mark.parametrize("observer", ["max", "mse"])
def test_padding_does_not_count(observer: str) -> None:
    """Statistics of padded batches equal those of the tokens without their padding, whatever stands there."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return self.layer(x)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 4, generator=generator)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    x[mask == 0] = 1000.0
    model = Tagger()
    layer = calibrate(model, [{"x": x, "attention_mask": mask}], observer).layers["layer"]
    tokens = x[mask == 1]  # [9, 4]
    assert torch.equal(layer.minimum, tokens.amin(0)) and torch.equal(layer.maximum, tokens.amax(0))
    if layer.histogram is not None:
        assert int(layer.histogram.counts.sum()) == tokens.numel()
    assert layer.rows is not None and len(layer.rows) == len(tokens)
    assert float(layer.rows.max()) < 100


def test_one_pass_gives_the_calibration_after_each_step(small_network: nn.Module) -> None:
    batches = list(torch.randn(5, 2, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    steps = calibrate_in_steps(small_network, batches, [2, 4, 9], "percentile")
    assert [calibration.batches for calibration in steps] == [2, 4, 5]
    for calibration in steps:
        alone = calibrate(small_network, batches, "percentile", calibration.batches)
        assert calibration.data_fingerprint == alone.data_fingerprint
        for name, layer in alone.layers.items():
            found = calibration.layers[name]
            assert torch.equal(found.minimum, layer.minimum) and torch.equal(found.maximum, layer.maximum)
            assert found.histogram is not None and layer.histogram is not None
            assert torch.equal(found.histogram.counts, layer.histogram.counts)
            assert found.rows is not None and layer.rows is not None and torch.equal(found.rows, layer.rows)


def test_rows_depend_on_the_samples_and_not_on_how_they_are_batched(small_network: nn.Module) -> None:
    x = torch.randn(320, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    one, other = (calibrate(small_network, x.split(size)).layers["stem"].rows for size in (7, 50))
    assert one is not None and other is not None and len(one) == 128 * 16
    assert torch.equal(one, other)


def test_a_model_that_cannot_be_watched_is_calibrated_all_the_same() -> None:
    """Nothing folds then, and smoothing divides in front of each layer."""

    class Shy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            if _get_current_dispatch_mode() is not None:
                raise RuntimeError("not while somebody is looking")
            return self.second(self.first(x).relu())

    model, batches = Shy(), [torch.randn(6, 3)]
    calibration = calibrate(model, batches)
    assert "not while somebody is looking" in calibration.graph.reasons["second"]
    smoothed = ptq.smooth(model, calibration, 0.5, batches=batches)
    assert [entry.action for entry in smoothed.ledger] == ["explicit", "explicit"]
