"""Running ONNX files: as a module among modules, against another network, and against the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ptq.batches import Batches, Call, as_call
from ptq.errors import InputError
from ptq.export.packages import required
from ptq.hooks import one_thread

BATCH_SIZES = (1, 16)
_ROUNDS = 21
_LEAST_SECONDS = 0.004  # of one measurement: far above what reading the clock costs


class OnnxModule(nn.Module):
    """An ONNX file as a module on the CPU, run by onnxruntime; it takes what the exported model took.

    >>> evaluate(OnnxModule("model.int8.onnx"), labelled_batches).top1
    """

    def __init__(self, source: str | Path | bytes, *, threads: int = 1, output: int = 0) -> None:
        super().__init__()
        required("onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        content = source if isinstance(source, bytes) else str(source)
        try:
            self.session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions have no common base of their own
            name = "the graph" if isinstance(source, bytes) else source
            raise InputError(f"{name}: onnxruntime can't load it: {str(error).splitlines()[0]}") from error
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.output = output

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The output that holds the logits."""
        positional = (name for name in self.inputs if name not in kwargs)
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        feed = {name: given[name].detach().cpu().numpy() for name in self.inputs}
        return torch.from_numpy(self.session.run(None, feed)[self.output])


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Two networks on the same samples: how often their answers are equal, and how far their logits are apart."""

    samples: int
    same_top1: float  # percent
    largest_difference: float  # of a logit
    largest_logit: float  # of the reference, in size: what the difference is to be compared with
    top1: float | None  # percent of the network that was asked about; None without labels
    reference_top1: float | None

    @property
    def holds(self) -> bool:
        """At least 99.5 % equal answers, and accuracies within 0.2 points."""
        accuracies = 0.0 if self.top1 is None or self.reference_top1 is None else self.top1 - self.reference_top1
        return self.same_top1 >= 99.5 and abs(accuracies) <= 0.2


def agreement(network: nn.Module, reference: nn.Module, batches: Batches, *, progress: str | None = None) -> Agreement:
    """Run both over the batches; ``progress`` is the title of a progress bar, if one is wanted."""
    samples = same = hits = reference_hits = 0
    difference = largest = 0.0
    labelled = True
    total = len(batches) if isinstance(batches, Sized) else None
    with torch.inference_mode():
        for batch in tqdm(batches, progress, total, unit="batch", disable=progress is None, leave=False):
            call = as_call(batch, torch.device("cpu"))
            ours, theirs = (call.logits(model).reshape(call.samples, -1) for model in (network, reference))
            answers, reference_answers = ours.argmax(1), theirs.argmax(1)
            samples += len(ours)
            same += int((answers == reference_answers).sum())
            difference = max(difference, float((ours - theirs).abs().max()))
            largest = max(largest, float(theirs.abs().max()))
            labelled = labelled and call.labels is not None
            if call.labels is not None:
                hits += int((answers == call.labels.cpu()).sum())
                reference_hits += int((reference_answers == call.labels.cpu()).sum())
    if not samples:
        raise InputError("there is no batch to compare the exported file on: give at least one")
    return Agreement(
        samples=samples,
        same_top1=100 * same / samples,
        largest_difference=difference,
        largest_logit=largest,
        top1=100 * hits / samples if labelled else None,
        reference_top1=100 * reference_hits / samples if labelled else None,
    )


def latencies(
    networks: Mapping[str, nn.Module],
    example: Call,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    *,
    rounds: int = _ROUNDS,
) -> dict[int, dict[str, float]]:
    """Milliseconds a call of each network at each batch size: one thread, medians of interleaved rounds."""
    with one_thread(), torch.inference_mode():
        return {size: _interleaved(networks, _resized(example, size), rounds) for size in batch_sizes}


def _interleaved(networks: Mapping[str, nn.Module], call: Call, rounds: int) -> dict[str, float]:
    runs: dict[str, Callable[[], Any]] = {name: partial(call.run, network) for name, network in networks.items()}
    repeats = {}
    for name, run in runs.items():
        run()  # the first call plans and allocates
        repeats[name] = max(1, round(_LEAST_SECONDS / max(_seconds(run, 1), 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(_seconds(run, repeats[name]))
    return {name: 1000 * statistics.median(seconds) for name, seconds in times.items()}


def _seconds(run: Callable[[], Any], repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - started) / repeats


def _resized(example: Call, size: int) -> Call:
    """The example's first samples, over and over until there are enough."""

    def resized(value: Tensor) -> Tensor:
        return value[torch.arange(size) % len(value)] if value.dim() else value

    return example.mapped(resized)
