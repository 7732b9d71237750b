"""Images in one array, converted to normalised tensors a batch at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ptq.errors import InputError
from ptq.tasks.task import Normalization


class ArrayBatches:
    """Batches ``(float32 [N, C, H, W], int64 [N])`` of raw images ``[N, H, W, C]`` or ``[N, H, W]``, in their order.

    Gray images feed a network of three channels, repeated; images of another size are resized bilinearly.
    """

    def __init__(
        self, images: NDArray[Any], labels: NDArray[Any], normalization: Normalization, batch_size: int
    ) -> None:
        if images.ndim == 3:
            images = images[..., None]
        if images.ndim != 4 or images.shape[-1] not in (1, normalization.channels):
            raise InputError(
                f"images of shape {list(images.shape)}: the network takes {normalization.channels} channels,"
                " give [N, H, W, C] or [N, H, W]"
            )
        if labels.shape != images.shape[:1]:
            raise InputError(f"{len(images)} images and labels of shape {list(labels.shape)}: give one label per image")
        if not len(images):
            raise InputError("no images: give at least one")
        if not np.issubdtype(labels.dtype, np.integer):
            raise InputError(f"labels are {labels.dtype}: give whole numbers, the index of each image's class")
        self.images = images
        self.labels = labels
        self.normalization = normalization
        self.batch_size = batch_size
        self._mean = torch.tensor(normalization.mean).view(1, -1, 1, 1)
        self._std = torch.tensor(normalization.std).view(1, -1, 1, 1)

    def __len__(self) -> int:
        return math.ceil(len(self.images) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.images), self.batch_size):
            part = slice(start, start + self.batch_size)
            yield self._prepare(self.images[part]), torch.from_numpy(self.labels[part].astype(np.int64))

    def _prepare(self, images: NDArray[Any]) -> Tensor:
        pixels = torch.from_numpy(images.astype(np.float32)).permute(0, 3, 1, 2).contiguous()
        pixels /= self.normalization.peak
        size = (self.normalization.image_size, self.normalization.image_size)
        if pixels.shape[2:] != size:
            pixels = functional.interpolate(pixels, size, mode="bilinear", antialias=True)
        return (pixels - self._mean) / self._std
