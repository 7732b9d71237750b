from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ptq.errors import InputError, MismatchError
from ptq.tasks import TASKS, Task, resolve
from ptq.tasks.networks.cifar_resnet import CifarResNet, resnet20
from ptq.tasks.networks.digits import DigitsNet

OWN_TASK = """
import torch
from ptq.tasks import Task

def task():
    batches = [(torch.ones(2, 3), torch.tensor([0, 1]))]
    return Task(name="mine", model=torch.nn.Linear(3, 2), calibration=batches, evaluation=batches)

def wrong():
    return 7
"""


@pytest.fixture
def cifar(tmp_path: Path) -> str:
    """Ten small training images and six test images in CIFAR's shape."""
    generator = np.random.default_rng(0)
    arrays = {
        f"{letter}_{part}": generator.integers(0, top, (count, *shape), np.uint8)
        for part, count in (("train", 10), ("test", 6))
        for letter, top, shape in (("x", 256, (32, 32, 3)), ("y", 10, ()))
    }
    np.savez(tmp_path / "cifar.npz", **arrays)  # type: ignore[arg-type]
    return f"npz:{tmp_path / 'cifar.npz'}"


def test_names() -> None:
    assert TASKS == ("digits", "cifar10-resnet20", "cifar10-resnet56", "cifar10-mobilenetv2", "cola", "rte")


def test_nothing_given_is_digits() -> None:
    task = resolve()
    assert task.name == "digits"
    assert isinstance(task.model, DigitsNet)
    assert not task.model.training
    assert task.labels == ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
    assert task.notes == ()
    assert task.normalization is not None
    assert task.normalization.image_size == 16


def test_a_task_iterates_the_same_way_twice() -> None:
    task = resolve()
    first, second = (torch.cat([images for images, _ in task.calibration]) for _ in range(2))
    assert torch.equal(first, second)


def test_batch_size() -> None:
    images, labels = next(iter(resolve("digits", batch_size=7).evaluation))
    assert (len(images), len(labels)) == (7, 7)


def test_cifar_with_weights_and_data(tmp_path: Path, cifar: str) -> None:
    torch.manual_seed(3)
    source = resnet20()
    torch.save({"state_dict": source.state_dict()}, tmp_path / "weights.th")
    task = resolve("cifar10-resnet20", weights=str(tmp_path / "weights.th"), data=cifar)
    assert task.name == "cifar10-resnet20"
    assert torch.equal(task.model.get_parameter("linear.weight"), source.linear.weight)
    assert task.labels is not None
    assert task.labels[3] == "cat"
    assert task.normalization is not None
    assert task.normalization.mean == (0.485, 0.456, 0.406)
    assert task.normalization.image_size == 32
    assert task.notes == ()


def test_random_weights_are_said_and_come_from_the_seed(cifar: str) -> None:
    tasks = [resolve("cifar10-resnet20", weights="random", data=cifar, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (task.model.get_parameter("conv1.weight") for task in tasks)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert any("random weights" in note for note in tasks[0].notes)


def test_wrong_weights_are_a_mismatch(tmp_path: Path, cifar: str) -> None:
    torch.save(CifarResNet(blocks=3, classes=100).state_dict(), tmp_path / "weights.th")
    with pytest.raises(MismatchError, match=r"linear\.weight is \[100, 64\] in the file and \[10, 64\] in the network"):
        resolve("cifar10-resnet20", weights=str(tmp_path / "weights.th"), data=cifar)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"name": "digit"}, "did you mean digits", id="task misspelt"),
        pytest.param({"name": "cifar10-resnet20"}, r"--data npz:FILE or cifar10:DIR", id="no data"),
        pytest.param({"name": "cifar10-resnet20", "data": "npz:x"}, "--weights FILE", id="no weights"),
        pytest.param({"model": "torchvision:resnet18"}, r"--data npz:FILE, cifar10:DIR, imagefolder:DIR", id="model"),
        pytest.param({"name": "digits", "data": "zip:x"}, "zip:x: no module 'zip'.*--data npz:FILE", id="data form"),
        pytest.param({"name": "digits", "data": "x.npz"}, "--data x.npz: give npz:FILE", id="data without form"),
        pytest.param({"batch_size": 0}, "--batch-size 0", id="batch size"),
        pytest.param({"image_size": -1}, "--image-size -1", id="image size"),
    ],
)
def test_errors_name_the_remedy(options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        resolve(**options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_model_names_its_task(cifar: str) -> None:
    task = resolve(model="torchvision:resnet18", data=cifar)
    assert task.name == "torchvision-resnet18"
    assert any("random weights" in note for note in task.notes)
    images, _ = next(iter(task.evaluation))
    assert images.shape == (6, 3, 32, 32)


def test_image_size_resizes_arrays(cifar: str) -> None:
    task = resolve("cifar10-resnet20", weights="random", data=cifar, image_size=48)
    images, _ = next(iter(task.evaluation))
    assert images.shape == (6, 3, 48, 48)
    assert task.normalization is not None
    assert task.normalization.image_size == 48


def test_own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    monkeypatch.chdir(tmp_path)
    task = resolve("own_task:task")
    assert isinstance(task, Task)
    assert task.name == "mine"
    assert not task.model.training
    torch.save({"weight": torch.full((2, 3), 2.0), "bias": torch.zeros(2)}, "weights.pt")
    replaced = resolve("own_task:task", weights="weights.pt")
    assert torch.equal(replaced.model.get_parameter("weight"), torch.full((2, 3), 2.0))
    with pytest.raises(InputError, match=r"returned int: return a ptq\.tasks\.Task"):
        resolve("own_task:wrong")


def test_a_model_replaces_that_of_a_named_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_digits.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(256, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    task = resolve("digits", model="own_digits:net")
    assert isinstance(task.model, nn.Sequential)
    images, _ = next(iter(task.evaluation))
    assert task.model(images).shape == (32, 10)
