"""The training loop: its schedule, its data, and that an interruption leaves no trace."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ptq.errors import InputError, MismatchError
from ptq.tasks import Task
from ptq.tasks.checkpoints import load_weights
from ptq.training.checkpoints import Folder, read_lines
from ptq.training.loop import DivergedError, Engine, train
from ptq.training.recipe import PRESETS, Recipe, augmented, generator_for, preset
from ptq.training.samples import ArraySamples, TensorSamples, epoch_batches, samples_of

RECIPE = Recipe(epochs=4, batch_size=8, learning_rate=0.05, warmup_epochs=1, shift=1, flip=True, label_smoothing=0.1)


def network() -> nn.Module:
    """With BatchNorm and dropout, whose state a checkpoint easily forgets."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 3)
    )


def some_samples(count: int = 44) -> TensorSamples:
    generator = torch.Generator().manual_seed(0)
    return TensorSamples(
        torch.randn(count, 1, 4, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    )


def state_of(model: nn.Module | None) -> dict[str, Tensor]:
    assert model is not None
    return model.state_dict()


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_steps_are_those_of_sgd_written_out() -> None:
    """v = 0.9 v + g + 1e-4 w, w = w - lr v, with the learning rate of the step, in float64 and by hand."""
    samples = TensorSamples(
        *(tensor.double() if tensor.is_floating_point() else tensor for tensor in vars_of_samples())
    )
    recipe = Recipe(epochs=3, batch_size=4, learning_rate=0.2, warmup_epochs=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    weight, bias = (parameter.detach().numpy().copy() for parameter in model.parameters())
    history = train(Engine(model, recipe), samples)
    velocity_w, velocity_b = np.zeros_like(weight), np.zeros_like(bias)
    steps, losses = 3, []
    for epoch in range(3):
        for step, (inputs, labels) in enumerate(epoch_batches(samples, recipe, epoch), start=epoch * steps):
            x, y = inputs.flatten(1).numpy(), np.eye(3)[labels.numpy()]
            logits = x @ weight.T + bias
            p = np.exp(logits - logits.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            losses.append(-(y * np.log(p)).sum(1).mean())
            rate = 0.2 * ((step + 1) / 3 if step < 3 else (1 + math.cos(math.pi * (step - 3) / 6)) / 2)
            velocity_w = 0.9 * velocity_w + (p - y).T @ x / 4 + 1e-4 * weight
            velocity_b = 0.9 * velocity_b + (p - y).mean(0) + 1e-4 * bias
            weight, bias = weight - rate * velocity_w, bias - rate * velocity_b
    found_weight, found_bias = (parameter.detach().numpy() for parameter in model.parameters())
    np.testing.assert_allclose(found_weight, weight, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found_bias, bias, rtol=1e-10, atol=1e-12)
    assert history.epochs[-1]["loss"] == pytest.approx(np.mean(losses[-3:]), rel=1e-10)


def vars_of_samples() -> tuple[Tensor, Tensor]:
    samples = some_samples(14)
    return samples.inputs, samples.labels


@pytest.mark.parametrize("interrupted_after", [1, 2, 3])
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path, interrupted_after: int) -> None:
    whole = train(Engine(network(), RECIPE), some_samples(), folder=tmp_path / "whole")
    folder = tmp_path / "cut"
    train(Engine(network(), RECIPE), some_samples(), folder=folder, stop_after=interrupted_after)
    torch.manual_seed(999)  # another process has another state
    resumed = train(Engine(network(), RECIPE), some_samples(), folder=folder)
    assert_same(state_of(whole.model), state_of(resumed.model))
    first, second = (
        torch.load(path / "checkpoint.pt", weights_only=True)["ranks"][0] for path in (tmp_path / "whole", folder)
    )
    assert torch.equal(first["rng"], second["rng"])
    for name in first["optimizer"]:
        assert torch.equal(first["optimizer"][name]["momentum_buffer"], second["optimizer"][name]["momentum_buffer"])
    losses = [[line["loss"] for line in read_lines(path / "metrics.jsonl")] for path in (tmp_path / "whole", folder)]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_a_kill_between_metrics_and_checkpoint_leaves_each_epoch_once(tmp_path: Path) -> None:
    train(Engine(network(), RECIPE), some_samples(), folder=tmp_path, stop_after=2)
    Folder(tmp_path).add_metrics({"epoch": 3, "loss": 1.0})  # the line of an epoch whose checkpoint never came
    train(Engine(network(), RECIPE), some_samples(), folder=tmp_path)
    assert [line["epoch"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_kill_during_the_run_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    class Killed(Exception): ...

    def kill(step: int) -> None:
        if step == 13:
            raise Killed

    with pytest.raises(Killed):
        train(Engine(network(), RECIPE), some_samples(), folder=tmp_path, on_step=kill)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["epoch"] == 2
    resumed = train(Engine(network(), RECIPE), some_samples(), folder=tmp_path)
    assert_same(state_of(train(Engine(network(), RECIPE), some_samples()).model), state_of(resumed.model))


def test_a_finished_run_is_read_and_not_trained_again(tmp_path: Path) -> None:
    first = train(Engine(network(), RECIPE), some_samples(), folder=tmp_path)
    again = train(Engine(network(), RECIPE), some_samples(), folder=tmp_path)
    assert again.epochs == first.epochs
    assert_same(state_of(first.model), state_of(again.model))
    fresh = network()
    load_weights(fresh, tmp_path / "model.safetensors")
    assert_same(state_of(first.model), fresh.state_dict())


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    train(Engine(network(), RECIPE), some_samples(), folder=tmp_path, stop_after=1)
    with pytest.raises(MismatchError, match=r"was trained with learning_rate = 0.05, not 0.1"):
        train(Engine(network(), replace(RECIPE, learning_rate=0.1)), some_samples(), folder=tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(b"no checkpoint")
    with pytest.raises(InputError, match="not a readable checkpoint"):
        train(Engine(network(), RECIPE), some_samples(), folder=tmp_path)


def test_micro_batches_give_the_gradient_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    inputs, labels = vars_of_samples()
    gradients = []
    for parts in (1, 4):
        model.zero_grad()
        recipe = Recipe(epochs=1, batch_size=12, learning_rate=0.1, micro_batches=parts)
        Engine(model, recipe).gradients(inputs[:12].double(), labels[:12], 0)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-14)


def test_a_loss_that_is_no_number_stops_the_run() -> None:
    samples = some_samples()
    samples.inputs[:] = torch.nan
    with pytest.raises(DivergedError, match="try a lower learning rate"):
        train(Engine(network(), RECIPE), samples)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    samples, plain = some_samples(), replace(RECIPE, shift=0, flip=False)
    first, second = (torch.cat([labels for _, labels in epoch_batches(samples, plain, 2)]) for _ in range(2))
    torch.rand(3)
    assert torch.equal(first, second) and len(first) == 40
    others = [epoch_batches(samples, plain, 3), epoch_batches(samples, replace(plain, seed=1), 2)]
    for other in others:
        assert not torch.equal(first, torch.cat([labels for _, labels in other]))
    limited = replace(plain, images=16)
    seen = torch.cat([inputs for inputs, _ in epoch_batches(samples, limited, 0)])
    assert {tuple(x.flatten().tolist()) for x in seen} == {tuple(x.flatten().tolist()) for x in samples.inputs[:16]}


def test_images_move_as_a_loop_would_move_them() -> None:
    images = torch.arange(2 * 2 * 5 * 5.0).reshape(2, 2, 5, 5).repeat(20, 1, 1, 1)
    recipe = replace(RECIPE, shift=2, flip=True)
    moved = augmented(images, recipe, generator_for(1))
    seen = set()
    for before, after in zip(images.numpy(), moved.numpy(), strict=True):
        padded = np.pad(before, ((0, 0), (2, 2), (2, 2)), mode="edge")
        found = [
            (y, x, mirrored)
            for y in range(5)
            for x in range(5)
            for mirrored in (False, True)
            if np.array_equal(padded[:, y : y + 5, x : x + 5][..., :: -1 if mirrored else 1], after)
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert len({y for y, _, _ in seen}) > 2 and len({mirrored for _, _, mirrored in seen}) == 2


def test_samples_of_a_task_are_its_images(digits: Task) -> None:
    samples = samples_of(digits.calibration)
    assert isinstance(samples, ArraySamples) and len(samples) == 1347
    inputs, labels = (torch.cat(parts) for parts in zip(*digits.calibration, strict=True))
    chosen = torch.tensor([5, 0, 1346])
    assert torch.equal(samples.batch(chosen)[0], inputs[chosen])
    assert torch.equal(samples.batch(chosen)[1], labels[chosen])
    plain = samples_of([(inputs[:3], labels[:3]), (inputs[3:5], labels[3:5])])
    assert torch.equal(plain.batch(torch.tensor([4]))[0], inputs[4:5])
    with pytest.raises(InputError, match=r"takes batches \(inputs, labels\)"):
        samples_of([inputs[:2]])


def test_presets_and_their_limits() -> None:
    published = preset("mobilenetv2-cifar10-published")
    assert (published.learning_rate, published.batch_size, published.micro_batches) == (0.4, 1024, 4)
    assert (published.epochs, published.warmup_epochs, published.momentum) == (200, 20, 0.9)
    assert published.rate_factor(20 * 48 - 1, 48) == 1.0 and published.rate_factor(0, 48) == 1 / 960
    for recipe in PRESETS.values():
        assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    with pytest.raises(InputError, match="no preset 'imagenet'"):
        preset("imagenet")
    with pytest.raises(InputError, match="equal micro-batches"):
        replace(published, micro_batches=3)
    with pytest.raises(InputError, match="don't fill a batch"):
        train(Engine(network(), published), some_samples())


def test_the_digits_are_learnt(digits: Task, tmp_path: Path) -> None:
    from ptq.tasks.networks.digits import DigitsNet

    torch.manual_seed(0)
    recipe = replace(preset("digits"), epochs=2, warmup_epochs=0.5)
    history = train(
        Engine(DigitsNet(), recipe), samples_of(digits.calibration), folder=tmp_path, evaluation=digits.evaluation
    )
    assert history.score is not None and history.score > 60
