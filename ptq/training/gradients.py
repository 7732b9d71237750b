"""Gradients quantized between replicas: a communication hook for DistributedDataParallel.

Each rank flattens its gradient, quantizes it stochastically in buckets, and packs it; the packed gradients of all
ranks are gathered, decoded and averaged in the same order everywhere, so that replicas stay the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ptq.errors import InputError
from ptq.formats import Format, Packed
from ptq.formats import format as read_format
from ptq.formats.learning import exponential
from ptq.formats.levels import LEARNED, Levels
from ptq.training.recipe import generator_for
from ptq.training.record import Recorder

SAMPLED_BUCKETS = 64  # of each rank, for learning levels
HALVES = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
POWER_SGD = "powersgd"


@dataclass(frozen=True, kw_only=True)
class Updates:
    """When levels are learned: in the first step, before which nothing is known, at some steps, and at every n-th."""

    at: tuple[int, ...] = (100, 2000)
    every: int = 10_000

    def __post_init__(self) -> None:
        if self.every < 1 or any(step < 0 for step in self.at):
            raise InputError(f"level updates at {self.at} and every {self.every} steps: give steps from 0 and 1 up")

    @classmethod
    def parse(cls, text: str) -> Updates:
        """``"100,2000,10000"``: at steps 100 and 2,000, and at every 10,000th."""
        try:
            *at, every = (int(part) for part in text.split(","))
        except ValueError as error:
            raise InputError(f"level updates {text!r}: write steps and, last, a period, as 100,2000,10000") from error
        return cls(at=tuple(at), every=every)

    def due(self, step: int) -> bool:
        return step in self.at or (step > 0 and step % self.every == 0)


@dataclass(frozen=True, kw_only=True)
class GradientCompression:
    """How gradients travel: a text of ``ptq.format``, ``fp16``, ``bf16``, ``powersgd:rank=2``, or None for floats.

    All but PowerSGD go on from a checkpoint to the same bits; its approximation, which PyTorch's hook keeps to itself,
    begins anew.
    """

    form: str | None = None
    error_feedback: bool = False  # what quantization took away is added to the next gradient
    normalised: bool = False  # learned levels: every bucket counts the same, whatever its norm (ALQ-N, AMQ-N)
    updates: Updates = Updates()
    record_every: int | None = None  # steps

    def __post_init__(self) -> None:
        if self.form is not None and not self.is_built_in:
            read_format(self.form)
        elif self.error_feedback and not self.is_power_sgd:
            raise InputError(f"error feedback doesn't go with {self.form or 'plain'} gradients: give a number format")
        if self.is_power_sgd:
            self.power_sgd_rank()
        if self.normalised and (self.form is None or self.is_built_in or not is_learned(read_format(self.form))):
            raise InputError(f"--normalised doesn't go with {self.form or 'plain'} gradients: give alq, alqg or amq")

    @property
    def is_power_sgd(self) -> bool:
        return self.form is not None and self.form.partition(":")[0] == POWER_SGD

    @property
    def is_built_in(self) -> bool:
        """Whether PyTorch has the hook."""
        return self.form in HALVES or self.is_power_sgd

    def power_sgd_rank(self) -> int:
        option = (self.form or "").partition(":")[2] or "rank=1"
        key, _, value = option.partition("=")
        if key != "rank" or not value.isdigit() or not int(value):
            raise InputError(f"gradients {self.form!r}: write {POWER_SGD}:rank=2")
        return int(value)


def is_learned(form: Format) -> TypeGuard[Levels]:
    """Whether its levels come from what is sent."""
    return isinstance(form, Levels) and form.method in LEARNED


class QuantizedGradients:
    """The state of the communication hook in one rank."""

    def __init__(
        self, compression: GradientCompression, model: nn.Module, seed: int, recorder: Recorder | None = None
    ) -> None:
        assert compression.form is not None
        self.compression, self.seed, self.recorder = compression, seed, recorder
        self.form = read_format(compression.form)
        self.learned = self.form if is_learned(self.form) else None
        self._unlearned = self.learned is not None
        if self.learned is not None:
            self._use(exponential(self.learned.bits, zero=self.learned.zero).tolist())
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.step = 0
        self.sent_bytes = 0  # payloads of this rank, since it was made
        self.statistics_bytes = 0
        self.residual: Tensor | None = None
        self._order = {parameter: index for index, parameter in enumerate(model.parameters())}

    def _use(self, levels: list[float]) -> None:
        assert self.learned is not None
        self.form = replace(self.learned, method="fixed", levels=tuple(levels))

    @torch.no_grad()
    def hook(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Replace the gradient of a ``dist.GradBucket`` by the mean of the ranks' quantized ones."""
        if not (bucket.is_last() and bucket.index() == 0):
            raise InputError("gradients came in several buckets: wrap the model with ptq.training.gradients.replicated")
        # DDP puts parameters into the order in which their gradients come, after the first step. Where buckets of
        # the format begin must not depend on that, or a run that goes on from a checkpoint would differ.
        views = sorted(zip(bucket.parameters(), bucket.gradients(), strict=True), key=lambda pair: self._order[pair[0]])
        mean = self.average(torch.cat([gradient.flatten() for _, gradient in views]))
        pieces = torch.split(mean, [gradient.numel() for _, gradient in views])
        for (_, gradient), piece in zip(views, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def average(self, gradient: Tensor) -> Tensor:
        """The mean over ranks of ``decode(encode(gradient))``; ``gradient`` is flat."""
        if self.residual is not None:
            gradient = gradient + self.residual
        if self.learned is not None and (self._unlearned or self.compression.updates.due(self.step)):
            self._learn(gradient)
        generator = generator_for(self.seed, 3, self.rank, self.step, device=gradient.device)
        packed = self.form.encode(gradient, generator)
        self.sent_bytes += packed.nbytes
        recorded = self.recorder is not None and self.recorder.wants(self.step)
        if self.compression.error_feedback or recorded:
            own = self.form.decode(packed)
            if self.compression.error_feedback:
                self.residual = gradient - own
            if self.recorder is not None and recorded:
                self.recorder.add({"step": self.step, "direction": "backward", "rank": self.rank}, gradient, own)
        payloads = [torch.empty_like(packed.payload) for _ in range(self.world)]
        dist.all_gather(payloads, packed.payload)
        return mean_of(payloads, packed, self.form)

    def _learn(self, gradient: Tensor) -> None:
        """Levels from buckets of all ranks; the first rank learns, so that all have the same whatever their CPU."""
        assert self.learned is not None
        sample = sampled_buckets(gradient, self.learned.bucket)
        if self.compression.normalised:
            sample = of_equal_norm(sample, self.learned)
        samples = [torch.empty_like(sample) for _ in range(self.world)]
        dist.all_gather(samples, sample)
        self.statistics_bytes += sample.numel() * sample.element_size()
        together = torch.cat(samples)
        if not bool(together.any()):
            return  # zeros teach nothing
        current = cast(Levels, self.form).levels
        assert current is not None
        levels = torch.tensor(current, dtype=torch.float64, device=gradient.device)
        if self.rank == 0:
            fitted = Levels.fit(
                together,
                self.learned.bits,
                self.learned.method,
                previous=cast(Levels, self.form),
                bucket=min(self.learned.bucket, len(sample)),
                norm=self.learned.norm,
                zero=self.learned.zero,
            )
            levels.copy_(torch.tensor(fitted.levels, dtype=torch.float64))
        dist.broadcast(levels, 0)
        self._use(levels.tolist())
        self._unlearned = False

    def state(self) -> dict[str, Any]:
        levels = self.form.levels if isinstance(self.form, Levels) and self.learned is not None else None
        kept = None if levels is None or self._unlearned else list(levels)
        return {"levels": kept, "residual": self.residual}

    def load_state(self, state: dict[str, Any]) -> None:
        if state["levels"] is not None:
            self._use(state["levels"])
            self._unlearned = False
        self.residual = state["residual"]


def mean_of(payloads: list[Tensor], like: Packed, form: Format) -> Tensor:
    """The decoded payloads added in the order of the ranks, divided by their number."""
    total = form.decode(replace(like, payload=payloads[0]))
    for payload in payloads[1:]:
        total = total + form.decode(replace(like, payload=payload))
    return total / len(payloads)


def sampled_buckets(gradient: Tensor, size: int) -> Tensor:
    """Up to SAMPLED_BUCKETS whole buckets, evenly spread; all of a gradient that doesn't fill one."""
    whole = len(gradient) // size
    if not whole:
        return gradient.contiguous()
    chosen = torch.linspace(0, whole - 1, min(whole, SAMPLED_BUCKETS), device=gradient.device).round().long()
    return gradient[: whole * size].view(whole, size)[chosen].flatten()


def of_equal_norm(sample: Tensor, form: Levels) -> Tensor:
    """Each bucket v divided by its norm ``‖v‖``, of the format's kind; buckets of zeros stay."""
    buckets = sample.view(-1, min(form.bucket, len(sample)))
    norms = torch.linalg.vector_norm(buckets, 2 if form.norm == "l2" else torch.inf, dim=1, keepdim=True)
    return (buckets / torch.where(norms > 0, norms, 1.0)).flatten()


def replicated(model: nn.Module) -> DistributedDataParallel:
    """The model in DDP, with all gradients in one bucket."""
    kinds = {parameter.dtype for parameter in model.parameters()}
    if len(kinds) != 1:
        names = ", ".join(sorted(map(str, kinds)))
        raise InputError(f"parameters of several types ({names}) can't travel as one gradient: convert the model")
    megabytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) // 2**20 + 1
    return DistributedDataParallel(model, bucket_cap_mb=megabytes)


