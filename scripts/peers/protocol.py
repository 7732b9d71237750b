"""One row of the comparison, measured the same way for every toolkit, in the toolkit's own environment.

    <environment>/bin/python scripts/peers/protocol.py JOB.json RESULT.json

The job names an adapter, a recipe, bits and a file with the network's weights and the images. An adapter is a file
beside this one that imports its toolkit inside its functions, so that the table of recipes can be read without it:

    REQUIREMENTS = ("toolkit==1.2.3",)         # what its environment holds beside torch; None: this project's own
    RECIPES = {"max": ("W8A8", "W4A4")}        # what it can do → at which bits
    def quantize(model, batches, bits, recipe): ...  # → images [N, 3, H, W] to logits [N, classes]
    def export(quantized, batches, path): ...  # optional: an int8 ONNX file

Bits like ``W4A4-8`` have 8 for weights and inputs of the first and the last layer, ``conv1`` and ``linear``.

Nothing but torch is needed here; adapters may import from ``protocol``.
"""

from __future__ import annotations

import importlib.util
import json
import re
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
NETWORK = HERE.parent.parent / "ptq" / "tasks" / "networks" / "cifar_resnet.py"
EXPORTED_BITS = "W8A8"
CALIBRATION_BATCH, TEST_BATCH = 128, 250


def load(path: Path, name: str) -> ModuleType:
    """A module from a file, under a name that can't be taken for the toolkit's own."""
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses and pickle look it up there
    specification.loader.exec_module(module)
    return module


def load_adapter(path: Path) -> ModuleType:
    return load(path, f"peer_{re.sub(r'[^a-z0-9]', '_', path.stem)}")


class Bits(NamedTuple):
    """Of weights and inputs, and of both in the first and the last layer where these have others."""

    weights: int
    activations: int
    outer: int | None = None

    @classmethod
    def parse(cls, text: str) -> Bits:
        found = re.fullmatch(r"W(\d+)A(\d+)(?:-(\d+))?", text)
        if found is None:
            raise ValueError(f"{text}: write bits as W4A8 or W4A4-8")
        return cls(int(found[1]), int(found[2]), int(found[3]) if found[3] else None)


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Quantize, then count right answers: processor seconds and peak memory are those of the quantization alone."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    declare_torchvision_operators()
    content = torch.load(job["content"], weights_only=True, mmap=True)
    model = load(NETWORK, "cifar_resnet").resnet20()
    model.load_state_dict(content["weights"])
    adapter = load_adapter(Path(job["adapter"]))
    batches = list(content["calibration"].clone().split(CALIBRATION_BATCH))
    forget_peak_memory()
    started = time.process_time()
    quantized = adapter.quantize(model.eval(), batches, Bits.parse(job["bits"]), job["recipe"])
    row: dict[str, Any] = {
        "seconds": round(time.process_time() - started, 2),
        "peak_memory_mb": round(peak_memory() / 2**20),
    }
    row["top1"], row["images"] = top1(quantized, content["images"], content["labels"]), len(content["labels"])
    if job["bits"] == EXPORTED_BITS and hasattr(adapter, "export"):
        try:
            adapter.export(quantized, batches, Path(job["onnx"]))
        except Exception as error:
            traceback.print_exc()
            row["export_error"] = in_one_line(error)
    return row


def top1(network: Callable[[Any], Any], images: Any, labels: Any) -> float:
    """The share of right answers, in percent."""
    import torch

    right = 0
    with torch.no_grad():
        for batch, target in zip(images.split(TEST_BATCH), labels.split(TEST_BATCH), strict=True):
            right += int((torch.as_tensor(network(batch)).argmax(1) == target).sum())
    return round(100 * right / len(labels), 2)


def float_onnx(model: Any, example: Any, path: Path) -> None:
    """The float network as an ONNX file from ``images``, any number of them, to ``logits``."""
    import torch

    torch.onnx.export(
        model,
        (example,),
        str(path),
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def onnx_network(path: Path) -> Callable[[Any], Any]:
    """An ONNX file run by onnxruntime on one thread."""
    import onnxruntime
    import torch

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    return lambda images: torch.from_numpy(session.run(None, {given.name: images.numpy()})[0])


def forget_peak_memory() -> None:
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")


def peak_memory() -> int:
    """Bytes that this process held at most, since it was last forgotten where the system can forget it."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def declare_torchvision_operators() -> None:
    """torchvision's published wheel imports beside a CPU-only torch once the operators it expects have a schema."""
    import torch

    if importlib.util.find_spec("torchvision") is None or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    declare_torchvision_operators.library = library  # type: ignore[attr-defined] # it has to outlive this call


def in_one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def main() -> None:
    job_file, result_file = map(Path, sys.argv[1:])
    sys.path.remove(str(HERE))  # the adapters have the names of their toolkits
    sys.modules["protocol"] = sys.modules["__main__"]
    try:
        row = measure(json.loads(job_file.read_text()))
    except Exception as error:
        traceback.print_exc()
        row = {"error": in_one_line(error)}
    result_file.write_text(json.dumps(row))


if __name__ == "__main__":
    main()
