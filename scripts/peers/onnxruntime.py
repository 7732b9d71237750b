"""onnxruntime's own static quantization: QDQ, weights symmetric by channel, activations by tensor.

W8A8 has signed activations, which its integer kernels take without saturating; with four bits, unsigned ones. Three
bits are no type of ONNX.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

REQUIREMENTS = ("onnxruntime==1.31.1", "onnx==1.23.2", "onnxscript==0.7.2", "sympy==1.14.0", "numpy==2.4.6")
RECIPES = {
    "percentile": ("W8A8", "W4A8", "W4A4"),
    "max": ("W8A8", "W4A8", "W4A4"),
}


class Network:
    """The file, which answers."""

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
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process
    from protocol import float_onnx

    weight_type = {8: QuantType.QInt8, 4: QuantType.QInt4}[bits.weights]
    eight = QuantType.QInt8 if bits.weights == 8 else QuantType.QUInt8
    activation_type = {8: eight, 4: QuantType.QUInt4}[bits.activations]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        float_onnx(model, batches[0], folder / "float.onnx")
        quant_pre_process(str(folder / "float.onnx"), str(folder / "prepared.onnx"))
        quantize_static(
            str(folder / "prepared.onnx"),
            str(folder / "quantized.onnx"),
            Reader(batches),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=activation_type,
            weight_type=weight_type,
            calibrate_method={"max": CalibrationMethod.MinMax, "percentile": CalibrationMethod.Percentile}[recipe],
        )
        return Network((folder / "quantized.onnx").read_bytes())


class Reader:
    """The calibration images, as onnxruntime asks for them."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = iter(batches)

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self.batches, None)
        return None if batch is None else {"images": batch.numpy()}


def export(network: Network, batches: list[Any], path: Path) -> None:
    path.write_bytes(network.content)
