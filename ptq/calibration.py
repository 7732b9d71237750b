"""One pass over the data: per-channel ranges and histograms of what every Conv and Linear reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sized
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ptq import channels
from ptq.batches import Batches, calls
from ptq.errors import ActivationError, InputError, MismatchError
from ptq.graph import BatchNormSearch
from ptq.hooks import attached, evaluating
from ptq.observers import ChannelRange, Histogram
from ptq.ranges import HISTOGRAM_RANGES, checked_observer
from ptq.storage import checksum, fingerprint, read_tensors, write_tensors

SCHEMA = 1
_STATISTICS = ("minimum", "maximum", "activation_absmax", "weight_absmax")


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """What one layer saw. All per-channel tensors are ``[C]``, float32, by *input* channel."""

    kind: str
    minimum: Tensor
    maximum: Tensor
    activation_absmax: Tensor
    weight_absmax: Tensor
    histogram: Histogram | None = None  # of the whole input tensor

    @property
    def channels(self) -> int:
        return len(self.activation_absmax)

    @property
    def outlier_ratio(self) -> float:
        """Largest channel over the median channel: how much range the outliers cost all others."""
        median = float(self.activation_absmax.median())
        return float(self.activation_absmax.max()) / median if median > 0 else float("inf")

    def range(self, observer: str, bits: int) -> tuple[float, float]:
        """The clipping range that the observer chooses for the input tensor at this number of bits."""
        low, high = min(0.0, float(self.minimum.min())), max(0.0, float(self.maximum.max()))
        if observer == "max":
            return low, high
        if self.histogram is None:
            raise InputError(
                f"observer {observer!r} needs histograms, this calibration has none: calibrate this very model "
                f"(smoothed, if it is) with observer={observer!r}, or use observer='max'"
            )
        return HISTOGRAM_RANGES[observer](self.histogram, low, high, bits)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The statistics of every layer that ran, and what they were taken from."""

    layers: dict[str, LayerStatistics]
    observer: str
    batches: int
    samples: int
    model_fingerprint: str
    data_fingerprint: str
    never_ran: tuple[str, ...] = ()
    batchnorms: dict[str, str] = field(default_factory=dict)  # layer → the BatchNorm that alone reads its output

    def save(self, path: str | Path) -> None:
        tensors: dict[str, Tensor] = {}
        described: dict[str, Any] = {}
        for name, layer in self.layers.items():
            tensors |= {f"{name}/{statistic}": getattr(layer, statistic) for statistic in _STATISTICS}
            described[name] = {"kind": layer.kind}
            if layer.histogram is not None:
                tensors[f"{name}/histogram"] = layer.histogram.counts
                described[name]["exponent"] = layer.histogram.exponent
        metadata = {
            "schema": SCHEMA,
            "layers": list(described.items()),  # a list: the order of the layers is the order of execution
            "observer": self.observer,
            "batches": self.batches,
            "samples": self.samples,
            "model": self.model_fingerprint,
            "data": self.data_fingerprint,
            "never_ran": self.never_ran,
            "batchnorms": self.batchnorms,
        }
        write_tensors(Path(path), "calibration", tensors, metadata)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        tensors, metadata = read_tensors(Path(path), "calibration", SCHEMA)
        try:
            layers = {}
            for name, described in metadata["layers"]:
                histogram = None
                if "exponent" in described:
                    histogram = Histogram(described["exponent"], tensors[f"{name}/histogram"])
                statistics = {statistic: tensors[f"{name}/{statistic}"] for statistic in _STATISTICS}
                layers[name] = LayerStatistics(kind=described["kind"], histogram=histogram, **statistics)
            return cls(
                layers=layers,
                observer=checked_observer(metadata["observer"]),
                batches=metadata["batches"],
                samples=metadata["samples"],
                model_fingerprint=metadata["model"],
                data_fingerprint=metadata["data"],
                never_ran=tuple(metadata["never_ran"]),
                batchnorms=dict(metadata["batchnorms"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: the calibration is incomplete ({error}): calibrate again") from error

    def check(self, model: nn.Module) -> None:
        """Refuse a model that these statistics were not taken from, naming the first difference."""
        present = dict(channels.layers_of(model))
        for name, statistics in self.layers.items():
            if name not in present:
                raise MismatchError(f"{name}: calibrated, but the model has no such layer: calibrate this model")
            expected = channels.input_channels(present[name])
            if statistics.channels != expected:
                raise MismatchError(
                    f"{name}: the calibration has {statistics.channels} channels, the layer reads {expected}: "
                    "recalibrate with this model"
                )
        if self.model_fingerprint != fingerprint(model):
            raise MismatchError("the calibration was taken from a model with other weights: recalibrate with these")


def calibrate(
    model: nn.Module,
    batches: Batches,
    observer: str = "max",
    max_batches: int = 200,
    *,
    progress: bool = False,
) -> Calibration:
    """Stream up to ``max_batches`` batches through the model and return what its layers read.

    >>> calibration = calibrate(model, batches)
    >>> calibration.layers["features.0"].activation_absmax    # [C]

    ``observer`` says how ranges will be chosen: ``max``, or ``percentile``, ``entropy``, ``mse``, which also
    collect a histogram of each layer's input.
    """
    checked_observer(observer)
    if max_batches < 1:
        raise InputError(f"max_batches = {max_batches}: at least one batch is needed")
    collectors = {
        name: _Collector(name, layer, Histogram() if observer in HISTOGRAM_RANGES else None)
        for name, layer in channels.layers_of(model)
    }
    if not collectors:
        raise InputError("the model has no Conv or Linear layer: there is nothing to calibrate")
    search: BatchNormSearch | None = BatchNormSearch(model)
    order: dict[str, _Collector] = {}
    batchnorms: dict[str, str] = {}
    data_sum = batch_count = samples = 0
    hooks = (
        collector.layer.register_forward_pre_hook(collector.hook(order), with_kwargs=True)
        for collector in collectors.values()
    )
    total = min(max_batches, len(batches)) if isinstance(batches, Sized) else None
    with torch.inference_mode(), evaluating(model), attached(hooks):
        bar = tqdm(calls(batches, model, max_batches), "calibrate", total, unit="batch", disable=not progress)
        for index, call in enumerate(bar):
            for collector in collectors.values():
                collector.batch = index
            with search.watching() if search else nullcontext():
                output = call.run(model)
            if search:
                batchnorms, search = search.result(output), None
            data_sum += sum(checksum(x) for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor))
            batch_count += 1
            samples += call.samples
    if not order:
        reason = "the data has no batch" if not batch_count else "none of its Conv and Linear layers was called"
        raise InputError(f"nothing was calibrated: {reason}")
    return Calibration(
        layers={name: collector.compute() for name, collector in order.items()},
        observer=observer,
        batches=batch_count,
        samples=samples,
        model_fingerprint=fingerprint(model),
        data_fingerprint=f"{samples}:{data_sum % 2**64:016x}",
        never_ran=tuple(name for name in collectors if name not in order),
        batchnorms=batchnorms,
    )


_ROWS_TO_COUNT = 6


def _rows_to_count(x: Tensor) -> Tensor:
    """The rows of feature maps (..., H, W) that a histogram counts: at most six, evenly spread.

    Counting an element costs five times as much as finding the range, and neighbouring rows tell the same. Which
    rows are taken depends on the shape alone, so batches and processes still merge to the same counts; ranges see
    every element.
    """
    step = math.ceil(x.shape[-2] / _ROWS_TO_COUNT)
    return x[..., step // 2 :: step, :]


@dataclass
class _Collector:
    """Collects the statistics of one layer's input."""

    name: str
    layer: channels.Layer
    histogram: Histogram | None
    batch: int = 0

    def __post_init__(self) -> None:
        self.range = ChannelRange(channels.input_channels(self.layer), self.layer.weight.device)

    def hook(self, order: dict[str, _Collector]) -> Callable[..., None]:
        axis = channels.channel_axis(self.layer)

        def collect(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Tensor = (args[0] if args else kwargs["input"]).detach()
            if not x.numel():
                return
            order.setdefault(self.name, self)
            with torch._C.DisableTorchFunction():  # whoever watches the model need not see the watchers
                minimum, maximum = self.range.collect(x, axis)
                low, high = float(minimum.min()), float(maximum.max())
                if not (abs(low) < float("inf") and abs(high) < float("inf")):  # false for NaN too
                    self._refuse(minimum, maximum)
                if self.histogram is not None:
                    self.histogram.collect(_rows_to_count(x) if axis == -3 else x, low, high)

        return collect

    def _refuse(self, minimum: Tensor, maximum: Tensor) -> None:
        bad = (~(minimum.isfinite() & maximum.isfinite())).nonzero().flatten()
        channel = int(bad[0])
        kind = "NaN" if bool(minimum[channel].isnan()) else "Inf"
        raise ActivationError(
            f"{self.name}: {kind} in the input, batch {self.batch}, channel {channel} ({len(bad)} channels in all): "
            "check the data of that batch and the weights of the layers before"
        )

    def compute(self) -> LayerStatistics:
        minimum, maximum = self.range.minimum.cpu(), self.range.maximum.cpu()
        return LayerStatistics(
            kind=channels.kind_of(self.layer),
            minimum=minimum,
            maximum=maximum,
            activation_absmax=channels.absmax_of(minimum, maximum),
            weight_absmax=channels.weight_absmax(self.layer.weight, self.layer).float().cpu(),
            histogram=self.histogram,
        )
