"""The pictures of a run folder, small enough to live inside the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ptq.errors import InputError

_SHARES = (1.0, 0.75, 0.5, 0.35, 0.25)  # of the width, tried in turn where the files as they are take too much room
# What the page draws itself isn't shown a second time.
_DRAWN = {
    "alpha_sweep.png",
    "alpha_sweep_layers.png",
    "analysis_remedies.png",
    "compare.png",
    "compare_bits.png",
    "distances.png",
}
_CAPTIONS = {
    "channels.png": "Largest activation and weight of each input channel, before and after smoothing: the four layers "
    "whose outliers fell most.",
    "channels_layers.png": "Every layer a row, its channels from the largest to the smallest: white is even, red is an "
    "outlier.",
    "analysis_layers.png": "The error of each layer, alone and in the whole network, and what part of it weights and "
    "activations have.",
    "calibration_sizes.png": "How much calibration data is enough.",
    "formats.png": "Error against true bits for each number format.",
}


@dataclass(frozen=True)
class Picture:
    """A picture as a data URI, its size in pixels, and what it shows."""

    name: str
    caption: str
    uri: str
    width: int
    height: int


def shown(paths: Sequence[Path]) -> list[Path]:
    """Those that the page doesn't draw itself."""
    return [path for path in paths if path.name not in _DRAWN]


def embedded(paths: Sequence[Path], budget: int) -> list[Picture]:
    """The pictures as data URIs of at most ``budget`` bytes in all: with fewer colours and pixels where that needs it.

    Where even the smallest are too large, the last ones are left out.
    """
    wanted = shown(paths)
    while wanted:
        for share in (None, *_SHARES):
            pictures = [_picture(path, share) for path in wanted]
            if sum(len(picture.uri) for picture in pictures) <= budget:
                return pictures
        wanted = wanted[:-1]
    return []


def _picture(path: Path, share: float | None) -> Picture:
    try:
        content = path.read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            size = image.size
            if share is not None:
                content, size = _smaller(image, share)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable picture ({error}): delete it or make it again") from error
    uri = "data:image/png;base64," + base64.b64encode(content).decode("ascii")
    caption = _CAPTIONS.get(path.name, path.stem.replace("_", " ").capitalize() + ".")
    return Picture(path.name, caption, uri, *size)


def _smaller(image: Image.Image, share: float) -> tuple[bytes, tuple[int, int]]:
    """With this share of its width and height, and with a palette: charts have few colours."""
    plain = image.convert("RGB")
    if share < 1:
        size = max(1, round(plain.width * share)), max(1, round(plain.height * share))
        plain = plain.resize(size, Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    plain.quantize(128, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue(), plain.size