@dataclass
class Attached:
    """A hook on a replicated model and how to ask what it did."""

    bytes_so_far: Callable[[], int]  # that this rank sent
    quantized: QuantizedGradients | None = None


def attach(
    ddp: DistributedDataParallel, compression: GradientCompression, seed: int, recorder: Recorder | None = None
) -> Attached:
    """Register the hook that the compression asks for."""
    gradients = sum(parameter.numel() for parameter in ddp.parameters() if parameter.requires_grad)
    if compression.form in HALVES or compression.form is None:
        width, steps = 4 if compression.form is None else 2, 0

        run = HALVES[compression.form] if compression.form else default_hooks.allreduce_hook

        def counted(bucket: Any) -> torch.futures.Future[Tensor]:
            nonlocal steps
            steps += 1
            return run(cast(Any, None), bucket)

        _register(ddp, counted)
        return Attached(lambda: steps * gradients * width)
    if compression.is_power_sgd:
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=compression.power_sgd_rank(),
            start_powerSGD_iter=2,
            use_error_feedback=compression.error_feedback,
            random_seed=seed,
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return Attached(lambda: 4 * state.total_numel_after_compression)
    quantized = QuantizedGradients(compression, ddp.module, seed, recorder)
    _register(ddp, quantized.hook)
    return Attached(lambda: quantized.sent_bytes, quantized)


def _register(ddp: DistributedDataParallel, hook: Callable[[Any], torch.futures.Future[Tensor]]) -> None:
    # DDP compares annotations with its own types, and those of this module are texts: a lambda has none.
    ddp.register_comm_hook(None, lambda _, bucket: hook(bucket))
