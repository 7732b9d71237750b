"""One layer, looked at while a batch runs: what goes in, what the quantizers leave of it, and what comes out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from ptq import channels
from ptq.analysis.grafting import Graft, Part, grafting
from ptq.analysis.outliers import OUTLIER
from ptq.batches import Batch, as_call, device_of
from ptq.errors import InputError
from ptq.evaluation.layers import Distance, DistanceSums

_LISTED = 8


@dataclass(frozen=True, kw_only=True)
class TensorStatistics:
    """What there is to say about a tensor."""

    name: str
    shape: tuple[int, ...]
    minimum: float
    maximum: float
    mean: float
    std: float
    zeros: float  # share of the elements
    distance: Distance | None = None  # to the float tensor

    @classmethod
    def of(cls, name: str, x: Tensor, reference: Tensor | None = None) -> TensorStatistics:
        sums = DistanceSums()
        if reference is not None:
            sums.add(reference, x)
        return cls(
            name=name,
            shape=tuple(x.shape),
            minimum=float(x.min()),
            maximum=float(x.max()),
            mean=float(x.mean()),
            std=float(x.std(correction=0)),
            zeros=float((x == 0).float().mean()),
            distance=sums.distance() if reference is not None else None,
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "distance": self.distance.to_json() if self.distance else None}


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A layer during one batch; the quantized tensors are in the float network's scale."""

    layer: str
    kind: str
    bits: str
    samples: int
    tensors: list[TensorStatistics]
    outlier_channels: dict[int, float]  # of the input, the largest ones: max |x|, above twice that of the median

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "tensors": [tensor.to_json() for tensor in self.tensors]}


def watch(model: nn.Module, quantized: nn.Module, layer: str, batch: Batch) -> Watched:
    """Run one batch through the float and the quantized network, and look at the first call of a layer in each."""
    call = as_call(batch, device_of(model))
    with grafting(model, quantized) as network:
        if layer not in network.grafts:
            names = list(network.grafts)
            raise InputError(f"layer {layer!r}: the model has none of that name, but {', '.join(names[:6])} …")
        seen: list[tuple[Tensor, Tensor]] = []

        def keep(graft: Graft, x: Tensor, output: Tensor) -> None:
            if graft.name == layer:
                seen.append((x.clone(), output.clone()))  # before what follows writes into them

        network.run(call, watch=keep)
        if not seen:
            raise InputError(f"layer {layer!r}: doesn't run on this batch: watch another one")
        x, output = seen[0]
        graft = network.grafts[layer]
        alone: dict[str, Part] = {
            "output, both quantized": "both",
            "output, weights quantized": "weights",
            "output, input quantized": "activations",
        }
        tensors = [
            TensorStatistics.of("input", x),
            TensorStatistics.of("input, quantized", graft.rounded(x), x),
            TensorStatistics.of("weight", graft.quantized.weight),
            TensorStatistics.of("output", output),
            *(TensorStatistics.of(name, graft.output(x, part), output) for name, part in alone.items()),
        ]
        seen.clear()
        network.run(call, network.whole(), watch=keep)
        tensors.append(TensorStatistics.of("output, whole network quantized", seen[0][1], output))
    return Watched(
        layer=layer,
        kind=channels.kind_of(graft.quantized),
        bits=str(getattr(graft.quantized, "quantized_to", "float")),
        samples=call.samples,
        tensors=tensors,
        outlier_channels=_outlier_channels(x, graft.quantized),
    )


def _outlier_channels(x: Tensor, layer: channels.Layer) -> dict[int, float]:
    magnitudes = channels.absmax_of(*channels.activation_range(x, channels.channel_axis(layer)))  # [C]
    alive = magnitudes[magnitudes > 0]
    median = float(alive.median()) if len(alive) else 0.0
    values, indices = magnitudes.topk(min(_LISTED, len(magnitudes)))
    found = zip(indices.tolist(), values.tolist(), strict=True)
    return {index: value for index, value in found if value > OUTLIER * median}
