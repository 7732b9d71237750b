"""neural-compressor 2.6, the last with post-training quantization of a network for plain CPUs: its static recipe."""

from __future__ import annotations

from typing import Any

REQUIREMENTS = (
    "neural-compressor==2.6",
    "setuptools==79.0.1",
    "six==1.17.0",
    "tqdm==4.70.1",
    "peft==0.21.2",
    "torchvision==0.28.0",
    "onnx==1.23.2",
    "onnxruntime==1.31.1",
    "onnxscript==0.7.2",
)
RECIPES = {"static": ("W8A8",)}


class Loader:
    """The calibration images, as neural-compressor asks for them."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.batch_size = batches, len(batches[0])

    def __iter__(self) -> Any:
        return ((batch, None) for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def quantize(model: Any, batches: list[Any], bits: Any, recipe: str) -> Any:
    from neural_compressor import PostTrainingQuantConfig, quantization

    configuration = PostTrainingQuantConfig(
        backend="default", approach="static", calibration_sampling_size=[sum(map(len, batches))]
    )
    quantized = quantization.fit(model, configuration, calib_dataloader=Loader(batches))
    if quantized is None:
        raise RuntimeError("quantization.fit returned None")
    return quantized.model
