"""``export``: write the int8 ONNX file, run it, and say what it gives and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from ptq.batches import Batch, Batches
from ptq.errors import InputError
from ptq.export.cpu import cpu_model, instruction_sets, u8s8_saturates
from ptq.export.deployment import DEFAULT_TARGET, Built, Deployment, facts, prepare
from ptq.export.graph import DEFAULT_OPSET
from ptq.export.qdq import S8S8, U8S7, U8S8, VARIANTS, Variant
from ptq.export.runtime import BATCH_SIZES, Agreement, OnnxModule, agreement, latencies
from ptq.quantization import Quantized
from ptq.storage import replacing

SCHEMA = 1
INT8, FLOAT, EAGER = "int8 ONNX", "float ONNX", "eager torch"
_TOLERANCE = 0.2  # points of accuracy that a faster way to store integers may cost
_EQUALLY_FAST = 1.03


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to store integers, measured."""

    variant: str
    bytes: int
    agreement: Agreement
    milliseconds: dict[int, float]  # by batch size; empty if the clock wasn't asked

    @property
    def cost(self) -> float:
        """The geometric mean over the batch sizes."""
        return prod(self.milliseconds.values()) ** (1 / max(1, len(self.milliseconds)))


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, and what running the file showed."""

    path: Path
    target: str
    opset: int
    variant: str
    bytes: int
    float_bytes: int
    agreement: Agreement  # of the file with its simulation
    milliseconds: dict[int, dict[str, float]]  # batch size → network → milliseconds
    candidates: tuple[Candidate, ...]
    layers: dict[str, list[str]]
    quantized_tensors: int
    cpu: dict[str, Any]
    findings: tuple[str, ...]
    simulation: nn.Module = field(repr=False)
    inputs: tuple[str, ...]
    output: int

    @property
    def top1(self) -> float | None:
        return self.agreement.top1

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "export",
            "schema": SCHEMA,
            "file": self.path.name,
            "target": self.target,
            "opset": self.opset,
            "variant": self.variant,
            "bytes": self.bytes,
            "float_bytes": self.float_bytes,
            "agreement": asdict(self.agreement),
            "milliseconds": {str(size): dict(times) for size, times in self.milliseconds.items()},
            "candidates": [asdict(candidate) for candidate in self.candidates],
            "layers": self.layers,
            "quantized_tensors": self.quantized_tensors,
            "cpu": self.cpu,
            "findings": list(self.findings),
        }


def export(
    quantized: Quantized,
    path: str | Path,
    example: Batch,
    *,
    batches: Batches | None = None,
    labelled_batches: Batches | None = None,
    target: str = DEFAULT_TARGET,
    variant: str | None = None,
    opset: int = DEFAULT_OPSET,
    pack_weights: bool = False,
    max_batches: int = 200,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    progress: bool = False,
) -> Exported:
    """Write the quantized network as an ONNX file that runs in integers, and measure the file.

    >>> export(quantized, "model.int8.onnx", example, batches=batches, labelled_batches=labelled_batches).top1
    91.72

    ``batches`` give the ranges of tensors that no layer reads (what is added, pooled …); ``labelled_batches`` are
    what accuracy and agreement with the simulation are measured on. Without a ``variant``, the ways to store
    integers that suit this CPU are all measured, and the fastest that gives the right answers is written. No
    ``batch_sizes``: no latencies. Either the file is written whole or nothing is.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise InputError(f"{path}: the name of an ONNX file ends in .onnx")
    deployment = prepare(
        quantized,
        example,
        batches,
        target=target,
        opset=opset,
        pack_weights=pack_weights,
        max_batches=max_batches,
        progress=progress,
    )
    saturates = u8s8_saturates()
    variants = _variants(deployment, variant, saturates=saturates)
    compared = labelled_batches if labelled_batches is not None else batches if batches is not None else [example]
    float_content = deployment.graph.proto.SerializeToString()
    with replacing(path) as partial:
        built: dict[str, Built] = {}
        networks: dict[str, nn.Module] = {}
        agreements: dict[str, Agreement] = {}
        for candidate in variants:
            built[candidate.name] = deployment.build(candidate)
            partial.write_bytes(built[candidate.name].content)
            networks[candidate.name] = OnnxModule(partial, output=deployment.graph.output)
            simulated = built[candidate.name].simulation
            agreements[candidate.name] = agreement(
                networks[candidate.name], simulated, compared, progress=candidate.name if progress else None
            )
        others = {FLOAT: OnnxModule(float_content, output=deployment.graph.output), EAGER: deployment.model}
        times = latencies({**networks, **others}, deployment.example, batch_sizes) if batch_sizes else {}
        candidates = tuple(
            Candidate(
                variant=name,
                bytes=len(built[name].content),
                agreement=agreements[name],
                milliseconds={size: by_network[name] for size, by_network in times.items()},
            )
            for name in built
        )
        chosen = choose(candidates)
        partial.write_bytes(built[chosen.variant].content)
    milliseconds = {
        size: {INT8: by_network[chosen.variant], FLOAT: by_network[FLOAT], EAGER: by_network[EAGER]}
        for size, by_network in times.items()
    }
    return Exported(
        path=path,
        target=target,
        opset=opset,
        variant=chosen.variant,
        bytes=chosen.bytes,
        float_bytes=len(float_content),
        agreement=chosen.agreement,
        milliseconds=milliseconds,
        candidates=candidates,
        layers=facts(deployment),
        quantized_tensors=len(built[chosen.variant].grids),
        cpu={"model": cpu_model(), "instruction_sets": list(instruction_sets()), "u8s8_saturates": saturates},
        findings=(*deployment.notes, *findings(chosen, candidates, milliseconds, saturates=saturates)),
        simulation=built[chosen.variant].simulation,
        inputs=deployment.graph.inputs,
        output=deployment.graph.output,
    )


