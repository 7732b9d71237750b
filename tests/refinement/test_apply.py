"""Networks refined layer by layer: closer to the float one, the same each time, and back from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq.errors import InputError
from ptq.quantization import Bits, FakeQuantize, Scheme
from ptq.quantization.apply import quantize_by
from ptq.refinement import Refined, network, quantize, refine


@pytest.fixture
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = torch.tensor([0.1, 1.0, 20.0]).reshape(1, 3, 1, 1)
    return [torch.randn(16, 3, 8, 8, generator=generator) * size for _ in range(4)]


@pytest.fixture
def calibration(small_network: nn.Module, batches: list[Tensor]) -> ptq.Calibration:
    return ptq.calibrate(small_network, batches)


def scheme(bits: str = "W4A4", **options: object) -> Scheme:
    return Scheme(bits=Bits.parse(bits), **options)


@torch.no_grad()
def outputs(model: nn.Module, batches: list[Tensor]) -> Tensor:
    return torch.cat([model(batch) for batch in batches])


def distance(found: nn.Module, expected: nn.Module, batches: list[Tensor]) -> float:
    y = outputs(expected, batches)
    return float((outputs(found, batches) - y).norm() / y.norm())


@pytest.mark.parametrize("bits", ["W8A8", "W4A8", "W4A4", "W3A3", "W2A4", "W4"])
def test_refinement_brings_the_network_closer(
    bits: str, small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor]
) -> None:
    """Convolutions of all kinds and a Linear, on batches that it hasn't seen."""
    generator = torch.Generator().manual_seed(2)
    others = [torch.randn(64, 3, 8, 8, generator=generator) * torch.tensor([0.1, 1.0, 20.0]).reshape(1, 3, 1, 1)]
    plain = quantize_by(scheme(bits), small_network, calibration)
    refined = refine(small_network, calibration, scheme(bits), batches)
    assert refined.skipped == {} and refined.samples == 64
    assert distance(refined.model, small_network, others) < 0.9 * distance(plain.model, small_network, others)


@pytest.mark.parametrize("name", ["stem", "depthwise", "grouped", "up", "head"])
def test_weights_are_on_the_grid_of_their_output_channel(
    name: str, small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor]
) -> None:
    layer = refine(small_network, calibration, scheme("W3A4"), batches).model.get_submodule(name)
    weight = layer.weight.detach()
    if isinstance(layer, nn.ConvTranspose2d):  # [in, out/groups, …] → [out, …]
        weight = torch.cat([part.transpose(0, 1) for part in weight.chunk(layer.groups)])
    steps = weight.flatten(1) / layer.weight_scale[:, None]
    torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0)
    codes = steps + layer.weight_zero_point[:, None]
    assert bool((layer.weight_zero_point != 0).any()) and set(codes.round().unique().tolist()) <= set(range(-4, 4))


