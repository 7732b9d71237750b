"""The export folder: the file, what was measured, and all it takes to run it without ptq."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ptq.batches import limited
from ptq.export.deployment import DEFAULT_TARGET
from ptq.export.graph import DEFAULT_OPSET
from ptq.export.onnx import EAGER, FLOAT, INT8, Exported, export
from ptq.export.runtime import BATCH_SIZES
from ptq.quantization import Quantized
from ptq.storage import replacing, write_json
from ptq.tasks import Task

MODEL, RESULT, ABOUT, SCRIPT = "model.int8.onnx", "export.json", "model.json", "run.py"

_SCRIPT = '''"""python run.py images.npy: [N, H, W] or [N, H, W, C], raw pixels at the size that model.json names."""
import json, sys
from pathlib import Path
import numpy as np
import onnxruntime

folder = Path(__file__).parent
about = json.loads((folder / "model.json").read_text(encoding="utf-8"))
session = onnxruntime.InferenceSession(str(folder / about["file"]), providers=["CPUExecutionProvider"])
images, steps = np.load(sys.argv[1]), about["preprocessing"]
if steps:
    images = images[..., None] if images.ndim == 3 else images
    if images.shape[1:3] != (steps["image_size"], steps["image_size"]):
        sys.exit(f"{sys.argv[1]}: resize the images to {steps['image_size']} x {steps['image_size']} first")
    images = (images / steps["peak"] - steps["mean"]) / steps["std"]
    images = images.transpose(0, 3, 1, 2).astype(np.float32)
for logits in session.run(None, {about["inputs"][0]: images})[about["output"]]:
    chances = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    best = int(chances.argmax())
    print(about["labels"][best] if about["labels"] else best, f"{chances[best]:.3f}")
'''


def export_task(
    quantized: Quantized,
    folder: Path,
    task: Task,
    *,
    images: int | None = None,
    target: str = DEFAULT_TARGET,
    variant: str | None = None,
    opset: int = DEFAULT_OPSET,
    pack_weights: bool = False,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    progress: bool = False,
) -> Exported:
    """Export a task's quantized network into a folder, measured on the task's own data (the first ``images``)."""
    labelled = limited(task.evaluation, images)
    exported = export(
        quantized,
        folder / MODEL,
        next(iter(labelled)),
        batches=task.calibration,
        labelled_batches=labelled,
        target=target,
        variant=variant,
        opset=opset,
        pack_weights=pack_weights,
        batch_sizes=batch_sizes,
        progress=progress,
    )
    made = {"task": task.name, "scheme": quantized.scheme.to_json(), "refine": quantized.refine}
    write_json(folder / RESULT, {**exported.to_json(), **made})
    write_json(folder / ABOUT, _about(exported, task))
    with replacing(folder / SCRIPT) as partial:
        partial.write_text(_SCRIPT, encoding="utf-8")
    return exported


def _about(exported: Exported, task: Task) -> dict[str, Any]:
    return {
        "kind": "exported model",
        "schema": 1,
        "file": exported.path.name,
        "task": task.name,
        "inputs": list(exported.inputs),
        "output": exported.output,  # which of the outputs holds the logits
        # (pixel / peak - mean) / std, channels first; null: the network takes its input as it is
        "preprocessing": asdict(task.normalization) if task.normalization else None,
        "labels": list(task.labels) if task.labels else None,
    }


def summary(exported: Exported) -> list[tuple[str, str]]:
    """What a person wants to see, as pairs of a name and a text."""
    agreement = exported.agreement
    rows = [
        ("file", f"{exported.path}, {exported.bytes:,} bytes ({exported.bytes / exported.float_bytes:.2f} of float)"),
        ("integers", f"{exported.variant}, opset {exported.opset}, for {exported.target}"),
        ("layers", ", ".join(f"{len(names)} {kind}" for kind, names in exported.layers.items() if names)),
    ]
    if agreement.top1 is not None:
        simulated = f"simulation {agreement.reference_top1:.2f}"
        rows.append(("top-1", f"{agreement.top1:.2f} % over {agreement.samples:,} samples, {simulated}"))
    rows.append(("equal answers", f"{agreement.same_top1:.2f} % of file and simulation"))
    rows.append(
        ("logits", f"differ by {agreement.largest_difference:.3g} at most, of {agreement.largest_logit:.3g} in size")
    )
    rows += [
        (
            f"batch {size}",
            f"{times[INT8]:.3g} ms, {times[INT8] / times[FLOAT]:.2f} of float ONNX ({times[FLOAT]:.3g} ms), "
            f"{times[INT8] / times[EAGER]:.2f} of eager torch ({times[EAGER]:.3g} ms)",
        )
        for size, times in exported.milliseconds.items()
    ]
    return rows + [("finding", text) for text in exported.findings]
