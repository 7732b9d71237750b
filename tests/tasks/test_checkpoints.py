from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ptq.errors import InputError, MismatchError
from ptq.tasks.checkpoints import load_weights, read_state

State = dict[str, Tensor]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


def trained() -> State:
    torch.manual_seed(1)
    state = network().state_dict()
    state["1.running_mean"] += 5.0
    return state


def prefixed(state: State, prefix: str) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda state: state, id="bare"),
        pytest.param(lambda state: {"state_dict": state, "epoch": 3}, id="state_dict"),
        pytest.param(lambda state: {"model": state}, id="model"),
        pytest.param(lambda state: {"model_state_dict": state, "loss": 0.1}, id="model_state_dict"),
        pytest.param(lambda state: {"net": prefixed(state, "module."), "acc": 93.0}, id="net, DataParallel"),
        pytest.param(lambda state: prefixed(state, "_orig_mod."), id="torch.compile"),
        pytest.param(lambda state: prefixed(state, "module._orig_mod."), id="compiled, then DataParallel"),
        pytest.param(lambda state: prefixed(state, "_orig_mod.module."), id="DataParallel, then compiled"),
    ],
)
def test_checkpoints_as_people_save_them(tmp_path: Path, wrap: Callable[[State], Any]) -> None:
    path = tmp_path / "weights.pt"
    torch.save(wrap(trained()), path)
    model = network()
    load_weights(model, path)
    for name, tensor in trained().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_safetensors(tmp_path: Path) -> None:
    save_file(trained(), tmp_path / "weights.safetensors")
    model = network()
    load_weights(model, tmp_path / "weights.safetensors")
    assert torch.equal(model.state_dict()["3.weight"], trained()["3.weight"])


def test_num_batches_tracked_may_be_missing(tmp_path: Path) -> None:
    state = trained()
    del state["1.num_batches_tracked"]
    torch.save(state, tmp_path / "weights.pt")
    model = network()
    load_weights(model, tmp_path / "weights.pt")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())


def test_a_misfit_names_every_kind_of_difference(tmp_path: Path) -> None:
    state = trained()
    del state["0.weight"]
    state["head.weight"] = torch.zeros(1)
    state["3.weight"] = torch.zeros(10, 8)
    torch.save(state, tmp_path / "weights.pt")
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(MismatchError) as caught:
        load_weights(model, tmp_path / "weights.pt")
    message = str(caught.value)
    assert "missing: 0.weight" in message
    assert "unexpected: head.weight" in message
    assert "3.weight is [10, 8] in the file and [3, 8] in the network" in message
    assert "\n" not in message
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_many_differences_are_counted(tmp_path: Path) -> None:
    torch.save({f"block{index}.weight": torch.zeros(1) for index in range(7)}, tmp_path / "weights.pt")
    with pytest.raises(MismatchError, match=r"block2\.weight, … \(7 in all\)") as caught:
        load_weights(network(), tmp_path / "weights.pt")
    assert "block3" not in str(caught.value)


class RunsCode:
    """What an attacker puts into a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("nested", [False, True], ids=["bare", "among weights"])
def test_code_in_a_pickle_is_refused_and_does_not_run(tmp_path: Path, nested: bool) -> None:
    trap = tmp_path / "trap"
    content = {"state_dict": trained(), "extra": RunsCode(trap)} if nested else RunsCode(trap)
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(InputError, match=r"could run code.*save model\.state_dict\(\)") as caught:
        read_state(tmp_path / "weights.pt")
    assert "weights.pt" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not trap.exists()
    torch.load(tmp_path / "weights.pt", weights_only=False)  # the trap is a real one
    assert trap.exists()


def test_a_plain_pickle_with_code_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "weights.pkl").write_bytes(pickle.dumps(RunsCode(tmp_path / "trap")))
    with pytest.raises(InputError, match=r"weights\.pkl"):
        read_state(tmp_path / "weights.pkl")
    assert not (tmp_path / "trap").exists()


def truncated(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(truncated, id="truncated"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.write_text("<html>404</html>"), id="a web page"),
        pytest.param(lambda path: path.unlink(), id="not there"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path, suffix: str, damage: Callable[[Path], Any]) -> None:
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pt":
        torch.save(trained(), path)
    else:
        save_file(trained(), path)
    damage(path)
    with pytest.raises(InputError) as caught:
        read_state(path)
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [[1, 2], {}, {"state_dict": {"a": 1}}, torch.zeros(2)], ids=repr)
def test_a_file_without_weights_is_named(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(InputError, match="holds no weights by name"):
        read_state(tmp_path / "weights.pt")