def test_weights_are_symmetric_where_the_scheme_says_so(
    small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor]
) -> None:
    """And with 8 bits, whose codes less a zero-point would not fit into a runtime's int8."""
    found = refine(small_network, calibration, scheme("W3A4", symmetric_weights=True, first_last=8), batches)
    wide = refine(small_network, calibration, scheme("W8A8"), batches)
    for refined, last in ((found, {"stem": 127, "head": 127}), (wide, dict.fromkeys(wide.bits, 127))):
        for name in refined.bits:
            layer = refined.model.get_submodule(name)
            assert not hasattr(layer, "weight_zero_point")
            spread = ptq.channels.over_outputs(layer.weight_scale, layer.weight, layer)
            assert float((layer.weight.detach() / spread).abs().max()) < last.get(name, 3) + 1e-3


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(6, 5), nn.Conv1d(6, 8, 3, padding=1), nn.Conv2d(6, 8, 3, groups=2), nn.Conv2d(6, 6, 3, groups=6)],
    ids=str,
)
def test_the_mean_residual_is_zero(layer: ptq.channels.Layer) -> None:
    """With all rows of the batch in the sample the bias is exact."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, *(6 for _ in getattr(layer, "kernel_size", ())), generator=generator) + 1
    calibration = ptq.calibrate(layer, [x])
    plain, refined = (
        quantize_by(scheme("W2A3"), layer, calibration),
        refine(layer, calibration, scheme("W2A3"), [x], variations=0),
    )
    axes = [axis for axis in range(x.dim()) if axis != 1]
    with torch.no_grad():
        before, after = ((q.model(x) - layer(x)).mean(axes) for q in (plain, refined))
    assert float(after.abs().max()) < 1e-5 < float(before.abs().max())


def test_a_layer_without_bias_gets_none(batches: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3, bias=False)
    calibration = ptq.calibrate(model, batches)
    refined = refine(model, calibration, scheme(), batches).model
    assert refined.bias is None
    assert distance(refined, model, batches) < distance(quantize_by(scheme(), model, calibration).model, model, batches)


def test_grouped_layers_equal_a_loop_over_their_groups() -> None:
    torch.manual_seed(0)
    grouped = nn.Conv2d(6, 9, 3, padding=1, groups=3)
    x = torch.randn(32, 6, 6, 6)
    refined = refine(grouped, ptq.calibrate(grouped, [x]), scheme("W3"), [x]).model
    for g in range(3):
        alone = nn.Conv2d(2, 3, 3, padding=1)
        with torch.no_grad():
            alone.weight.copy_(grouped.weight[3 * g : 3 * g + 3])
            alone.bias.copy_(grouped.bias[3 * g : 3 * g + 3])
        part = x[:, 2 * g : 2 * g + 2].contiguous()
        found = refine(alone, ptq.calibrate(alone, [part]), scheme("W3"), [part]).model
        torch.testing.assert_close(refined.weight[3 * g : 3 * g + 3], found.weight)
        torch.testing.assert_close(refined.bias[3 * g : 3 * g + 3], found.bias)


def test_the_same_again(small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor]) -> None:
    first, second = (refine(small_network, calibration, scheme(), batches, rows=500, seed=5) for _ in range(2))
    assert states_equal(first, second)
    assert not states_equal(first, refine(small_network, calibration, scheme(), batches, rows=500, seed=6))


def test_the_size_of_the_batches_does_not_matter(
    small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor]
) -> None:
    """But for the order in which kernels add up."""
    one, many = (
        refine(small_network, calibration, scheme("W8A8"), given, rows=500) for given in ([torch.cat(batches)], batches)
    )
    torch.testing.assert_close(outputs(one.model, batches), outputs(many.model, batches), atol=1e-3, rtol=1e-3)


def states_equal(one: ptq.Quantized, other: ptq.Quantized) -> bool:
    states = one.model.state_dict(), other.model.state_dict()
    return all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_the_callers_model_and_its_mode_stay(
    small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor]
) -> None:
    before = {key: value.clone() for key, value in small_network.state_dict().items()}
    small_network.train()
    refined = refine(small_network, calibration, scheme(), batches)
    assert small_network.training and refined.model.training
    assert all(torch.equal(value, before[key]) for key, value in small_network.state_dict().items())
    for module in (*small_network.modules(), *refined.model.modules()):
        assert len(module._forward_pre_hooks) <= 1 and not module._forward_hooks
        assert not isinstance(module, FakeQuantize) or not module._forward_pre_hooks


@pytest.mark.parametrize("smoothed", [False, True], ids=["plain", "smoothed"])
def test_a_file_gives_the_same_network(
    smoothed: bool, small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor], tmp_path: Path
) -> None:
    model = small_network
    if smoothed:
        result = ptq.smooth(model, calibration, "auto", weights=4, activations=4, clip=True)
        model, calibration = result.model, result.calibration
    saved = refine(model, calibration, scheme(first_last=8), batches)
    saved.save(tmp_path / "refined.safetensors")
    loaded = ptq.Quantized.load(tmp_path / "refined.safetensors", model, calibration)
    assert (loaded.scheme, loaded.bits) == (saved.scheme, saved.bits)
    assert torch.equal(outputs(loaded.model, batches), outputs(saved.model, batches))


class Twice(nn.Module):
    """One layer runs twice, one is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.unused = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.again(self.first(x)).relu()).relu())


def test_a_layer_that_runs_twice_is_only_rounded() -> None:
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(256, 6)
    calibration = ptq.calibrate(model, [x])
    plain, refined = quantize_by(scheme(), model, calibration), refine(model, calibration, scheme(), [x])
    assert refined.skipped == {"again": "it runs 2 times in a forward pass"}
    assert torch.equal(refined.model.again.weight, plain.model.again.weight)
    assert not torch.equal(refined.model.last.weight, plain.model.last.weight)
    assert distance(refined.model, model, [x]) < distance(plain.model, model, [x])


