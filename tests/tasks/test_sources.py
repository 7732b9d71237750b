from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ptq.errors import InputError
from ptq.tasks.sources import Request, load_data
from ptq.tasks.task import IMAGENET, Normalization

REQUEST = Request(normalization=IMAGENET, batch_size=4)
GRAY = Request(normalization=Normalization(mean=(0.25,), std=(0.5,), image_size=8), batch_size=4)

OWN = """
import torch

batch = (torch.ones(2, 3), torch.tensor([0, 1]))

class Both:
    calibration = [batch]
    evaluation = [batch, batch]

def pair():
    return [batch], [batch, batch]

def one():
    return [batch, batch]

def generator():
    yield batch
    yield batch

def generators():
    return generator(), generator()

def single_batch():
    return batch

def empty():
    return [], [batch]

def number():
    return 3
"""


def arrays(*shape: int) -> dict[str, NDArray[Any]]:
    generator = np.random.default_rng(0)
    return {
        "x_train": generator.integers(0, 256, (10, *shape), np.uint8),
        "y_train": generator.integers(0, 10, 10, np.uint8),
        "x_test": generator.integers(0, 256, (6, *shape), np.uint8),
        "y_test": generator.integers(0, 10, 6, np.uint8),
    }


def saved(path: Path, content: dict[str, NDArray[Any]]) -> str:
    np.savez(path / "data.npz", **content)  # type: ignore[arg-type]
    return f"npz:{path / 'data.npz'}"


def test_npz_in_color_by_hand(tmp_path: Path) -> None:
    content = arrays(8, 8, 3)
    data = load_data(saved(tmp_path, content), REQUEST)
    batches = list(data.calibration)
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    images, labels = batches[1]
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = ((content["x_train"][4:8] / 255 - mean) / std).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(images.numpy(), expected, atol=1e-5)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert labels.tolist() == content["y_train"][4:8].tolist()
    assert torch.equal(list(data.calibration)[1][0], images)


def test_npz_in_gray_by_hand(tmp_path: Path) -> None:
    content = arrays(8, 8)
    ((images, _), _) = load_data(saved(tmp_path, content), GRAY).evaluation
    np.testing.assert_allclose(images.numpy()[:, 0], (content["x_test"][:4] / 255 - 0.25) / 0.5, atol=1e-6)


def test_gray_images_feed_three_channels(tmp_path: Path) -> None:
    images, _ = next(iter(load_data(saved(tmp_path, arrays(8, 8)), REQUEST).evaluation))
    assert images.shape == (4, 3, 8, 8)
    grays = images * torch.tensor(IMAGENET.std).view(3, 1, 1) + torch.tensor(IMAGENET.mean).view(3, 1, 1)
    torch.testing.assert_close(grays[:, 0], grays[:, 2])


def without(name: str) -> dict[str, NDArray[Any]]:
    content = arrays(8, 8, 3)
    del content[name]
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(without("y_test"), "has no y_test", id="array missing"),
        pytest.param(arrays(8, 8, 3) | {"x_test": np.zeros((6, 8, 8, 3))}, "x_test is float64", id="float images"),
        pytest.param(arrays(8, 8, 4), "the network takes 3 channels", id="four channels"),
        pytest.param(arrays(8), r"x_train is uint8 \[10, 8\]", id="rows"),
        pytest.param(
            arrays(8, 8, 3) | {"y_test": np.zeros(5, np.uint8)}, r"6 images and labels of shape \[5\]", id="labels"
        ),
        pytest.param(arrays(8, 8, 3) | {"y_test": np.zeros(6)}, "labels are float64", id="float labels"),
        pytest.param(
            arrays(8, 8, 3) | {"x_test": np.zeros((0, 8, 8, 3), np.uint8), "y_test": np.zeros(0, np.uint8)},
            "no images",
            id="empty",
        ),
    ],
)
def test_npz_errors(tmp_path: Path, content: dict[str, NDArray[Any]], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_data(saved(tmp_path, content), REQUEST)
    assert "data.npz" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["missing", "text", "truncated", "pickle", "npy"])
def test_a_file_that_is_no_npz_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "data.npz"
    specification = saved(tmp_path, arrays(8, 8, 3))
    if damage == "missing":
        path.unlink()
    elif damage == "text":
        path.write_text("hello")
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "pickle":
        path.write_bytes(pickle.dumps({"x_train": 1}))
    else:
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    with pytest.raises(InputError, match=r"data\.npz") as caught:
        load_data(specification, REQUEST)
    assert "\n" not in str(caught.value)


def test_cifar10_missing_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--download fetches it"):
        load_data(f"cifar10:{tmp_path}", REQUEST)


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-py"], ids=["root", "the folder itself"])
def test_cifar10_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: str) -> None:
    """Five training files and one test file of two images each; only the check of their hashes is put aside."""
    from ptq.vision import torchvision

    monkeypatch.setattr(torchvision("datasets").cifar, "check_integrity", lambda *_: True)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for index, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        pixels = np.zeros((2, 3072), np.uint8)
        pixels[:, :1024] = 40 * index  # planes: red, green, blue
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [index, 9]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {index}" for index in range(10)]}))
    data = load_data(f"cifar10:{tmp_path / inner}", REQUEST)
    assert data.labels is not None
    assert data.labels[9] == "class 9"
    batches = list(data.calibration)
    assert [labels.tolist() for _, labels in batches] == [[0, 9, 1, 9], [2, 9, 3, 9], [4, 9]]
    assert batches[2][0][0, 0, 0, 0].item() == pytest.approx((160 / 255 - 0.485) / 0.229, abs=1e-5)
    ((images, labels),) = data.evaluation
    assert images.shape == (2, 3, 32, 32)
    assert labels.tolist() == [5, 9]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_data.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_data", raising=False)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "calibration", "evaluation"),
    [("pair", 1, 2), ("one", 2, 2), ("Both", 1, 2), ("generator", 2, 2)],
    ids=["pair", "one iterable", "object", "generator function"],
)
def test_own_data(name: str, calibration: int, evaluation: int) -> None:
    data = load_data(f"own_data:{name}", REQUEST)
    for _ in range(2):  # it can be iterated again
        assert (len(list(data.calibration)), len(list(data.evaluation))) == (calibration, evaluation)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("generators", "calibration can be iterated only once", id="generators"),
        pytest.param("single_batch", "one batch, not batches", id="a batch"),
        pytest.param("empty", "calibration has no batches", id="no batches"),
        pytest.param("number", "calibration is int, not batches", id="a number"),
        pytest.param("pairs", "did you mean pair", id="misspelt"),
    ],
)
def test_own_data_errors(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_data(f"own_data:{name}", REQUEST)
    assert "\n" not in str(caught.value)
