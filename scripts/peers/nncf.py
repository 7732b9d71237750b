"""nncf on an ONNX graph: what it writes is run by onnxruntime. Eight bits are all that its quantize() does."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

REQUIREMENTS = ("nncf==3.4.0", "openvino==2026.4.1", "onnxruntime==1.31.1", "onnx==1.23.2", "onnxscript==0.7.2")
RECIPES = {
    "mixed preset, fast bias correction": ("W8A8",),
    "performance preset, fast bias correction": ("W8A8",),
}


class Network:
    """The graph, which answers."""

    def __init__(self, content: bytes) -> None:
        from protocol import onnx_network

        self.content = content
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "quantized.onnx"
            path.write_bytes(content)
            self.run = onnx_network(path)

    def __call__(self, images: Any) -> Any:
        return self.run(images)


def quantize(model: Any, batches: list[Any], bits: Any, recipe: str) -> Network:
    import nncf
    import onnx
    from protocol import float_onnx

    presets = {"mixed": nncf.QuantizationPreset.MIXED, "performance": nncf.QuantizationPreset.PERFORMANCE}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "float.onnx"
        float_onnx(model, batches[0], path)
        graph = onnx.load(path)
    given = nncf.Dataset(batches, lambda batch: {"images": batch.numpy()})
    quantized = nncf.quantize(
        graph, given, subset_size=len(batches), preset=presets[recipe.split()[0]], fast_bias_correction=True
    )
    return Network(quantized.SerializeToString())


def export(network: Network, batches: list[Any], path: Path) -> None:
    path.write_bytes(network.content)
