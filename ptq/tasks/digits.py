"""The embedded task: scikit-learn's handwritten digits and a network trained on them, in the package."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ptq.tasks.arrays import ArrayBatches
from ptq.tasks.task import Normalization

WEIGHTS = Path(__file__).with_name("digits.safetensors")
HELD_OUT_EVERY = 4  # image i is held out where i % 4 == 0: 450 of 1,797
NORMALIZATION = Normalization(mean=(0.305,), std=(0.376,), image_size=16, peak=16.0)
LABELS = tuple("0123456789")


def digits(normalization: Normalization = NORMALIZATION, batch_size: int = 32) -> tuple[ArrayBatches, ArrayBatches]:
    """The 1,347 images to train or calibrate on, and the 450 held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = data.images.astype(np.uint8)  # [1797, 8, 8], whole numbers from 0 to 16
    held_out = np.arange(len(images)) % HELD_OUT_EVERY == 0
    return (
        ArrayBatches(images[~held_out], data.target[~held_out], normalization, batch_size),
        ArrayBatches(images[held_out], data.target[held_out], normalization, batch_size),
    )
