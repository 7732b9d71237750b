"""scripts/benchmark peers: the protocol with this project's own adapter, with toolkits that fail, and going on."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ptq
from ptq.tasks import resolve
from ptq.tasks.networks.cifar_resnet import resnet20

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
ADAPTERS = sorted(path for path in (SCRIPTS / "peers").glob("*.py") if path.stem != "protocol")
FAILING = """
REQUIREMENTS = None
RECIPES = {"by hand": ("W4A4", "W3A3")}
def quantize(model, batches, bits, recipe):
    raise RuntimeError("out of ideas\\nand more")
"""
NOT_INSTALLABLE = FAILING.replace("None", '("no-such-toolkit-of-ptq==1.0",)')


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("benchmark_peers", str(SCRIPTS / "benchmark_peers"))
    specification = importlib.util.spec_from_loader("benchmark_peers", loader)
    assert specification is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["benchmark_peers"] = module
    loader.exec_module(module)
    return module


@pytest.fixture
def benchmark(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run it in a folder with a network of random weights and random images; gives the rows by toolkit."""
    generator = np.random.default_rng(0)
    images = {name: generator.integers(0, 256, (count, 32, 32, 3), np.uint8) for name, count in
              (("x_train", 64), ("x_test", 200))}  # fmt: skip
    labels = {name: generator.integers(0, 10, count) for name, count in (("y_train", 64), ("y_test", 200))}
    np.savez(tmp_path / "cifar10.npz", **images, **labels)
    for seed in (0, 1):
        torch.manual_seed(seed)
        save_file(resnet20().state_dict(), tmp_path / f"weights{seed}.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")

    def run(weights: str = "weights0.safetensors", bits: str = "W4A4") -> dict[str, Any]:
        arguments = ["--data", "npz:cifar10.npz", "--weights", weights, "--bits", bits, "--quick"]
        arguments += ["--adapters", "adapters", "--environments", "environments", "--json", "found/peers.json"]
        monkeypatch.setattr(sys, "argv", ["benchmark_peers", *arguments])
        script.main()
        content = json.loads(Path("found/peers.json").read_text())
        assert (content["kind"], content["schema"]) == ("peers", 1)
        return {row["peer"]: row for row in content["rows"]}

    return run


def test_rows_errors_and_going_on(
    benchmark: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    ours = (SCRIPTS / "peers" / "ptq.py").read_text()
    (adapters / "ptq.py").write_text(ours + '\nRECIPES = {"rounded": ("W4A4",)}\n')
    (adapters / "failing.py").write_text(FAILING)
    (adapters / "not-installable.py").write_text(NOT_INSTALLABLE)
    rows = benchmark()
    assert list(rows) == ["ptq", "failing", "not-installable"]
    assert rows["failing"]["error"] == "RuntimeError: out of ideas"
    assert rows["not-installable"]["error"].startswith("pip: ERROR")
    assert rows["ptq"]["top1"] == by_hand(tmp_path) and rows["ptq"]["images"] == 200
    assert rows["ptq"]["seconds"] > 0 and rows["ptq"]["peak_memory_mb"] > 50
    shown = capsys.readouterr().out
    assert f"| {rows['ptq']['top1']:.2f} |" in shown and "`RuntimeError: out of ideas`" in shown

    (adapters / "failing.py").write_text(
        FAILING.replace('raise RuntimeError("out of ideas\\nand more")', "return model")
    )
    (adapters / "not-installable.py").unlink()
    page = tmp_path / "found" / "README.md"
    page.write_text(f"{page.read_text()}\nWhat that means.\n")
    again = benchmark()
    assert page.read_text().endswith("\nWhat that means.\n") and page.read_text().count("| failing |") == 1
    assert f"W4A4: {'ptq is ahead' if rows['ptq']['top1'] > again['failing']['top1'] else ''}" in page.read_text()
    assert again["ptq"] == rows["ptq"]  # seconds and all: not measured again
    assert "error" not in again["failing"] and again["failing"]["top1"] == float_top1(tmp_path)
    assert "error" in again["not-installable"]  # its row stays
    with pytest.raises(SystemExit, match="measured on other weights or images"):
        benchmark("weights1.safetensors")


def loaded(folder: Path) -> tuple[torch.nn.Module, list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    task = resolve(
        "cifar10-resnet20", weights=str(folder / "weights0.safetensors"), data=f"npz:{folder / 'cifar10.npz'}"
    )
    batches = [images for images, _ in task.calibration]
    return task.model, [torch.cat(batches)[:64]], list(task.evaluation)


def by_hand(folder: Path) -> float:
    model, batches, labelled = loaded(folder)
    quantized = ptq.quantize(model, ptq.calibrate(model, batches), 4, 4, refine="none")
    return ptq.evaluate(quantized.model, labelled).top1


def float_top1(folder: Path) -> float:
    model, _, labelled = loaded(folder)
    return ptq.evaluate(model, labelled).top1


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda path: path.stem)
def test_every_adapter_says_what_it_needs_and_what_it_can(script: ModuleType, adapter: Path) -> None:
    """Without its toolkit, and with every version pinned."""
    peer = script.Peer.read(adapter)
    assert all("==" in requirement for requirement in peer.requirements or ())
    assert peer.recipes and all(set(bits) <= set(script.BITS) for bits in peer.recipes.values())


def test_an_unknown_toolkit_is_one_line(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--data", "npz:none.npz", "--weights", "none", "--peers", "nobody"]
    monkeypatch.setattr(sys, "argv", ["benchmark_peers", *arguments])
    with pytest.raises(SystemExit, match=r"--peers nobody: no such toolkit: choose from .*brevitas"):
        script.main()
