"""The clock, the CPU and the doctor."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ptq.batches import as_call
from ptq.errors import InputError
from ptq.export import OnnxModule, agreement, doctor, latencies
from ptq.export.cpu import _multiply, cpu_model, has_dot_products, instruction_sets, u8s8_saturates
from ptq.export.packages import required

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

OLD = "processor\t: 0\nmodel name\t: Old CPU @ 2.0GHz\nflags\t\t: fpu sse4_1 avx2 avx512f avx512bw\nflags\t\t: fpu\n"
NEW = "flags\t\t: fpu avx2 avx512f avx512_vnni amx_int8\n"
ARM = "CPU implementer : 0x41\nFeatures\t: fp asimd asimddp i8mm\n"


@pytest.mark.parametrize(
    ("text", "sets", "dots"),
    [
        (OLD, ("avx512bw", "avx512f", "avx2", "sse4_1"), False),
        (NEW, ("amx_int8", "avx512_vnni", "avx512f", "avx2"), True),
        (ARM, ("i8mm", "asimddp", "asimd"), True),
        ("", (), False),
    ],
    ids=["old", "new", "arm", "nothing"],
)
def test_instruction_sets(text: str, sets: tuple[str, ...], dots: bool) -> None:
    assert instruction_sets(text) == sets
    assert has_dot_products(sets) is dots


def test_cpu_model() -> None:
    assert cpu_model(OLD) == "Old CPU @ 2.0GHz"
    assert cpu_model("") != "Old CPU @ 2.0GHz"


def test_the_probe_multiplies_as_numpy_does_where_nothing_can_saturate() -> None:
    generator = np.random.default_rng(0)
    activations = generator.integers(0, 127, (8, 64), np.uint8)
    weights = generator.integers(-127, 127, (64, 32), np.int8)
    np.testing.assert_array_equal(_multiply(activations, weights), activations.astype(int) @ weights.astype(int))


def test_dot_products_do_not_saturate() -> None:
    if not has_dot_products(instruction_sets()):
        pytest.skip("this CPU may saturate, or be one that doesn't say what it has")
    assert not u8s8_saturates()


def test_the_doctor_tells_facts() -> None:
    facts = doctor()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["torch"]["version"] == torch.__version__
    assert facts["extras"]["onnx"]["onnxruntime"]
    assert facts["cpu"]["u8s8_saturates"] in (True, False)
    assert facts["cpu"]["instruction_sets"] == list(instruction_sets())
    assert facts["allocator_tunable"] in (True, False)


class Sleeper(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.sizes: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.add(len(x))
        time.sleep(self.seconds)
        return x


def test_latencies_are_those_of_the_networks_at_the_batch_sizes_with_one_thread() -> None:
    networks: dict[str, nn.Module] = {"short": Sleeper(0.002), "long": Sleeper(0.02)}
    threads = torch.get_num_threads()
    times = latencies(networks, as_call(torch.zeros(3, 2)), (1, 5), rounds=3)
    assert set(times) == {1, 5} and torch.get_num_threads() == threads
    for by_network in times.values():
        assert by_network["short"] >= 2 and by_network["long"] >= 20
    assert networks["short"].sizes == {1, 5}


def test_agreement_counts() -> None:
    class Table(nn.Module):
        def __init__(self, answers: list[int]) -> None:
            super().__init__()
            self.register_buffer("logits", torch.eye(3)[answers] * 10)

        def forward(self, rows: Tensor) -> Tensor:
            return self.logits[rows]

    one, two = Table([0, 1, 2, 0]), Table([0, 1, 1, 0])
    batches = [(torch.tensor([0, 1]), torch.tensor([0, 0])), (torch.tensor([2, 3]), torch.tensor([2, 0]))]
    found = agreement(one, two, batches)
    assert (found.samples, found.same_top1, found.top1, found.reference_top1) == (4, 75.0, 75.0, 50.0)
    assert found.largest_difference == 10 and not found.holds
    assert agreement(one, one, [torch.arange(4)]).top1 is None
    with pytest.raises(InputError, match="no batch"):
        agreement(one, two, [])


def test_a_file_that_is_no_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"not an onnx file")
    with pytest.raises(InputError, match=r"broken\.onnx: onnxruntime can't load it"):
        OnnxModule(tmp_path / "broken.onnx")


def test_a_missing_package_is_named_with_its_extra() -> None:
    with pytest.raises(InputError, match=r"no_such_package: not installed: pip install 'ptq\[onnx\]'"):
        required("no_such_package")


@pytest.mark.parametrize(
    "order", ["import ptq.export", "from ptq.export import nvidia", "from ptq.export import export"], ids=str
)
def test_the_room_can_be_called_whatever_was_imported_before(order: str) -> None:
    code = f"{order}; import ptq.export; print(callable(ptq.export), callable(ptq.export.nvidia.amax_table))"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "True True"
