"""Errors split into parts, held against networks that were quantized in that part alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq.analysis import grafting as grafting_module
from ptq.analysis.errors import LayerAnalysis, analyze_layers
from ptq.analysis.grafting import PARTS, Tape, grafting
from ptq.batches import as_call
from ptq.calibration import Calibration
from ptq.quantization import Quantized
from ptq.smoothing import Smoothed

BITS = {"both": "W4A4", "weights": "W4", "activations": "WfloatA4"}


def networks(
    model: nn.Module, batches: list[Tensor], form: str | None
) -> tuple[Calibration, Smoothed | None, dict[str, Quantized]]:
    """A network quantized in both parts, and two that are quantized in one part only."""
    calibration = ptq.calibrate(model, batches)
    smoothed = ptq.smooth(model, calibration, 0.5, form=form) if form else None  # type: ignore[arg-type]
    source, statistics = (smoothed.model, smoothed.calibration) if smoothed else (model, calibration)
    return calibration, smoothed, {part: ptq.quantize(source, statistics, bits=bits) for part, bits in BITS.items()}


@pytest.mark.parametrize("form", [None, "hook", "fold"])
def test_each_part_is_the_error_of_a_network_quantized_in_that_part_alone(
    form: str | None, small_network: nn.Module, small_batches: list[Tensor]
) -> None:
    _, _, quantized = networks(small_network, small_batches, form)
    layers, samples = analyze_layers(small_network, quantized["both"].model, small_batches)
    assert samples == 12
    assert [layer.layer for layer in layers] == ["stem", "depthwise", "grouped", "up", "head"]
    for part in PARTS:
        expected = ptq.layer_errors(small_network, quantized[part].model, small_batches)
        for layer in layers:
            for where in ("isolated", "accumulated"):
                found = getattr(getattr(layer, where), part)
                reference = getattr(expected[layer.layer], where)
                assert found.l1 == pytest.approx(reference.l1, rel=2e-3, abs=1e-6), (layer.layer, where, part)
                assert found.sqnr == pytest.approx(reference.sqnr, abs=0.05)
                assert found.cosine == pytest.approx(reference.cosine, abs=1e-4)
                assert found.max == pytest.approx(reference.max, rel=2e-2, abs=1e-5)


def test_the_parts_of_one_linear_layer_by_hand() -> None:
    """y = W x with everything written out in numpy: 2-bit weights, 2-bit inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    x = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.5, 1.6]])
    quantized = ptq.quantize(model, ptq.calibrate(model, [x]), bits="W2A2")
    (layer,), _ = analyze_layers(model, quantized.model, [x])

    weight, inputs = model[0].weight.detach().double().numpy(), x.double().numpy()
    step = np.abs(weight).max(1, keepdims=True)  # symmetric 2 bits: -1, 0, 1
    rounded_weight = np.rint(weight / step) * step
    rounded_inputs = np.rint(inputs / (3 / 3)) * (3 / 3)  # 0 … 3 in 4 levels
    expected = inputs @ weight.T
    for part, found in {
        "both": rounded_inputs @ rounded_weight.T,
        "weights": inputs @ rounded_weight.T,
        "activations": rounded_inputs @ weight.T,
    }.items():
        distance = getattr(layer.isolated, part)
        assert distance.l1 == pytest.approx(np.abs(found - expected).sum() / np.abs(expected).sum(), rel=1e-5)
        assert distance.max == pytest.approx(np.abs(found - expected).max(), rel=1e-5)
        noise = ((found - expected) ** 2).sum()
        assert distance.sqnr == pytest.approx(10 * np.log10((expected**2).sum() / noise), rel=1e-5)
        norms = np.sqrt((expected**2).sum() * (found**2).sum())
        assert distance.cosine == pytest.approx((expected * found).sum() / norms, rel=1e-5)
        assert getattr(layer.accumulated, part) == distance  # nothing stands before it


