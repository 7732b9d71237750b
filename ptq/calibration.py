"""One pass over the data: per-channel ranges, histograms and a sample of what every Conv and Linear reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ptq import channels, distributed
from ptq.attention import splitting_attention
from ptq.batches import Batches, Call, calls, device_of
from ptq.errors import ActivationError, InputError, MismatchError
from ptq.graph import ChannelGraph, read_graph
from ptq.hooks import attached, evaluating
from ptq.observers import ChannelRange, Histogram
from ptq.ranges import HISTOGRAM_RANGES, checked_observer
from ptq.rectified import RectifiedInputs
from ptq.sampling import RowSample, SampleReservoir
from ptq.storage import checksum, fingerprint, read_tensors, write_tensors

SCHEMA = 2
_STATISTICS = ("minimum", "maximum", "activation_absmax", "weight_absmax")
_CLIPS = ("activation_clip", "weight_clip")
_SAMPLED = 2**23  # elements of rows kept for the whole model: 16 MB


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """What one layer saw. All per-channel tensors are ``[C]``, float32, by *input* channel."""

    kind: str
    minimum: Tensor
    maximum: Tensor
    activation_absmax: Tensor
    weight_absmax: Tensor
    histogram: Histogram | None = None  # of the whole input tensor
    rows: Tensor | None = None  # [R, C, k] float16: a random sample of what the weight is multiplied with
    activation_clip: float = 1.0  # of the range, as a search chose it
    weight_clip: float = 1.0

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
        if observer == "max" or self.activation_clip != 1:
            return low * self.activation_clip, high * self.activation_clip
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
    graph: ChannelGraph = field(default_factory=ChannelGraph)

    @property
    def batchnorms(self) -> dict[str, str]:
        """Layer → the BatchNorm that alone reads its output."""
        return self.graph.batchnorms

    def save(self, path: str | Path) -> None:
        tensors: dict[str, Tensor] = {}
        described: dict[str, Any] = {}
        for name, layer in self.layers.items():
            tensors |= {f"{name}/{statistic}": getattr(layer, statistic) for statistic in _STATISTICS}
            described[name] = {"kind": layer.kind} | {clip: getattr(layer, clip) for clip in _CLIPS}
            if layer.rows is not None:
                tensors[f"{name}/rows"] = layer.rows
            if layer.histogram is not None:
                tensors[f"{name}/histogram"] = layer.histogram.counts
                described[name]["exponent"] = layer.histogram.exponent
        graph_tensors, graph = self.graph.to_tensors()
        metadata = {
            "schema": SCHEMA,
            "layers": list(described.items()),  # a list: the order of the layers is the order of execution
            "observer": self.observer,
            "batches": self.batches,
            "samples": self.samples,
            "model": self.model_fingerprint,
            "data": self.data_fingerprint,
            "never_ran": self.never_ran,
            "graph": graph,
        }
        write_tensors(Path(path), "calibration", tensors | graph_tensors, metadata)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        tensors, metadata = read_tensors(Path(path), "calibration", SCHEMA)
        try:
            layers = {}
            for name, described in metadata["layers"]:
                histogram = None
                if "exponent" in described:
                    histogram = Histogram(described["exponent"], tensors[f"{name}/histogram"])
                statistics: dict[str, Any] = {key: tensors[f"{name}/{key}"] for key in _STATISTICS}
                statistics |= {clip: described[clip] for clip in _CLIPS}
                layers[name] = LayerStatistics(
                    kind=described["kind"],
                    histogram=histogram,
                    rows=tensors.get(f"{name}/rows"),
                    **statistics,
                )
            return cls(
                layers=layers,
                observer=checked_observer(metadata["observer"]),
                batches=metadata["batches"],
                samples=metadata["samples"],
                model_fingerprint=metadata["model"],
                data_fingerprint=metadata["data"],
                never_ran=tuple(metadata["never_ran"]),
                graph=ChannelGraph.from_tensors(tensors, metadata["graph"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: the calibration is incomplete ({error}): calibrate again") from error

    def check(self, model: nn.Module) -> None:
        """Refuse a model that these statistics were not taken from, naming the first difference."""
        with splitting_attention(model):
            self._check(model)

    def _check(self, model: nn.Module) -> None:
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
    collect a histogram of each layer's input. Padding, where a batch has an ``attention_mask``, doesn't count.
    """
    return calibrate_in_steps(model, batches, [max_batches], observer, progress=progress)[-1]


