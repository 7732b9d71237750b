from __future__ import annotations

import json

import numpy as np
import torch
from safetensors import safe_open
from sklearn.datasets import load_digits

from ptq.tasks import resolve
from ptq.tasks.digits import WEIGHTS, digits


def test_split_is_every_fourth_image_and_the_rest() -> None:
    calibration, evaluation = digits()
    images = load_digits().images
    assert len(images) == 1797
    np.testing.assert_array_equal(evaluation.images[..., 0], images[::4])
    rest = [index for index in range(1797) if index % 4]
    np.testing.assert_array_equal(calibration.images[..., 0], images[rest])
    assert (len(calibration.images), len(evaluation.images)) == (1347, 450)


def test_no_image_is_on_both_sides() -> None:
    calibration, evaluation = digits()
    train = {image.tobytes() for image in calibration.images}
    assert not [image for image in evaluation.images if image.tobytes() in train]


def test_batches_are_normalised_gray_images_of_sixteen_pixels() -> None:
    calibration, _ = digits()
    assert len(calibration) == 43  # 1347 / 32
    images = torch.cat([images for images, _ in calibration])
    labels = torch.cat([labels for _, labels in calibration])
    assert images.shape == (1347, 1, 16, 16)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert abs(images.mean().item()) < 0.05
    assert 0.7 < images.std().item() < 1.1  # interpolation takes some of the spread of the 8 x 8 originals


def test_shipped_weights_are_small_and_good() -> None:
    assert WEIGHTS.stat().st_size < 1_000_000
    with safe_open(WEIGHTS, "pt") as file:
        training = json.loads(file.metadata()["training"])
    task = resolve()
    with torch.inference_mode():
        correct = [task.model(images).argmax(1) == labels for images, labels in task.evaluation]
    accuracy = torch.cat(correct).float().mean().item()
    assert accuracy >= 0.98
    assert abs(accuracy - training["held_out_top1"]) < 0.005
