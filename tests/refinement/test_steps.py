"""Each step of refinement alone: it does what its name says, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq.errors import InputError
from ptq.quantization.modules import DiffusedQuantize
from ptq.refinement import Refined, steps_of
from ptq.refinement.steps import EFFORTS, STEPS

Refining = Callable[[str], ptq.Quantized]


@pytest.fixture
def batches(small_batches: list[Tensor]) -> list[Tensor]:
    return [batch * torch.tensor([10.0, 1.0, 0.05]).view(1, 3, 1, 1) for batch in small_batches]


@pytest.fixture
def refined(small_network: nn.Module, batches: list[Tensor]) -> Refining:
    calibration = ptq.calibrate(small_network, batches)
    return lambda steps: ptq.quantize(small_network, calibration, 3, 4, refine=steps, batches=batches)


def changed(found: ptq.Quantized, plain: ptq.Quantized) -> set[str]:
    """What differs: "weight", "weight_scale", "weight_zero_point", "bias", "scale" of the inputs."""
    before, after = plain.model.state_dict(), found.model.state_dict()
    return {key.rpartition(".")[2] for key in after if key not in before or not torch.equal(before[key], after[key])}


@pytest.mark.parametrize(
    ("step", "may_change", "must_change"),
    [
        (
            "ranges",
            {"weight", "weight_scale", "weight_zero_point", "scale", "zero_point"},
            {"weight_scale", "weight_zero_point", "scale"},
        ),
        ("weights", {"weight"}, {"weight"}),
        ("rounding", {"weight"}, {"weight"}),
        ("bias", {"bias"}, {"bias"}),
        ("image", {"scale", "zero_point", "spread"}, {"spread"}),
        ("blocks", {"weight", "weight_scale", "bias", "scale"}, set()),
        ("network", {"weight", "weight_scale", "bias", "scale"}, {"weight"}),
    ],
)
def test_a_step_changes_what_it_says(step: str, may_change: set[str], must_change: set[str], refined: Refining) -> None:
    found = changed(refined(step), refined("none"))
    assert must_change <= found <= may_change


def test_the_bias_alone_is_exact(small_batches: list[Tensor]) -> None:
    """The mean of each output channel over all positions is that of the float layer."""
    torch.manual_seed(0)
    layer, x = nn.Conv2d(3, 5, 3), small_batches[0] + 1
    calibration = ptq.calibrate(layer, [x])
    rounded, corrected = (ptq.quantize(layer, calibration, 2, 3, refine=r, batches=[x]) for r in ("none", "bias"))
    assert torch.equal(rounded.model.weight, corrected.model.weight)
    with torch.no_grad():
        means = [model(x).mean((0, 2, 3)) for model in (layer, rounded.model, corrected.model)]
    off = [float((mean - means[0]).abs().max()) for mean in means[1:]]
    # Half of the rows are variations of the samples: exact for both together, which is close for the samples.
    assert off[1] < off[0] / 3


def test_rounding_alone_keeps_the_grid_and_lowers_the_error(small_batches: list[Tensor]) -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(3, 5, 3), small_batches[0]
    calibration = ptq.calibrate(layer, [x])
    nearest, rounded = (
        ptq.quantize(layer, calibration, 3, None, refine=r, batches=[x]).model for r in ("none", "rounding")
    )
    assert torch.equal(nearest.weight_scale, rounded.weight_scale)
    codes = rounded.weight / rounded.weight_scale.view(-1, 1, 1, 1)
    torch.testing.assert_close(codes, codes.round(), atol=1e-4, rtol=0)
    with torch.no_grad():
        errors = [float((model(x) - layer(x)).square().mean()) for model in (nearest, rounded)]
    assert errors[1] < errors[0]


def test_ranges_alone_round_to_nearest(small_batches: list[Tensor]) -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(3, 5, 3), small_batches[0]
    calibration = ptq.calibrate(layer, [x])
    model = ptq.quantize(layer, calibration, 3, None, refine="ranges", batches=[x]).model
    scale = model.weight_scale.view(-1, 1, 1, 1)
    zero_point = model.weight_zero_point.view(-1, 1, 1, 1)
    codes = (layer.weight / scale + zero_point).round().clamp(-4, 3)
    torch.testing.assert_close(model.weight, (codes - zero_point) * scale)
    spread = layer.weight.amax((1, 2, 3)) - layer.weight.amin((1, 2, 3))
    assert bool((model.weight_scale <= spread / 7 + 1e-6).all())


def test_all_steps_by_name_are_fast(refined: Refining) -> None:
    by_name, fast = refined("alpha,image,ranges,weights,rounding,bias,network"), refined("fast")
    assert isinstance(by_name, Refined) and by_name.learned_as_a_whole
    states = by_name.model.state_dict(), fast.model.state_dict()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])
    assert by_name.diffused == fast.diffused


def test_only_the_image_is_diffused(refined: Refining) -> None:
    found = refined("image")
    assert found.diffused == ("stem",)
    assert [name for name, m in found.model.named_modules() if isinstance(m, DiffusedQuantize)] == [
        "stem.input_quantizer"
    ]


def test_blocks_alone_bring_the_network_closer(batches: list[Tensor]) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    network = nn.Sequential(block, nn.Flatten(), nn.Linear(8 * 64, 4))
    calibration = ptq.calibrate(network, batches)
    found = [ptq.quantize(network, calibration, 3, 4, refine=r, batches=batches) for r in ("none", "blocks")]
    assert isinstance(found[1], Refined) and list(found[1].blocks) == ["0"]
    with torch.no_grad():
        y = torch.cat([network(x) for x in batches])
        errors = [float((torch.cat([q.model(x) for x in batches]) - y).square().mean()) for q in found]
    assert errors[1] < 0.9 * errors[0]


def test_what_words_and_texts_mean() -> None:
    assert steps_of("none") == frozenset() and steps_of("best") == set(STEPS)
    assert steps_of("fast") == EFFORTS["fast"] == set(STEPS) - {"blocks"}
    assert steps_of("bias, ranges") == {"bias", "ranges"}
    for text in ("magic", "bias,", "", "fast,bias"):
        with pytest.raises(InputError, match="choose none, fast or best, or steps: alpha,image,ranges,"):
            steps_of(text)


def test_alpha_alone_smooths_by_layer_and_rounds(small_network: nn.Module, batches: list[Tensor]) -> None:
    calibration = ptq.calibrate(small_network, batches)
    found = ptq.quantize(small_network, calibration, 3, 4, refine="alpha", batches=batches)
    by_hand = ptq.smooth(small_network, calibration, "auto", explicit="never", weights=3, activations=4, clip=True)
    expected = ptq.quantize(by_hand.model, by_hand.calibration, 3, 4)
    assert isinstance(found, Refined) and found.smoothed is not None
    assert {entry.action for entry in found.smoothed.ledger} == {"folded", "skipped"}
    states = found.model.state_dict(), expected.model.state_dict()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])


def test_what_is_smoothed_is_not_smoothed_again(
    small_network: nn.Module, batches: list[Tensor], tmp_path: Path
) -> None:
    calibration = ptq.calibrate(small_network, batches)
    smoothed = ptq.smooth(small_network, calibration, 0.5)
    options = {"refine": "alpha,bias", "batches": batches}
    given, ours = (
        ptq.quantize(model, statistics, 3, 4, **options)
        for model, statistics in ((smoothed.model, smoothed.calibration), (small_network, calibration))
    )
    assert isinstance(given, Refined) and given.smoothed is None
    assert given.source_fingerprint == smoothed.calibration.model_fingerprint
    assert isinstance(ours, Refined) and ours.smoothed is not None
    ours.save(tmp_path / "quantized.safetensors")
    again = ptq.Quantized.load(tmp_path / "quantized.safetensors", ours.smoothed.model, ours.smoothed.calibration)
    with torch.no_grad():
        assert torch.equal(again.model(batches[0]), ours.model(batches[0]))


def test_number_formats_have_no_bits_to_choose_alpha_for(small_network: nn.Module, batches: list[Tensor]) -> None:
    calibration = ptq.calibrate(small_network, batches)
    found = ptq.quantize(small_network, calibration, weight_format="affine:bits=4", refine="fast", batches=batches)
    assert isinstance(found, Refined) and found.smoothed is None
