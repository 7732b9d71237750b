from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ptq.errors import InputError, MismatchError
from ptq.tasks.models import load_model

OWN = """
import torchvision
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

def factory():
    return nn.Linear(3, 2)

def broken():
    raise KeyError("size")

def needs(argument):
    return nn.Linear(3, 2)

def number():
    return 7

ready = nn.Linear(3, 2)
constant = 5
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_models", raising=False)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("name", ["factory", "Net", "ready"], ids=["function", "class", "module"])
def test_own_model(name: str) -> None:
    loaded = load_model(f"own_models:{name}", None, seed=0)
    assert isinstance(loaded.model, nn.Linear)
    assert not loaded.model.training
    assert loaded.notes == ()  # it may well be trained: the factory knows


@pytest.mark.usefixtures("own")
def test_own_model_with_weights() -> None:
    torch.save({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, "weights.pt")
    loaded = load_model("own_models:factory", "weights.pt", seed=0)
    assert torch.equal(loaded.model.get_parameter("weight"), torch.ones(2, 3))


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("specification", "message"),
    [
        pytest.param("own_models:factori", "did you mean factory", id="function misspelt"),
        pytest.param("no_such_module:factory", "no module 'no_such_module'", id="module missing"),
        pytest.param("own_models:broken", "failed with KeyError: 'size'", id="factory raises"),
        pytest.param("own_models:needs", "called without arguments", id="factory wants arguments"),
        pytest.param("own_models:number", "returned int: return an nn.Module", id="no module returned"),
        pytest.param("own_models:constant", "is a int: give a function", id="not callable"),
        pytest.param("resnet18", "torchvision:NAME.*did you mean torchvision:resnet18", id="no source"),
        pytest.param("torchvision:", "torchvision:NAME", id="no name"),
        pytest.param("my models/net.py:factory", "package.module:factory", id="a path"),
        pytest.param("torchvision:resnet81", "did you mean resnet18", id="torchvision misspelt"),
        pytest.param("timm:mobilenetv2_10", "did you mean mobilenetv2_", id="timm misspelt"),
    ],
)
def test_errors_in_one_line(specification: str, message: str) -> None:
    if specification.startswith("timm"):
        pytest.importorskip("timm")
    with pytest.raises(InputError, match=message) as caught:
        load_model(specification, None, seed=0)
    assert "\n" not in str(caught.value)


def test_torchvision_model_is_random_from_its_seed() -> None:
    first, again, other = (load_model("torchvision:squeezenet1_1", None, seed=seed) for seed in (0, 0, 1))
    weights = [loaded.model.get_parameter("features.0.weight") for loaded in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert any("random weights" in note for note in first.notes)
    assert first.normalization is not None
    assert first.normalization.image_size == 224


def test_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    load_model("torchvision:squeezenet1_1", None, seed=5)
    assert torch.equal(torch.rand(1), expected)


def test_the_input_size_of_a_torchvision_model_is_known() -> None:
    normalization = load_model("torchvision:efficientnet_b1", None, seed=0).normalization
    assert normalization is not None
    assert normalization.image_size == 240


def test_torchvision_weights_by_a_wrong_name() -> None:
    with pytest.raises(InputError, match=r"no such file.*IMAGENET1K_V1"):
        load_model("torchvision:squeezenet1_1", "IMAGENET", seed=0)


def test_torchvision_weights_of_another_network(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2, 3)}, tmp_path / "weights.pt")
    with pytest.raises(MismatchError, match=r"weights\.pt doesn't fit SqueezeNet: missing: .*unexpected: weight"):
        load_model("torchvision:squeezenet1_1", str(tmp_path / "weights.pt"), seed=0)


def test_a_failed_download_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr("torch.hub.urlopen", refuse)
    with pytest.raises(InputError, match=r"--weights DEFAULT: downloading it failed \(OSError: Network is unreachable"):
        load_model("torchvision:squeezenet1_1", "DEFAULT", seed=0)


def test_timm_model() -> None:
    pytest.importorskip("timm")
    loaded = load_model("timm:mobilenetv2_035", None, seed=0)
    assert not loaded.model.training
    assert loaded.normalization is not None
    assert any("random weights" in note for note in loaded.notes)


def test_timm_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(InputError, match="pip install timm"):
        load_model("timm:mobilenetv2_035", None, seed=0)
