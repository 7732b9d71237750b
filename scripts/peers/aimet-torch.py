"""aimet-torch: QuantizationSimModel with its per-channel configuration, and AdaRound.

BatchNorm folded, weights symmetric by channel, activations asymmetric by tensor with ranges "TF-enhanced". Its
quantizers stand behind operations; those whose output no Conv or Linear reads (in front of an addition, and the
logits) are taken away, so that what is quantized is the same as with the other toolkits.
"""

from __future__ import annotations

import operator
import tempfile
from pathlib import Path
from typing import Any

REQUIREMENTS = (
    "aimet-torch==2.42.0",
    "torchvision==0.28.0",
    "onnxscript==0.7.2",
)
WIDTHS = ("W8A8", "W4A8", "W4A4", "W3A3", "W4A4-8", "W3A3-8")
RECIPES = {
    "AdaRound, 1,000 iterations": WIDTHS,
    "TF-enhanced ranges": WIDTHS,
}
ITERATIONS = 1000
OUTER = ("conv1", "linear")  # the first and the last layer
READ_BY_OUTER = ("conv1", "layer3.2.relu2", "pool")  # whose quantizers are on the way to them
LEAST = 4  # bits that it accepts as a default; fewer are set on the quantizers


def quantize(model: Any, batches: list[Any], bits: Any, recipe: str) -> Any:
    import logging

    import torch
    from aimet_torch.adaround.adaround_weight import Adaround, AdaroundParameters
    from aimet_torch.batch_norm_fold import fold_all_batch_norms
    from aimet_torch.common import quantsim_config
    from aimet_torch.common.defs import QuantScheme
    from aimet_torch.nn import QuantizationMixin
    from aimet_torch.quantsim import QuantizationSimModel

    logging.disable(logging.INFO)
    example = batches[0][:1]
    configuration = str(Path(quantsim_config.__file__).with_name("default_config_per_channel.json"))
    scheme = QuantScheme.post_training_tf_enhanced
    model = with_additions_as_modules(model)
    for module in model.modules():
        if type(module).__name__ == "PaddedShortcut":
            QuantizationMixin.ignore(type(module))
            break
    fold_all_batch_norms(model, tuple(example.shape), dummy_input=example)

    def calibrate(network: Any, *_: Any) -> None:
        with torch.no_grad():
            for batch in batches:
                network(batch)

    with tempfile.TemporaryDirectory() as folder:
        if "AdaRound" in recipe:
            loader = torch.utils.data.DataLoader(torch.cat(batches), batch_size=64)  # type: ignore[arg-type]
            parameters = AdaroundParameters(
                data_loader=loader,
                num_batches=len(loader),
                default_num_iterations=ITERATIONS,
                forward_fn=lambda network, batch: network(batch),
            )
            model = Adaround.apply_adaround(
                model,
                example,
                parameters,
                path=folder,
                filename_prefix="rounded",
                default_param_bw=bits.weights,
                param_bw_override_list=[(model.get_submodule(name), bits.outer) for name in OUTER if bits.outer],
                default_quant_scheme=scheme,
                default_config_file=configuration,
            )
        simulation = QuantizationSimModel(
            model,
            dummy_input=example,
            quant_scheme=scheme,
            default_output_bw=max(bits.activations, LEAST),
            default_param_bw=max(bits.weights, LEAST),
            config_file=configuration,
        )
        place_and_set(simulation.model, bits)
        if "AdaRound" in recipe:
            simulation.set_and_freeze_param_encodings(str(Path(folder) / "rounded.encodings"))
    simulation.compute_encodings(calibrate)
    simulation.model.eval()
    return Network(simulation)


class Network:
    """The simulation, which answers."""

    def __init__(self, simulation: Any) -> None:
        self.simulation = simulation

    def __call__(self, images: Any) -> Any:
        return self.simulation.model(images)


def with_additions_as_modules(model: Any) -> Any:
    """AIMET places quantizers on modules: every ``+`` becomes one."""
    import torch
    from aimet_torch.nn.modules.custom import Add

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: Any, name: str) -> bool:
            return super().is_leaf_module(module, name) or type(module).__name__ == "PaddedShortcut"

    graph = Tracer().trace(model)
    traced = torch.fx.GraphModule(model, graph)
    for number, node in enumerate([node for node in graph.nodes if node.target is operator.add]):
        traced.add_submodule(f"add{number}", Add())
        with graph.inserting_after(node):
            addition = graph.call_module(f"add{number}", node.args)
        node.replace_all_uses_with(addition)
        graph.erase_node(node)
    traced.recompile()
    return traced.eval()


def place_and_set(model: Any, bits: Any) -> None:
    outer = bits.outer or bits.weights, bits.outer or bits.activations
    for name, module in model.named_modules():
        if not hasattr(module, "param_quantizers"):
            continue
        if name.endswith("conv2") or name == "linear":
            module.output_quantizers[0] = None
        for parameter, quantizer in module.param_quantizers.items():
            if quantizer is not None and parameter == "weight":
                quantizer.bitwidth = outer[0] if name in OUTER else bits.weights
        for quantizer in (*module.input_quantizers, *module.output_quantizers):
            if quantizer is not None:
                quantizer.bitwidth = outer[1] if name in READ_BY_OUTER else bits.activations


def export(network: Network, batches: list[Any], path: Path) -> None:
    import onnx

    network.simulation.onnx.export(batches[0][:1], str(path), export_int32_bias=False)
    onnx.save(onnx.load(str(path)), str(path))  # one file, where it wrote two