def test_a_layer_in_a_number_format_is_only_rounded(
    small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor]
) -> None:
    bits = Bits(4, 4, weight_format="affine:bits=4,symmetric")
    refined = refine(small_network, calibration, Scheme(bits=bits, overrides=(("head", Bits(4, 4)),)), batches)
    assert set(refined.skipped) == {"stem", "depthwise", "grouped", "up"}
    assert "number format" in refined.skipped["stem"]


def test_excluded_layers_stay_in_float(
    small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor]
) -> None:
    refined = refine(small_network, calibration, scheme(exclude=("grouped",)), batches)
    assert torch.equal(refined.model.grouped.weight, small_network.grouped.weight)


def test_symmetric_activations_stay_symmetric(
    small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor]
) -> None:
    refined = refine(small_network, calibration, scheme(symmetric_activations=True), batches)
    quantizers = [module for module in refined.model.modules() if isinstance(module, FakeQuantize)]
    assert len(quantizers) == 5 and all(float(quantizer.zero_point) == 0 for quantizer in quantizers)


def test_memory_bounds_the_samples(
    small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor]
) -> None:
    largest = 6 * 16 * 16 * 4  # what `up` makes of one sample
    refined = refine(small_network, calibration, scheme(), batches, memory=20 * 6 * largest)
    assert refined.samples == 20
    assert refined.peak_memory is not None and 2**26 < refined.peak_memory < 2**40  # torch alone takes more than 64 MB


def test_batches_that_are_a_dict_with_padding() -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(20, 8), nn.Linear(8, 4)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return (self.linear(self.embedding(input_ids)) * attention_mask[:, :, None]).sum(1)

    torch.manual_seed(0)
    model = Text()
    batches = []
    for length in (5, 9, 7):  # of different length each
        mask = torch.arange(length)[None] < torch.randint(2, length, (16, 1))
        batches.append({"input_ids": torch.randint(0, 20, (16, length)), "attention_mask": mask.long()})
    calibration = ptq.calibrate(model, batches)
    refined, plain = refine(model, calibration, scheme("W3A3"), batches), ptq.quantize(model, calibration, 3, 3)
    with torch.no_grad():
        error, before = (
            sum(float((q.model(**b) - model(**b)).square().sum()) for b in batches) for q in (refined, plain)
        )
    assert error < before


def test_no_data(small_network: nn.Module, calibration: ptq.Calibration) -> None:
    with pytest.raises(InputError, match="the data has no batch"):
        refine(small_network, calibration, scheme(), [])


def test_digits(digits: ptq.Task, digits_calibration: ptq.Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded network has depthwise convolutions behind ReLU6; each step brings it closer on unseen images."""
    smoothed = ptq.smooth(digits.model, digits_calibration, "auto", weights=3, activations=3, clip=True)
    plain = quantize_by(scheme("W3A3"), smoothed.model, smoothed.calibration)
    given = smoothed.model, smoothed.calibration, scheme("W3A3"), digits.calibration
    refined = refine(*given, samples=256, rows=2048)
    monkeypatch.setattr(network, "_WORK", 0)
    by_layer = refine(*given, samples=256, rows=2048)
    assert refined.skipped == {} and refined.learned_as_a_whole and not by_layer.learned_as_a_whole
    images = [images for images, _ in digits.evaluation]
    errors = [distance(found.model, digits.model, images) for found in (plain, by_layer, refined)]
    assert errors[1] < 0.7 * errors[0] and errors[2] < 0.95 * errors[1]
    before, after = (ptq.evaluate(found.model, digits.evaluation).top1 for found in (plain, refined))
    assert after >= before + 2


def test_quantize_refines_by_one_word(
    small_network: nn.Module, calibration: ptq.Calibration, batches: list[Tensor]
) -> None:
    plain, refined = (
        quantize(small_network, calibration, bits="W4A4", first_last=8, refine=word, batches=batches)
        for word in ("none", "fast")
    )
    assert not isinstance(plain, Refined) and states_equal(
        plain, ptq.quantization.quantize(small_network, calibration, bits="W4A4", first_last=8)
    )
    smoothed = ptq.smooth(small_network, calibration, "auto", explicit="never", weights=4, activations=4, clip=True)
    assert states_equal(refined, refine(smoothed.model, smoothed.calibration, scheme(first_last=8), batches))
    with pytest.raises(InputError, match="needs data"):
        quantize(small_network, calibration, refine="fast")
    with pytest.raises(InputError, match="--refine 'slow': choose none, fast or best"):
        quantize(small_network, calibration, refine="slow")
