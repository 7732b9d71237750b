from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ptq.errors import InputError
from ptq.tasks.folders import FolderBatches, image_folder
from ptq.tasks.task import Normalization

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SMALL = Normalization(mean=MEAN, std=STD, image_size=8)


def picture(path: Path, color: int | tuple[int, ...] = (0, 0, 0), mode: str = "RGB", width: int = 20) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (width, 12), color).save(path)


def names(batches: FolderBatches) -> list[str]:
    return [path.name for path, _ in batches.samples]


def test_train_and_val_folders(tmp_path: Path) -> None:
    for index in range(3):
        picture(tmp_path / "train" / "cat" / f"c{index}.png")
        picture(tmp_path / "train" / "dog" / f"d{index}.png")
    picture(tmp_path / "val" / "cat" / "v.png")
    picture(tmp_path / "val" / "dog" / "w.JPG")
    calibration, evaluation, classes = image_folder(tmp_path, SMALL, batch_size=4)
    assert classes == ("cat", "dog")
    assert names(calibration) == ["c0.png", "d0.png", "c1.png", "d1.png", "c2.png", "d2.png"]
    assert names(evaluation) == ["v.png", "w.JPG"]
    assert len(calibration) == 2
    (images, labels), (_, last) = calibration
    assert images.shape == (4, 3, 8, 8)
    assert labels.dtype == torch.int64
    assert labels.tolist() == [0, 1, 0, 1]
    assert last.tolist() == [0, 1]


def test_test_stands_in_for_val(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "cat" / "a.png")
    picture(tmp_path / "test" / "cat" / "b.png")
    calibration, evaluation, _ = image_folder(tmp_path, SMALL, batch_size=4)
    assert (names(calibration), names(evaluation)) == (["a.png"], ["b.png"])


def test_one_folder_is_split_by_every_fifth_image(tmp_path: Path) -> None:
    for index in range(11):
        picture(tmp_path / "cat" / f"{index:02}.png")
    calibration, evaluation, _ = image_folder(tmp_path, SMALL, batch_size=4)
    assert names(calibration) == ["00.png", "05.png", "10.png"]
    assert len(evaluation.samples) == 8
    assert not set(names(calibration)) & set(names(evaluation))


@pytest.mark.parametrize(
    ("mode", "color", "expected"),
    [("RGB", (255, 0, 51), (1.0, 0.0, 0.2)), ("L", 102, (0.4, 0.4, 0.4)), ("RGBA", (255, 0, 51, 9), (1.0, 0.0, 0.2))],
    ids=["color", "gray", "transparent"],
)
def test_colors(tmp_path: Path, mode: str, color: int | tuple[int, ...], expected: tuple[float, ...]) -> None:
    picture(tmp_path / "train" / "x" / "a.png", color, mode)
    picture(tmp_path / "val" / "x" / "a.png", color, mode)
    calibration, _, _ = image_folder(tmp_path, SMALL, batch_size=1)
    ((images, _),) = calibration
    wanted = (np.array(expected) - MEAN) / STD
    np.testing.assert_allclose(images[0].mean((1, 2)).numpy(), wanted, atol=1e-5)


def test_the_middle_of_the_picture_is_seen(tmp_path: Path) -> None:
    """At 224 px a 256 x 512 picture isn't resized at all: columns 144 to 368 remain."""
    ramp = np.tile((np.arange(512) // 2).astype(np.uint8), (256, 1))
    (tmp_path / "x").mkdir()
    for name in ("a.png", "b.png"):
        Image.fromarray(ramp).save(tmp_path / "x" / name)
    normalization = Normalization(mean=(0.0,), std=(1.0,), image_size=224)
    calibration, _, _ = image_folder(tmp_path, normalization, batch_size=1)
    ((images, _),) = calibration
    np.testing.assert_allclose(images[0, 0].numpy() * 255, ramp[:224, 144:368], atol=1e-3)


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    picture(tmp_path / "x" / "a.png")
    picture(tmp_path / "x" / "b.png")
    whole = (tmp_path / "x" / "b.png").read_bytes()
    (tmp_path / "x" / "b.png").write_bytes(whole[: len(whole) // 2])
    _, evaluation, _ = image_folder(tmp_path, SMALL, batch_size=4)
    with pytest.raises(InputError, match=r"b\.png can't be read as an image: repair or remove it") as caught:
        list(evaluation)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["missing", "empty", "no classes", "one image", "classes differ"])
def test_errors_name_the_folder(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "photos"
    if kind != "missing":
        root.mkdir()
    if kind == "no classes":
        picture(root / "a.png")
    if kind == "one image":
        picture(root / "cat" / "a.png")
    if kind == "classes differ":
        picture(root / "train" / "cat" / "a.png")
        picture(root / "val" / "dog" / "a.png")
    message = {
        "missing": "no such folder",
        "empty": "no images; give one folder per class",
        "no classes": "no images; give one folder per class",
        "one image": "at least two",
        "classes differ": "cat is in one alone",
    }[kind]
    with pytest.raises(InputError, match=message) as caught:
        image_folder(root, SMALL, batch_size=4)
    assert "photos" in str(caught.value)
    assert "\n" not in str(caught.value)
