"""Quantization-aware training: right gradients, a start and an end that are those of ``ptq.quantize``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq import channels
from ptq.calibration import Calibration
from ptq.errors import InputError
from ptq.quantization import Bits, Quantized, Scheme
from ptq.quantization.apply import quantize_by
from ptq.tasks import Task
from ptq.training.qat import QuantizedEngine, train_qat
from ptq.training.quantizers import RATIOS, InputSteps, least_squares_steps, rounded, step_of
from ptq.training.recipe import Recipe, preset
from ptq.training.samples import TensorSamples, samples_of

RECIPE = Recipe(epochs=2, batch_size=8, learning_rate=0.01)


def labelled(seed: int = 1, count: int = 32) -> TensorSamples:
    generator = torch.Generator().manual_seed(seed)
    size = torch.tensor([0.1, 1.0, 20.0]).reshape(1, 3, 1, 1)
    inputs = torch.randn(count, 3, 8, 8, generator=generator) * size
    return TensorSamples(inputs, torch.randint(0, 5, (count,), generator=generator))


def test_gradients_are_those_of_lsq() -> None:
    """Against the closed forms of the paper, element by element in numpy."""
    x = torch.tensor([-3.0, -0.9, -0.26, 0.0, 0.31, 0.74, 1.2, 9.0], dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    zero, first, last = 1.0, -4, 3
    weights = torch.arange(1.0, 9.0, dtype=torch.float64)
    (rounded(x, scale, zero, first, last) * weights).sum().backward()
    v, w = x.detach().numpy() / 0.5, weights.numpy()
    low, high = first - 1.0, last - 1.0
    inside = (np.rint(v) >= low) & (np.rint(v) <= high)
    by_scale = np.where(inside, np.rint(v) - v, np.where(v < low, low, high))
    assert x.grad is not None and scale.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), np.where(inside, w, 0.0))
    assert float(scale.grad) == pytest.approx(float((by_scale * w).sum()))


def test_steps_stay_positive_and_their_gradients_are_scaled() -> None:
    scale = torch.tensor([0.5, -0.25], requires_grad=True)
    step = step_of(scale, 100, 7)
    assert torch.equal(step.detach(), torch.tensor([0.5, 0.25]))
    step.sum().backward()
    assert scale.grad is not None
    torch.testing.assert_close(scale.grad, torch.tensor([1.0, -1.0]) / 700**0.5)


@pytest.mark.parametrize("kind", ["conv", "transposed"])
def test_learned_steps_begin_where_the_squared_error_is_least(kind: str) -> None:
    """Against a search over the same ratios, channel by channel in numpy."""
    torch.manual_seed(0)
    transposed = kind == "transposed"
    layer = nn.ConvTranspose2d(4, 6, 3, groups=2) if transposed else nn.Conv2d(4, 6, 3, groups=2)
    weight = layer.weight.detach().clone()
    weight.view(-1)[::17] *= 4  # outliers that are better clipped
    rows = torch.cat([part.transpose(0, 1) for part in weight.chunk(2)]) if transposed else weight
    rows_array = rows.flatten(1).double().numpy()  # [6, …]
    absmax = np.abs(rows_array).max(1)
    outputs = channels.over_outputs(torch.arange(6), weight, layer)
    found = least_squares_steps(weight, torch.tensor(absmax / 3, dtype=torch.float32), outputs, 3)
    for row, largest, step in zip(rows_array, absmax, found.tolist(), strict=True):
        candidates = [largest / 3 * ratio for ratio in RATIOS]
        errors = [((np.clip(np.rint(row / s), -3, 3) * s - row) ** 2).sum() for s in candidates]
        assert step == pytest.approx(candidates[int(np.argmin(errors))], rel=1e-5)
    assert (found < torch.tensor(absmax / 3)).any()


SCHEMES = {
    "W4A4 folded": Scheme(bits=Bits(4, 4)),
    "W4A8 symmetric, outer layers in 8 bits": Scheme(bits=Bits(4, 8), symmetric_activations=True, first_last=8),
    "W3 kept BatchNorm": Scheme(bits=Bits(3, None), fold_batchnorm=False),
    "formats": Scheme(
        bits=Bits(8, 8, weight_format="multistep:bits=3,parts=4", activation_format="affine:bits=6"),
        exclude=("head",),
    ),
}


@pytest.mark.parametrize("steps", ["learned", "observed"])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_it_begins_as_the_quantized_network_and_ends_as_one(
    small_network: nn.Module, small_batches: list[Tensor], tmp_path: Path, scheme: Scheme, steps: str
) -> None:
    calibration = ptq.calibrate(small_network, small_batches)
    before = {name: tensor.clone() for name, tensor in small_network.state_dict().items()}
    engine = QuantizedEngine(small_network, calibration, scheme, RECIPE, steps=steps)
    plain = quantize_by(scheme, small_network, calibration)
    engine.model.eval()
    if steps == "observed" or scheme.bits.weight_format:
        for batch in small_batches:
            assert torch.equal(engine.model(batch), plain.model(batch))

    samples = labelled()
    quantized, history = train_qat(
        small_network, calibration, samples, RECIPE, scheme, steps=steps, folder=tmp_path, freeze_after=1
    )
    assert len(history.epochs) == 2
    for name, tensor in small_network.state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} of the float model changed"
    changed = [
        name
        for name, tensor in plain.model.state_dict().items()
        if not torch.equal(tensor, quantized.model.state_dict()[name])
    ]
    assert {"stem.weight", "depthwise.weight", "grouped.weight", "up.weight", "head.weight"} <= set(changed)
    for name, bits in quantized.bits.items():  # every weight is a multiple of its step, within its codes
        layer = quantized.model.get_submodule(name)
        if bits.weights is None or bits.weight_format:
            continue
        assert isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear))
        spread = channels.over_outputs(layer.weight_scale, layer.weight, layer)  # type: ignore[attr-defined, arg-type]
        codes = layer.weight.detach().double() / spread.double()
        assert float((codes - codes.round()).abs().max()) < 1e-4
        assert float(codes.abs().max()) <= 2 ** (bits.weights - 1) - 1 + 1e-4
    loaded = Quantized.load(tmp_path / "quantized.safetensors", small_network, calibration)
    for batch in small_batches:
        assert torch.equal(loaded.model(batch), quantized.model(batch))
        assert torch.isfinite(loaded.model(batch)).all()


@pytest.mark.parametrize("steps", ["learned", "observed"])
def test_the_result_computes_what_was_trained(
    small_network: nn.Module, small_batches: list[Tensor], steps: str
) -> None:
    from ptq.training.loop import train

    calibration = ptq.calibrate(small_network, small_batches)
    engine = QuantizedEngine(small_network, calibration, SCHEMES["W4A4 folded"], RECIPE, steps=steps)
    train(engine, labelled())
    engine.model.eval()
    result = engine.result()
    for batch in small_batches:
        assert torch.equal(engine.model(batch), result.model(batch))


def test_observed_ranges_follow_the_batches_until_they_are_frozen() -> None:
    quantizer = InputSteps(8, torch.tensor(0.1), torch.tensor(0.0), symmetric=False, learned=False, memory=0.75)
    low, high = float(quantizer.low), float(quantizer.high)
    assert (low, high) == pytest.approx((-12.8, 12.7))
    batch = torch.tensor([[-1.0, 3.0]])
    quantizer.train()(batch)
    assert float(quantizer.low) == pytest.approx(0.75 * low - 0.25)
    assert float(quantizer.high) == pytest.approx(0.75 * high + 0.75)
    assert float(quantizer.scale) == pytest.approx((float(quantizer.high) - float(quantizer.low)) / 255)
    seen = quantizer.state_dict()
    seen = {name: tensor.clone() for name, tensor in seen.items()}
    quantizer.frozen = True
    quantizer(batch * 100)
    quantizer.frozen = False
    quantizer.eval()(batch * 100)
    assert all(torch.equal(tensor, seen[name]) for name, tensor in quantizer.state_dict().items())


def test_batchnorms_freeze_after_so_many_epochs(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    calibration = ptq.calibrate(small_network, small_batches)
    engine = QuantizedEngine(
        small_network, calibration, SCHEMES["W3 kept BatchNorm"], RECIPE, freeze_after=1, steps="observed"
    )
    norm = engine.model.get_submodule("stem_norm")
    engine.begin_epoch(0)
    assert norm.training
    engine.begin_epoch(1)
    assert not norm.training and engine.model.training


def test_an_interrupted_run_ends_with_the_same_bits(
    small_network: nn.Module, small_batches: list[Tensor], tmp_path: Path
) -> None:
    calibration = ptq.calibrate(small_network, small_batches)
    recipe, samples = replace(RECIPE, epochs=3), labelled()
    for steps in ("learned", "observed"):
        options = {"scheme": SCHEMES["W4A4 folded"], "steps": steps, "freeze_after": 2}
        whole, _ = train_qat(small_network, calibration, samples, recipe, folder=tmp_path / f"{steps}-a", **options)
        cut = tmp_path / f"{steps}-b"
        train_qat(small_network, calibration, samples, recipe, folder=cut, stop_after=1, **options)
        resumed, _ = train_qat(small_network, calibration, samples, recipe, folder=cut, **options)
        for name, tensor in whole.model.state_dict().items():
            assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_training_wins_back_what_three_bits_lose(digits: Task, digits_calibration: Calibration) -> None:
    scheme = Scheme(bits=Bits(3, 3))
    lost = quantize_by(scheme, digits.model, digits_calibration)
    before = ptq.evaluate(lost.model, digits.evaluation).top1
    recipe = replace(preset("digits-qat"), epochs=1, warmup_epochs=0)
    quantized, _ = train_qat(digits.model, digits_calibration, samples_of(digits.calibration), recipe, scheme)
    after = ptq.evaluate(quantized.model, digits.evaluation).top1
    assert after > before + 5 and after > 90, (before, after)


def test_smoothed_networks_are_trained_too(
    small_network: nn.Module, small_batches: list[Tensor], tmp_path: Path
) -> None:
    calibration = ptq.calibrate(small_network, small_batches)
    for form in ("fold", "hook"):
        smoothed = ptq.smooth(small_network, calibration, alpha=0.5, form=form, batches=small_batches)
        quantized, _ = train_qat(
            smoothed.model, smoothed.calibration, labelled(), RECIPE, Scheme(bits=Bits(4, 4)), folder=tmp_path / form
        )
        loaded = Quantized.load(tmp_path / form / "quantized.safetensors", smoothed.model, smoothed.calibration)
        assert torch.equal(loaded.model(small_batches[0]), quantized.model(small_batches[0]))


@pytest.mark.parametrize("keep_batchnorm", [False, True], ids=["folded", "kept"])
@pytest.mark.parametrize("form", ["fold", "hook"])
def test_a_smoothed_network_learns_what_the_original_learns(
    small_network: nn.Module, small_batches: list[Tensor], form: str, keep_batchnorm: bool
) -> None:
    """SGD isn't indifferent to smoothing: where it divides weights by 10, gradients grow tenfold, and a step goes a
    hundred times as far. On the digits, α by layer with clips ended at chance. At 16 bits, where rounding is next to
    nothing, a smoothed network has to learn the function that the original learns."""
    calibration = ptq.calibrate(small_network, small_batches)
    smoothed = ptq.smooth(small_network, calibration, alpha=0.5, form=form, batches=small_batches)
    scheme = Scheme(bits=Bits(16, None), fold_batchnorm=not keep_batchnorm)
    answers = []
    for source, statistics in ((small_network, calibration), (smoothed.model, smoothed.calibration)):
        quantized, _ = train_qat(source, statistics, labelled(), RECIPE, scheme, steps="observed")
        answers.append(quantized.model(small_batches[0]).detach())
    learnt = (answers[0] - small_network(small_batches[0])).norm()
    assert (answers[1] - answers[0]).norm() < 1e-3 * learnt


def test_norms_that_smoothing_changed_learn_what_they_would_have_learnt(small_batches: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(192, 16), nn.LayerNorm(16), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 5)
    )
    nn.init.uniform_(model[2].weight, 0.1, 10.0)
    batches = [batch[:, :, :8, :8] for batch in small_batches]
    calibration = ptq.calibrate(model.eval(), batches)
    smoothed = ptq.smooth(model, calibration, alpha=0.5, batches=batches)
    assert not torch.equal(smoothed.model[2].weight, model[2].weight)  # type: ignore[index]
    answers = [
        train_qat(source, statistics, labelled(), RECIPE, Scheme(bits=Bits(16, None)), steps="observed")[0]
        .model(batches[0])
        .detach()
        for source, statistics in ((model, calibration), (smoothed.model, smoothed.calibration))
    ]
    learnt = (answers[0] - model(batches[0])).norm()
    assert (answers[1] - answers[0]).norm() < 1e-3 * learnt


def test_training_goes_on_from_searched_clips(digits: Task, digits_calibration: Calibration) -> None:
    """Two epochs at W4A4 from α by layer with clips ended at 9.33 %, chance: steps began elsewhere than the search
    said, and the loss of the first batches was 4.4."""
    smoothed = ptq.smooth(
        digits.model, digits_calibration, "auto", weights=4, activations=4, clip=True, batches=digits.calibration
    )
    scheme = Scheme(bits=Bits(4, 4))
    begun = QuantizedEngine(smoothed.model, smoothed.calibration, scheme, preset("digits-qat")).result()
    given = quantize_by(scheme, smoothed.model, smoothed.calibration)
    for name, statistics in smoothed.calibration.layers.items():
        if statistics.weight_clip != 1:
            scales = (network.model.get_buffer(f"{name}.weight_scale") for network in (begun, given))
            torch.testing.assert_close(*scales)
    recipe = replace(preset("digits-qat"), epochs=1, images=512, warmup_epochs=0)
    quantized, history = train_qat(smoothed.model, smoothed.calibration, samples_of(digits.calibration), recipe, scheme)
    assert history.epochs[-1]["loss"] < 0.2
    assert ptq.evaluate(quantized.model, digits.evaluation).top1 > 97


def test_unknown_steps_are_refused(small_network: nn.Module, small_batches: list[Tensor]) -> None:
    calibration = ptq.calibrate(small_network, small_batches)
    with pytest.raises(InputError, match="steps 'guessed'"):
        train_qat(small_network, calibration, labelled(), RECIPE, steps="guessed")