def _variants(deployment: Deployment, wanted: str | None, *, saturates: bool) -> tuple[Variant, ...]:
    if deployment.rules.symmetric:
        if wanted not in (None, S8S8.name):
            raise InputError(f"variant {wanted!r}: this target takes {S8S8.name} only")
        return (S8S8,)
    if wanted is not None:
        if wanted not in VARIANTS:
            raise InputError(f"variant {wanted!r} is unknown: choose one of {', '.join(VARIANTS)}")
        return (VARIANTS[wanted],)
    if not deployment.integer_layers:
        return (U8S8,)
    return (U8S8, U8S7, S8S8) if saturates else (U8S8, S8S8)


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest of those that do what the simulation promised and are within 0.2 points of the best.

    If none keeps the promise, the most accurate. Of equally fast ones (within 3 %) the first.
    """
    faithful = [candidate for candidate in candidates if candidate.agreement.holds]
    if not faithful:
        return max(candidates, key=lambda c: (c.agreement.top1 or 0.0, c.agreement.same_top1))
    best = max(candidate.agreement.top1 or 0.0 for candidate in faithful)
    accurate = [candidate for candidate in faithful if best - (candidate.agreement.top1 or 0.0) <= _TOLERANCE]
    fastest = min(candidate.cost for candidate in accurate)
    return next(candidate for candidate in accurate if candidate.cost <= _EQUALLY_FAST * fastest)


def findings(
    chosen: Candidate,
    candidates: Sequence[Candidate],
    milliseconds: Mapping[int, Mapping[str, float]],
    *,
    saturates: bool,
) -> list[str]:
    """What a user should know before shipping the file."""
    found = []
    if saturates:
        found.append("products of uint8 and int8 saturate in 16 bits on this CPU (no VNNI)")
    for candidate in candidates:
        if not candidate.agreement.holds:
            measured = candidate.agreement
            accuracy = "" if measured.top1 is None else f", top-1 {measured.top1:.2f} and {measured.reference_top1:.2f}"
            found.append(f"{candidate.variant}: file and simulation agree on {measured.same_top1:.2f} % only{accuracy}")
    if len(candidates) > 1:
        found.append(f"{chosen.variant} chosen out of {', '.join(candidate.variant for candidate in candidates)}")
    for size, times in milliseconds.items():
        ratio = times[INT8] / times[FLOAT]
        if ratio > 1:
            found.append(f"int8 is slower than float ONNX at batch {size}: {ratio:.2f} of its time")
    return found