def calibrate_in_steps(
    model: nn.Module, batches: Batches, steps: Sequence[int], observer: str = "max", *, progress: bool = False
) -> list[Calibration]:
    """One pass over the data that gives the calibration after each of these numbers of batches, or at its end."""
    checked_observer(observer)
    if not steps or min(steps) < 1:
        raise InputError(f"{', '.join(map(str, steps)) or 'no'} batches: at least one batch is needed")
    most = max(steps)
    total = min(most, len(batches)) if isinstance(batches, Sized) else None
    found = []
    with evaluating(model), splitting_attention(model):
        statistics = _Pass(model, observer)
        with statistics.collecting():
            for call in tqdm(calls(batches, model, most), "calibrate", total, unit="batch", disable=not progress):
                if total and len(steps) == 1 and not statistics.batches:
                    statistics.expect((total - 1) * call.samples)  # the last batch may be smaller
                statistics.collect(call) if distributed.is_mine(statistics.batches) else statistics.skip(call)
                if statistics.batches in steps:
                    found.append(statistics.result())
        if statistics.batches not in steps:  # the data ended before
            found.append(statistics.result())
    return found


class _Pass:
    """The statistics of a pass over the data so far."""

    def __init__(self, model: nn.Module, observer: str) -> None:
        layers = dict(channels.layers_of(model))
        if not layers:
            raise InputError("the model has no Conv or Linear layer: there is nothing to calibrate")
        for name, layer in layers.items():
            if not bool(channels.weight_absmax(layer.weight, layer).isfinite().all()):
                raise InputError(f"{name}: NaN or Inf in the weight: the checkpoint is broken, give another one")
        self._model, self._observer = model, observer
        self._batch = _Batch(RectifiedInputs(model))
        budget = _SAMPLED // len(layers)
        with_histogram = observer in HISTOGRAM_RANGES
        # All ranges in one tensor: one look at it finds what isn't finite.
        counts = [channels.input_channels(layer) for layer in layers.values()]
        self._ranges = ChannelRange(sum(counts), device_of(model))
        self._collectors = {
            name: _Collector(name, layer, ranges, Histogram() if with_histogram else None, RowSample(layer, budget))
            for (name, layer), ranges in zip(layers.items(), self._ranges.split(counts), strict=True)
        }
        self._order: dict[str, _Collector] = {}
        self._reservoir = SampleReservoir()
        self._graph: ChannelGraph | None = None
        self._last: Call | None = None
        self._data_sum = self.batches = self._samples = 0

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Hooks are on the model inside."""
        hooks = (
            collector.layer.register_forward_pre_hook(collector.hook(self._batch, self._order), with_kwargs=True)
            for collector in self._collectors.values()
        )
        with attached(chain(self._batch.rectified.hooks(), hooks)):
            yield

    def expect(self, samples: int) -> None:
        """So many samples will come, if all batches but the last are of one size."""
        self._reservoir.expect(samples)

    @torch.inference_mode()
    def collect(self, call: Call) -> None:
        """Run the model on one more batch."""
        self._last = call
        mask = call.kwargs.get("attention_mask")
        self._batch.samples = call.samples
        self._batch.mask = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self._batch.picks = self._reservoir.pick(self._samples, call.samples)
        with self._batch.running():
            call.run(self._model)
        if not self._ranges.finite:
            self._refuse()
        self._data_sum += sum(checksum(x) for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor))
        self.skip(call)

    def skip(self, call: Call) -> None:
        """Leave a batch to another process."""
        self.batches += 1
        self._samples += call.samples

    def _refuse(self) -> None:
        """Name the first layer that read something that isn't a number: those behind it only got it from there."""
        for name, collector in self._order.items():
            bad = (~collector.range.is_finite).nonzero().flatten()
            if len(bad):
                channel = int(bad[0])
                kind = "NaN" if bool(collector.range.maximum[channel].isnan()) else "Inf"
                raise ActivationError(
                    f"{name}: {kind} in the input, batch {self.batches}, channel {channel} ({len(bad)} channels in "
                    "all): check the data of that batch and the weights of the layers before"
                )

    def result(self) -> Calibration:
        shares = distributed.exchanged(self._share())
        ran = dict.fromkeys(name for share in shares for name in share.layers)
        if not ran:
            reason = "the data has no batch" if not self.batches else "none of its Conv and Linear layers was called"
            raise InputError(f"nothing was calibrated: {reason}")
        kept = self._reservoir.kept(index for share in shares for index in share.samples)
        data_sum = sum(share.data_sum for share in shares)
        return Calibration(
            layers={name: self._collectors[name].compute(_merged(name, shares, kept)) for name in ran},
            observer=self._observer,
            batches=self.batches,
            samples=self._samples,
            model_fingerprint=fingerprint(self._model),
            data_fingerprint=f"{self._samples}:{data_sum % 2**64:016x}",
            never_ran=tuple(name for name in self._collectors if name not in ran),
            graph=next(share.graph for share in shares if share.graph is not None),
        )

    def _share(self) -> _Share:
        if self._last is not None:
            # Last of all: what it allocates would cut up the memory that the batches reuse.
            self._graph = self._graph or read_graph(self._model, self._last)
        held = self._reservoir.held()
        return _Share(
            layers={name: collector.collected(list(held.values())) for name, collector in self._order.items()},
            samples=list(held),
            data_sum=self._data_sum,
            graph=self._graph,
        )


