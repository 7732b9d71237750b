"""Smoothing leaves the function as it is, evens out the channels, and can be taken back."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq.errors import EquivalenceError, InputError, MismatchError
from ptq.smoothing.modules import InputScaling
from ptq.smoothing.proof import prove_equivalence


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_the_function_is_unchanged(alpha: float, small_network: nn.Module, small_batches: list[Tensor]) -> None:
    calibration = ptq.calibrate(small_network, small_batches)
    smoothed = ptq.smooth(small_network, calibration, alpha, batches=small_batches)
    assert smoothed.proof is not None and smoothed.proof.output < 1e-6
    with torch.no_grad():
        for batch in small_batches:
            expected = small_network(batch)
            difference = (smoothed.model(batch) - expected).abs().max() / expected.abs().max()
            assert difference < 1e-5


def test_factors_follow_the_weights_that_will_be_quantized(
    small_network: nn.Module, small_batches: list[Tensor]
) -> None:
    """Without a BatchNorm behind it the layer's own weight counts; with one, the folded weight."""
    calibration = ptq.calibrate(small_network, small_batches)
    factors = ptq.smooth(small_network, calibration, 0.5).factors
    head = calibration.layers["head"]
    expected = np.sqrt(head.activation_absmax.numpy() / head.weight_absmax.numpy())
    np.testing.assert_allclose(factors["head"].numpy(), expected, rtol=1e-6)
    stem, norm = small_network.stem, small_network.stem_norm
    folded = stem.weight * (norm.weight / torch.sqrt(norm.running_var + norm.eps)).reshape(-1, 1, 1, 1)
    expected = torch.sqrt(calibration.layers["stem"].activation_absmax / folded.abs().amax((0, 2, 3)))
    np.testing.assert_allclose(factors["stem"].numpy(), expected.detach().numpy(), rtol=1e-5)


def test_the_calibration_of_the_smoothed_model_needs_no_second_pass(
    small_network: nn.Module, small_batches: list[Tensor]
) -> None:
    smoothed = ptq.smooth(small_network, ptq.calibrate(small_network, small_batches), 0.7)
    again = ptq.calibrate(smoothed.model, small_batches)
    assert again.model_fingerprint == smoothed.calibration.model_fingerprint
    for name, layer in again.layers.items():
        rescaled = smoothed.calibration.layers[name]
        torch.testing.assert_close(rescaled.activation_absmax, layer.activation_absmax, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rescaled.weight_absmax, layer.weight_absmax, rtol=1e-6, atol=0)


