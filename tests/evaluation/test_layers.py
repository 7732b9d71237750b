"""Per-layer distances against numpy on outputs that were all kept."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq.errors import MismatchError
from ptq.evaluation import layers as module_under_test


def distances(expected: np.ndarray, found: np.ndarray) -> dict[str, float]:
    expected, found = expected.astype(np.float64).ravel(), found.astype(np.float64).ravel()
    error = found - expected
    return {
        "l1": np.abs(error).sum() / np.abs(expected).sum(),
        "sqnr": 10 * np.log10((expected**2).sum() / (error**2).sum()),
        "cosine": expected @ found / np.sqrt((expected @ expected) * (found @ found)),
        "max": np.abs(error).max(),
    }


def outputs(model: nn.Module, name: str, batches: list[Tensor]) -> np.ndarray:
    kept: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(lambda m, args, y: kept.append(y.detach().clone()))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    handle.remove()
    return torch.cat(kept).numpy()


# Where the float network has what the quantized layer returns: behind the BatchNorm that was folded into it.
PLACES = {"stem": "stem_norm", "depthwise": "depthwise_norm", "grouped": "grouped", "up": "up_norm", "head": "head"}


@pytest.mark.parametrize("form", [None, "hook", "fold"])
@pytest.mark.parametrize("name", PLACES)
def test_accumulated_and_isolated_equal_the_definition(
    name: str, form: str | None, small_network: nn.Module, small_batches: list[Tensor]
) -> None:
    calibration = ptq.calibrate(small_network, small_batches)
    source = small_network
    factor = np.ones(1)  # what the layer's output is divided by
    if form is not None:
        smoothed = ptq.smooth(small_network, calibration, 0.5, form=form)
        source, calibration = smoothed.model, smoothed.calibration
        if form == "fold" and name in ("grouped", "up"):  # behind the others stands a clamp that is no module
            reader = list(PLACES)[list(PLACES).index(name) + 1]
            factor = smoothed.factors[reader].numpy()[:, None, None]
    quantized = ptq.quantize(source, calibration, bits="W4A4").model
    error = ptq.layer_errors(small_network, quantized, small_batches)[name]

    expected = outputs(small_network, PLACES[name], small_batches)
    assert error.accumulated is not None
    for key, value in distances(expected, factor * outputs(quantized, name, small_batches)).items():
        assert getattr(error.accumulated, key) == pytest.approx(value, rel=1e-4)

    alone = ptq.quantize(source, calibration, bits="W4A4", include=[name]).model
    for key, value in distances(expected, factor * outputs(alone, name, small_batches)).items():
        assert getattr(error.isolated, key) == pytest.approx(value, rel=1e-3)


def test_an_equal_network_has_no_error(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    errors = ptq.layer_errors(small_network, copy.deepcopy(small_network), small_batches)
    assert list(errors) == ["stem", "depthwise", "grouped", "up", "head"]
    for error in errors.values():
        for part in (error.isolated, error.accumulated):
            assert part is not None
            assert (part.l1, part.sqnr, part.max) == (0.0, float("inf"), 0.0)
            assert part.cosine == pytest.approx(1.0)


def test_batches_are_cut_to_bound_memory_without_changing_the_sums(
    small_network: nn.Module, small_batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = ptq.quantize(small_network, ptq.calibrate(small_network, small_batches), bits="W4A4").model
    whole = ptq.layer_errors(small_network, quantized, small_batches)
    monkeypatch.setattr(module_under_test, "_HELD_BYTES", 1)  # one sample at a time
    cut = ptq.layer_errors(small_network, quantized, small_batches)
    for name, error in whole.items():
        assert error.accumulated is not None and cut[name].accumulated is not None
        assert cut[name].accumulated.l1 == pytest.approx(error.accumulated.l1, rel=1e-4)
        assert cut[name].isolated.sqnr == pytest.approx(error.isolated.sqnr, rel=1e-4)


def test_max_batches_and_accumulated_false_save_work(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    quantized = ptq.quantize(small_network, ptq.calibrate(small_network, small_batches), bits="W4A4").model
    error = ptq.layer_errors(small_network, quantized, small_batches, max_batches=1, accumulated=False)["stem"]
    only_first = ptq.layer_errors(small_network, quantized, small_batches[:1])["stem"]
    assert error.accumulated is None
    assert error.isolated == only_first.isolated


def test_hooks_are_gone_afterwards(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    quantized = ptq.quantize(small_network, ptq.calibrate(small_network, small_batches)).model
    before = [len(module._forward_hooks) for module in (*small_network.modules(), *quantized.modules())]
    ptq.layer_errors(small_network, quantized, small_batches)
    after = [len(module._forward_hooks) for module in (*small_network.modules(), *quantized.modules())]
    assert before == after


def test_another_model_is_refused(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    quantized = ptq.quantize(small_network, ptq.calibrate(small_network, small_batches)).model
    with pytest.raises(MismatchError, match="stem: the float model has no such layer"):
        ptq.layer_errors(nn.Conv2d(3, 3, 1), quantized, small_batches)
