"""A pipeline stage whose transfers are compressed: packed bytes cross the wire, forward and backward.

A stage that returned an integer tensor would run without an error and leave the stage before it without gradients;
so what the module computes stays float, and only what is sent and received is replaced.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from ptq.formats import Format, Packed
from ptq.training.recipe import generator_for
from ptq.training.record import Recorder

FORWARD, BACKWARD = "forward", "backward"


def transfer_generator(seed: int, direction: str, boundary: int, step: int, micro_batch: int, value: int = 0) -> Any:
    """The random numbers of one transfer: the same in whatever order a schedule sends, and after an interruption."""
    return generator_for(seed, 2, (FORWARD, BACKWARD).index(direction), boundary, step, micro_batch, value)


def passes_straight_through(form: Format) -> bool:
    """Whether the gradient of ``form.fake`` is the identity; selecting and reducing formats have one of their own."""
    return type(form).fake is Format.fake


class CompressedStage(PipelineStage):
    """A ``PipelineStage`` that sends activations and gradients in number formats; None sends them as they are.

    Boundary b lies between stages b and b + 1. Where the format of the activations drops some of them, the gradient
    that comes back passes as ``fake`` would pass it: at the kept positions.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        input_args: tuple[Tensor, ...],
        output_args: tuple[Tensor, ...],
        activations: Format | None = None,
        gradients: Format | None = None,
        seed: int = 0,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, input_args=input_args, output_args=output_args)
        self.formats = {FORWARD: activations, BACKWARD: gradients}
        self.seed, self.recorder = seed, recorder
        self.training_step = 0
        self.sent_bytes = {FORWARD: 0, BACKWARD: 0}  # since it was made
        # by micro-batch: what the wire brings and the buffer it is for; what was sent; what comes back for it
        self._arriving: defaultdict[tuple[str, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._sent: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._returning: defaultdict[int, list[Tensor]] = defaultdict(list)

    # Sending ----------------------------------------------------------------------------------------------------

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        form = self.formats[FORWARD]
        if form is not None and not passes_straight_through(form):
            self._sent[fwd_chunk_id] = [op.tensor for op in ops if op.tensor.is_floating_point()]
        return self._packed(ops, FORWARD, self.stage_index, fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._packed(super().get_bwd_send_ops(bwd_chunk_id), BACKWARD, self.stage_index - 1, bwd_chunk_id)

    def _packed(self, ops: list[dist.P2POp], direction: str, boundary: int, chunk: int) -> list[dist.P2POp]:
        form = self.formats[direction]
        for value, op in enumerate(ops):
            sent = op.tensor.detach()
            if form is None or not sent.is_floating_point():
                op.tensor = sent.contiguous()
            else:
                generator = transfer_generator(self.seed, direction, boundary, self.training_step, chunk, value)
                packed = form.encode(sent, generator)
                op.tensor = packed.payload.contiguous()
                if self.recorder is not None and self.recorder.wants(self.training_step):
                    place = {"step": self.training_step, "boundary": boundary, "direction": direction}
                    self.recorder.add({**place, "micro_batch": chunk, "value": value}, sent, form.decode(packed))
            self.sent_bytes[direction] += op.tensor.numel() * op.tensor.element_size()
        return ops

    # Receiving --------------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._expected(super().get_fwd_recv_ops(fwd_chunk_id), FORWARD, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_bwd_recv_ops(bwd_chunk_id)
        self._returning[bwd_chunk_id] = [op.tensor for op in ops]
        return self._expected(ops, BACKWARD, bwd_chunk_id)

    def _expected(self, ops: list[dist.P2POp], direction: str, chunk: int) -> list[dist.P2POp]:
        """Room for the payloads, whose sizes follow from the shapes."""
        form = self.formats[direction]
        for op in ops:
            buffer = op.tensor
            if form is not None and buffer.is_floating_point():
                size = form.nbytes_for(tuple(buffer.shape), buffer.dtype)
                op.tensor = torch.empty(size, dtype=torch.uint8, device=buffer.device)
                self._arriving[direction, chunk].append((op.tensor, buffer))
        return ops

    @torch.no_grad()
    def _unpack(self, direction: str, chunk: int) -> None:
        form = self.formats[direction]
        for payload, buffer in self._arriving.pop((direction, chunk), []):
            assert form is not None
            packed = Packed(payload=payload, shape=tuple(buffer.shape), dtype=buffer.dtype, format=form)
            buffer.copy_(form.decode(packed))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._unpack(FORWARD, fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._unpack(BACKWARD, bwd_chunk_id)
        gradients, form = self._returning.pop(bwd_chunk_id, []), self.formats[FORWARD]
        for value, (sent, gradient) in enumerate(zip(self._sent.pop(bwd_chunk_id, []), gradients, strict=False)):
            assert form is not None
            generator = transfer_generator(
                self.seed, FORWARD, self.stage_index, self.training_step, bwd_chunk_id, value
            )
            with torch.enable_grad():
                leaf = sent.detach().requires_grad_()
                (passed,) = torch.autograd.grad(form.fake(leaf, generator), leaf, gradient)
            gradient.copy_(passed)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