def test_smoothing_evens_out_the_channels(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    calibration = ptq.calibrate(small_network, small_batches)
    before = calibration.layers["stem"].outlier_ratio
    after = ptq.smooth(small_network, calibration, 1.0).calibration.layers["stem"].outlier_ratio
    assert before > 10 and after == pytest.approx(1.0, rel=1e-5)


def test_the_original_is_untouched_and_undo_is_bit_exact(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    before = copy.deepcopy(small_network.state_dict())
    smoothed = ptq.smooth(small_network, ptq.calibrate(small_network, small_batches), 0.5)
    assert all(torch.equal(value, before[key]) for key, value in small_network.state_dict().items())
    restored = smoothed.undo()
    assert restored.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in restored.state_dict().items())
    assert not any(module._forward_pre_hooks for module in restored.modules())
    with pytest.raises(InputError, match="no smoothing to take back"):
        smoothed.undo()


def test_smoothing_a_smoothed_model_says_so(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    smoothed = ptq.smooth(small_network, ptq.calibrate(small_network, small_batches), 0.5)
    with pytest.raises(InputError, match="smoothed already"):
        ptq.smooth(smoothed.model, smoothed.calibration, 0.5)


def test_a_copy_of_a_smoothed_model_is_smoothed_too(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    smoothed = ptq.smooth(small_network, ptq.calibrate(small_network, small_batches), 0.5).model
    twin = copy.deepcopy(smoothed)
    twin.stem.smoothing.factor.fill_(1.0)
    with torch.no_grad():
        assert not torch.allclose(twin(small_batches[0]), smoothed(small_batches[0]))


def test_zero_layers_smoothed_is_an_error() -> None:
    model = nn.Linear(3, 3)
    calibration = ptq.calibrate(model, [torch.zeros(2, 3)])
    with pytest.raises(InputError, match=r"no layer was smoothed .*always zero"):
        ptq.smooth(model, calibration, 0.5)


def test_a_tied_weight_is_skipped_and_the_ledger_says_why() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.inner = nn.Embedding(7, 4), nn.Linear(4, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.inner(self.embedding(tokens)))

    model, batches = Tied(), [torch.randint(0, 7, (2, 5))]
    smoothed = ptq.smooth(model, ptq.calibrate(model, batches), 0.5, batches=batches)
    assert [(entry.layer, entry.action) for entry in smoothed.ledger] == [("inner", "explicit"), ("head", "skipped")]
    assert "shared with embedding" in smoothed.ledger[1].reason


def test_a_reused_layer_is_smoothed_for_all_of_its_calls() -> None:
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x).relu())

    model, batches = Reused(), [torch.randn(8, 4)]
    smoothed = ptq.smooth(model, ptq.calibrate(model, batches), 0.5, batches=batches)
    assert smoothed.proof is not None and smoothed.proof.output < 1e-6


def test_layers_that_read_one_tensor_share_a_factor_also_where_it_is_explicit() -> None:
    """Query, key and value of a transformer whose norm also feeds the residual stream."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = nn.functional.gelu(self.first(x))
            return self.query(y) @ self.key(y).mT

    torch.manual_seed(0)
    model, batches = Attention(), [torch.randn(3, 5, 6)]
    calibration = ptq.calibrate(model, batches)
    smoothed = ptq.smooth(model, calibration, 0.5, batches=batches)
    largest = torch.maximum(model.query.weight.abs().amax(0), model.key.weight.abs().amax(0)).detach()
    expected = torch.sqrt(calibration.layers["query"].activation_absmax / largest)
    for name, other in (("query", "key"), ("key", "query")):
        torch.testing.assert_close(smoothed.factors[name], expected)
        entry = next(entry for entry in smoothed.ledger if entry.layer == name)
        assert entry.action == "explicit" and entry.shared_with == (other,)


def test_a_wrong_rewrite_is_refused_with_the_first_layer_that_differs(
    small_network: nn.Module, small_batches: list[Tensor]
) -> None:
    wrong = copy.deepcopy(small_network)
    wrong.grouped.weight.data[0] *= 1.001
    with pytest.raises(EquivalenceError, match=r"^grouped: first layer that differs"):
        prove_equivalence(small_network, wrong, small_batches)


def test_another_models_calibration_is_refused(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    calibration = ptq.calibrate(small_network, small_batches)
    other = copy.deepcopy(small_network)
    other.head.weight.data += 0.1
    with pytest.raises(MismatchError, match="other weights"):
        ptq.smooth(other, calibration, 0.5)


def test_histograms_are_collected_again_or_dropped(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    calibration = ptq.calibrate(small_network, small_batches, observer="percentile")
    dropped = ptq.smooth(small_network, calibration, 0.5)
    with pytest.raises(InputError, match="needs histograms"):
        ptq.quantize(dropped.model, dropped.calibration)
    collected = ptq.smooth(small_network, calibration, 0.5, batches=small_batches)
    assert ptq.quantize(collected.model, collected.calibration).observer == "percentile"


def test_a_file_gives_the_smoothed_model_back(
    small_network: nn.Module, small_batches: list[Tensor], tmp_path: Path
) -> None:
    saved = ptq.smooth(small_network, ptq.calibrate(small_network, small_batches), 0.5, batches=small_batches)
    saved.save(tmp_path / "smoothed.safetensors")
    loaded = ptq.Smoothed.load(tmp_path / "smoothed.safetensors", small_network, saved.calibration)
    assert (loaded.alpha, loaded.ledger, loaded.proof) == (saved.alpha, saved.ledger, saved.proof)
    assert isinstance(loaded.model.stem.smoothing, InputScaling)
    with torch.no_grad():
        assert torch.equal(loaded.model(small_batches[0]), saved.model(small_batches[0]))
    with pytest.raises(MismatchError, match="doesn't fit this model"):
        ptq.Smoothed.load(tmp_path / "smoothed.safetensors", nn.Linear(3, 3), saved.calibration)
