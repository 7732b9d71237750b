"""The sweep: equal to doing each step by hand, and able to go on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import ptq
from ptq.batches import limited
from ptq.errors import InputError
from ptq.sweeping import Sweep


class Counted:
    """Batches that count how often they are read."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.batches, self.passes = batches, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        return iter(self.batches)


@pytest.fixture
def labelled(digits: ptq.Task) -> Counted:
    return Counted(list(limited(digits.evaluation, 128)))


def test_each_point_equals_the_steps_by_hand(
    digits: ptq.Task, digits_calibration: ptq.Calibration, labelled: Counted
) -> None:
    result = ptq.sweep(
        digits.model, digits_calibration, digits.calibration, labelled, [0.3, 0.8], bits=["W4A4", "W3A4"]
    )
    assert [(p.bits, p.alpha) for p in result.points] == [
        ("W4A4", None), ("W3A4", None), ("W4A4", 0.3), ("W3A4", 0.3), ("W4A4", 0.8), ("W3A4", 0.8),
    ]  # fmt: skip
    assert result.reference is not None and result.reference.score == ptq.evaluate(digits.model, labelled).top1
    for point in result.points:
        model, calibration = digits.model, digits_calibration
        if point.alpha is not None:
            smoothed = ptq.smooth(model, calibration, point.alpha)
            model, calibration = smoothed.model, smoothed.calibration
        quantized = ptq.quantize(model, calibration, bits=point.bits).model
        assert point.accuracy.score == ptq.evaluate(quantized, labelled).top1
        errors = ptq.layer_errors(digits.model, quantized, digits.calibration, max_batches=4, accumulated=False)
        for name, error in errors.items():  # a sample's against a batch's
            assert point.layer_l1[name] == pytest.approx(error.isolated.l1, rel=0.35, abs=0.01)


def test_it_goes_on_where_it_was(digits: ptq.Task, digits_calibration: ptq.Calibration, labelled: Counted) -> None:
    arguments = (digits.model, digits_calibration, digits.calibration, labelled, [0.2, 0.6])
    undisturbed = ptq.sweep(*arguments)

    class Interruption(Exception):
        pass

    saved: list[str] = []

    def interrupt(so_far: Sweep) -> None:
        saved.append(json.dumps(so_far.to_json()))
        if len(saved) == 2:
            raise Interruption

    with pytest.raises(Interruption):
        ptq.sweep(*arguments, on_point=interrupt)
    labelled.passes = 0
    resumed = ptq.sweep(*arguments, resume=Sweep.from_json(json.loads(saved[-1])))
    assert labelled.passes == 2  # the float network and the one point that was missing
    assert resumed.to_json() == undisturbed.to_json()
    labelled.passes = 0
    ptq.sweep(*arguments, resume=resumed)
    assert labelled.passes == 0


def test_points_of_another_model_are_not_reused(
    digits: ptq.Task, digits_calibration: ptq.Calibration, labelled: Counted
) -> None:
    foreign = Sweep("another model", digits_calibration.data_fingerprint)
    result = ptq.sweep(digits.model, digits_calibration, digits.calibration, labelled, [0.5], resume=foreign)
    assert result is not foreign and len(result.points) == 2


def test_only_the_first_images(digits: ptq.Task, digits_calibration: ptq.Calibration) -> None:
    result = ptq.sweep(
        digits.model,
        digits_calibration,
        digits.calibration,
        digits.evaluation,
        [0.5],
        weights=8,
        activations=8,
        images=50,
    )
    assert result.reference is not None and result.reference.n == 50 == result.images


def test_best_prefers_accuracy_then_small_errors(
    digits: ptq.Task, digits_calibration: ptq.Calibration, labelled: Counted
) -> None:
    result = ptq.sweep(digits.model, digits_calibration, digits.calibration, labelled, [0.0, 0.5, 1.0], bits=["W8A8"])
    best = result.best("W8A8")
    equal = [p for p in result.curve("W8A8") if p.accuracy.score == best.accuracy.score]
    assert sum(best.layer_l1.values()) == min(sum(p.layer_l1.values()) for p in equal)


@pytest.mark.parametrize(
    ("alphas", "options", "message"),
    [
        ([], {}, "no α"),
        ([1.5], {}, "alpha = 1.5"),
        ([0.5], {"bits": ["W0A8"]}, "whole number"),
        ([0.5], {"images": 0}, "0 images"),
    ],
    ids=["no alpha", "alpha", "bits", "images"],
)
def test_bad_options(
    alphas: list[float],
    options: dict[str, object],
    message: str,
    digits: ptq.Task,
    digits_calibration: ptq.Calibration,
    labelled: Counted,
) -> None:
    with pytest.raises(InputError, match=message):
        ptq.sweep(digits.model, digits_calibration, digits.calibration, labelled, alphas, **options)
    assert labelled.passes == 0


def test_limited_cuts_the_last_batch() -> None:
    batches = [
        (torch.arange(4), torch.arange(4)),
        (torch.arange(4), torch.arange(4)),
        (torch.arange(4), torch.arange(4)),
    ]
    assert [len(x) for x, _ in limited(batches, 6)] == [4, 2]
    assert [len(x) for x, _ in limited(batches, 4)] == [4]
    assert [len(x["a"]) for x in limited([{"a": torch.arange(5)}], 3)] == [3]
