"""brevitas, by the functions of its own post-training recipe.

BatchNorm merged, weights symmetric by channel, activations asymmetric by tensor in front of every Conv and Linear,
ranges of both by squared error; then Qronos, which rounds the weights layer by layer against the inputs of the
quantized network, and bias correction. The strongest that was found among its recipes on this network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

REQUIREMENTS = (
    "brevitas==0.13.4",
    "torchvision==0.28.0",
    "tqdm==4.70.1",
    "onnx==1.23.2",
    "onnxscript==0.7.2",
    "onnxoptimizer==0.4.2",
)
WIDTHS = ("W8A8", "W4A8", "W4A4", "W3A3", "W4A4-8", "W3A3-8")
RECIPES = {
    "MSE ranges, Qronos, bias correction": WIDTHS,
    "MSE ranges": WIDTHS,
}
QRONOS_BATCH = 256


class Network:
    """The quantized network with its weights rounded once, not at each call."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, images: Any) -> Any:
        from brevitas.export.inference import quant_inference_mode

        with quant_inference_mode(self.model):
            return self.model(images)


def quantize(model: Any, batches: list[Any], bits: Any, recipe: str) -> Network:
    import brevitas_examples.imagenet_classification.ptq.ptq_common as common
    import torch
    from brevitas.graph.quantize import layerwise_quantize, preprocess_for_quantize

    common.tqdm = lambda values, *_, **__: values
    labelled = [(batch, torch.zeros(len(batch))) for batch in batches]
    model = preprocess_for_quantize(model, equalize_iters=0, merge_bn=True)
    outer = [] if bits.outer is None else ["conv1", "linear"]
    model = layerwise_quantize(model, compute_layer_map=layer_map(bits.weights, bits.activations), name_blacklist=outer)
    if bits.outer is not None:  # the only ones that are still float
        model = layerwise_quantize(model, compute_layer_map=layer_map(bits.outer, bits.outer))
    model.eval()
    with torch.no_grad():
        model(batches[0])
    common.calibrate(labelled, model)
    if "Qronos" in recipe:
        larger = [(batch, torch.zeros(len(batch))) for batch in torch.cat(batches).split(QRONOS_BATCH)]
        common.apply_qronos(model, larger, act_order=True)
        common.apply_bias_correction(labelled, model)
    return Network(model.eval())


def layer_map(weights: int, activations: int) -> Any:
    """What brevitas puts in the place of each kind of layer."""
    import torch
    from brevitas_examples.imagenet_classification.ptq.ptq_common import create_quant_maps

    _, found, *_ = create_quant_maps(
        dtype=torch.float32,
        device="cpu",
        bias_bit_width=None,
        weight_bit_width=weights,
        weight_param_method="mse",
        weight_scale_type="float_scale",
        weight_quant_type="sym",
        weight_quant_granularity="per_channel",
        weight_narrow_range=False,
        weight_quant_format="int",
        act_quant_format="int",
        act_bit_width=activations,
        act_scale_type="float_scale",
        act_scale_computation_type="static",
        act_param_method="mse",
        act_quant_type="asym",
        act_quant_granularity="per_tensor",
        act_quant_percentile=99.999,
    )
    return found


def export(network: Network, batches: list[Any], path: Path) -> None:
    from brevitas.export import export_onnx_qcdq

    export_onnx_qcdq(network.model, args=batches[0][:1], export_path=str(path), dynamo=False)