@dataclass(frozen=True)
class _Collected:
    """What one process saw of one layer's input."""

    minimum: Tensor  # [C]
    maximum: Tensor  # [C]
    histogram: Histogram | None
    rows: Tensor  # [R, C, k]
    rows_by_sample: list[int]


@dataclass(frozen=True)
class _Share:
    """What one process found in its share of the batches."""

    layers: dict[str, _Collected]
    samples: list[int]  # indices in the stream of those whose rows are kept, ascending
    data_sum: int
    graph: ChannelGraph | None


def _merged(name: str, shares: Sequence[_Share], kept: set[int]) -> _Collected:
    """What one process would have collected of a layer over all shares; ``kept`` are the samples with rows."""
    found = [(share.samples, share.layers[name]) for share in shares if name in share.layers]
    if len(shares) == 1:
        return found[0][1]
    histogram = found[0][1].histogram
    for _, other in found[1:]:
        if histogram is not None and other.histogram is not None:
            histogram.merge(other.histogram)
    rows: dict[int, Tensor] = {}
    for samples, part in found:
        rows.update(zip(samples, torch.split(part.rows, part.rows_by_sample), strict=True))
    rows = {index: rows[index] for index in sorted(kept & rows.keys())}
    return _Collected(
        minimum=torch.stack([part.minimum for _, part in found]).amin(0),
        maximum=torch.stack([part.maximum for _, part in found]).amax(0),
        histogram=histogram,
        rows=torch.cat(list(rows.values())),
        rows_by_sample=list(map(len, rows.values())),
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
class _Batch:
    """What the collectors have to know about the batch that is running."""

    rectified: RectifiedInputs
    is_running: bool = False
    samples: int = 0
    mask: Tensor | None = None  # [N, T], true where there is no padding
    picks: list[tuple[int, int]] = field(default_factory=list)  # samples whose rows are kept

    @contextmanager
    def running(self) -> Iterator[None]:
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False


@dataclass
class _Collector:
    """Collects the statistics of one layer's input."""

    name: str
    layer: channels.Layer
    range: ChannelRange
    histogram: Histogram | None
    sample: RowSample

    def hook(self, batch: _Batch, order: dict[str, _Collector]) -> Callable[..., None]:
        axis = channels.channel_axis(self.layer)

        def collect(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else kwargs["input"]
            if not batch.is_running or not x.numel():
                return
            order.setdefault(self.name, self)
            if batch.picks:
                self.sample.store(x, batch.picks, axis, mask=batch.mask, samples=batch.samples)
            if batch.mask is not None and axis == -1 and x.dim() == 3 and x.shape[:2] == batch.mask.shape:
                x = x[batch.mask]  # [tokens, C]
            minimum, maximum = self.range.collect(x, axis, rectified=layer in batch.rectified)
            if self.histogram is not None:
                low, high = float(minimum.min()), float(maximum.max())
                if math.isfinite(low) and math.isfinite(high):  # the end of the batch refuses the others
                    self.histogram.collect(_rows_to_count(x) if axis == -3 else x, low, high)

        return collect

    def collected(self, places: Sequence[int]) -> _Collected:
        """What there is so far; ``places`` of the sample hold rows."""
        histogram = self.histogram
        return _Collected(
            minimum=self.range.minimum.cpu().clone(),
            maximum=self.range.maximum.cpu().clone(),
            histogram=replace(histogram, counts=histogram.counts.clone()) if histogram else None,
            rows=self.sample.rows(places),
            rows_by_sample=[self.sample.count(place) for place in places],
        )

    def compute(self, collected: _Collected) -> LayerStatistics:
        return LayerStatistics(
            kind=channels.kind_of(self.layer),
            minimum=collected.minimum,
            maximum=collected.maximum,
            activation_absmax=channels.absmax_of(collected.minimum, collected.maximum),
            weight_absmax=channels.weight_absmax(self.layer.weight, self.layer).float().cpu(),
            histogram=collected.histogram,
            rows=collected.rows,
        )