def test_a_layer_that_stays_in_float_makes_no_error_itself(
    small_network: nn.Module, small_batches: list[Tensor]
) -> None:
    calibration = ptq.calibrate(small_network, small_batches)
    quantized = ptq.quantize(small_network, calibration, bits="W4A4", exclude=["grouped"])
    layers, _ = analyze_layers(small_network, quantized.model, small_batches)
    grouped = next(layer for layer in layers if layer.layer == "grouped")
    assert grouped.bits == "float"
    assert grouped.isolated.both.l1 == 0
    assert grouped.accumulated.both.l1 > 0.01  # what arrives there has errors


def test_memory_for_one_sample_gives_the_same_errors(
    small_network: nn.Module, small_batches: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, quantized = networks(small_network, small_batches, None)

    def run() -> list[LayerAnalysis]:
        return analyze_layers(small_network, quantized["both"].model, small_batches)[0]

    whole = run()
    monkeypatch.setattr(grafting_module.Grafted.pieces, "__defaults__", (1,))
    pieces = run()
    for layer, cut in zip(whole, pieces, strict=True):
        assert layer.accumulated.weights.l1 == pytest.approx(cut.accumulated.weights.l1, rel=1e-4)


def test_a_budget_ends_the_measurement_after_a_piece(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    _, _, quantized = networks(small_network, small_batches, None)
    _, samples = analyze_layers(small_network, quantized["both"].model, small_batches, budget=0)
    assert samples == 4  # of twelve


@pytest.mark.parametrize("form", [None, "fold"])
def test_nothing_grafted_is_float_and_all_grafted_is_quantized(
    form: str | None, small_network: nn.Module, small_batches: list[Tensor]
) -> None:
    _, _, quantized = networks(small_network, small_batches, form)
    network, batch = quantized["both"].model, small_batches[0]
    with torch.no_grad():
        plain, rounded = small_network(batch), network(batch)
    state = {name: vars(module).copy() for name, module in small_network.named_modules()}
    with grafting(small_network, network) as grafted:
        call = as_call(batch)
        assert torch.equal(grafted.run(call), plain)
        torch.testing.assert_close(grafted.run(call, grafted.whole()), rounded, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(plain, rounded, rtol=1e-2)
        tape = Tape()
        grafted.run(call, grafted.whole(), watch=tape.record)
        for name in grafted.grafts:  # replayed or computed, the same to the last bit
            parts = {other: part for other, part in grafted.whole().items() if other != name}
            assert torch.equal(grafted.run(call, parts, tape=tape, until=name), grafted.run(call, parts))
    with torch.no_grad():
        assert torch.equal(small_network(batch), plain)
    assert {name: vars(module).keys() for name, module in small_network.named_modules()} == {
        name: attributes.keys() for name, attributes in state.items()
    }


def test_the_wrong_model_is_refused(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    _, _, quantized = networks(small_network, small_batches, None)
    with pytest.raises(ptq.PtqError, match="stem: the float model has no such layer"):
        analyze_layers(nn.Sequential(nn.Linear(2, 2)), quantized["both"].model, small_batches)


class _Unusual(nn.Module):
    """Attention that hides its projections, a layer that runs twice, and one that is told its output's size."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.twice = nn.Linear(8, 8)
        self.up = nn.ConvTranspose1d(8, 4, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        x = self.twice(self.twice(x).relu())
        return self.up(x.transpose(1, 2), output_size=[12]).mean(2)


def test_attention_reused_layers_and_more_arguments() -> None:
    torch.manual_seed(0)
    model = _Unusual().eval()
    batches = [torch.randn(4, 5, 8) for _ in range(2)]
    quantized = ptq.quantize(model, ptq.calibrate(model, batches), bits="W4A4").model
    layers, _ = analyze_layers(model, quantized, batches)
    expected = ptq.layer_errors(model, quantized, batches)
    assert {layer.layer for layer in layers} == set(expected)
    assert "encoder.self_attn.q_proj" in expected
    for layer in layers:
        accumulated = expected[layer.layer].accumulated
        assert accumulated is not None
        assert layer.isolated.both.l1 == pytest.approx(expected[layer.layer].isolated.l1, rel=1e-3)
        assert layer.accumulated.both.l1 == pytest.approx(accumulated.l1, rel=1e-3)
