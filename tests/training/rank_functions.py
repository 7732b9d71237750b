"""What the tests let other processes run: functions that a spawned process can import."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ptq.training.gradients import GradientCompression
from ptq.training.loop import train
from ptq.training.pipeline import Pipeline, PipelineEngine
from ptq.training.recipe import Recipe
from ptq.training.replicas import ReplicaEngine
from ptq.training.samples import TensorSamples


class TwoWays(nn.Module):
    """Convolutions with BatchNorm, an in-place ReLU, a residual that crosses a cut, and a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.relu = nn.ReLU(inplace=True)
        self.body = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem(x))
        x = x + self.body(x)
        return self.head(x.mean((2, 3)))


class Words(nn.Module):
    """Embeddings, two layers, and a mean over the tokens whose mask came in with their ids: [N, 2, tokens]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, packed: Tensor) -> Tensor:
        hidden = self.second(self.first(self.embedding(packed[:, 0])).relu()).relu()
        mask = packed[:, 1].unsqueeze(-1).to(torch.float32)
        return self.head((hidden * mask).sum(1) / mask.sum(1))


def network() -> nn.Module:
    torch.manual_seed(11)
    return TwoWays()


def gradients_of_pipelines(
    rank: int, recipe: Recipe, pipelines: list[Pipeline], batches: list[tuple[Tensor, Tensor]]
) -> list[dict[str, Any]]:
    """``gradients_of_steps`` for several pipelines: starting processes takes longer than all the rest."""
    return [gradients_of_steps(rank, recipe, pipeline, batches) for pipeline in pipelines]


def gradients_of_steps(
    rank: int, recipe: Recipe, pipeline: Pipeline, batches: list[tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    """The gradients after each batch (no optimizer in between), bytes counted and bytes that left the sockets."""
    engine = PipelineEngine(rank, network(), recipe, pipeline, batches[0][0], None)
    engine.begin_epoch(0)
    gradients, losses, sockets = [], [], []
    for step, (inputs, labels) in enumerate(batches):
        engine.model.zero_grad()
        dist.barrier()
        before = bytes_sent_by_sockets()
        losses.append(engine.gradients(inputs, labels, step))
        sockets.append(bytes_sent_by_sockets() - before)
        gradients.append({name: parameter.grad.clone() for name, parameter in engine.model.named_parameters()})
    return {
        "gradients": gradients,
        "losses": losses,
        "sent": dict(engine.stage.sent_bytes),
        "sockets": sockets,
        "buffers": dict(engine.model.named_buffers()),
    }


def bytes_sent_by_sockets() -> int:
    """What the kernel counted on the TCP sockets of this process, when nothing waits in its buffers any more."""
    seen = -1
    while (now := _bytes_sent_so_far()) != seen:
        seen = now
        time.sleep(0.05)
    return now


def _bytes_sent_so_far() -> int:
    """``tcpi_bytes_sent`` of ``struct tcp_info``, over all sockets."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as duplicate:
                information = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", information, 200)[0]
    return total


def fails_in_rank(rank: int, failing: int, how: str, note: str) -> dict[str, Any]:
    """Notes when it dies; the others wait for it."""
    if rank == failing:
        time.sleep(0.3)
        Path(note).write_text(str(time.time()))
        if how == "raises":
            raise ValueError("the disk is full of sand")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    buffer = torch.zeros(4)
    dist.recv(buffer, src=failing)  # waits for what never comes
    return {}


def adds_up(rank: int, number: int, network: nn.Module | None = None) -> dict[str, Any]:
    total = torch.tensor([float(rank + number)])
    dist.all_reduce(total)
    environment = {"threads": torch.get_num_threads(), "omp": os.environ.get("OMP_NUM_THREADS")}
    return {"total": total, **environment, "network": type(network).__name__}


def replicas_trained(
    rank: int, recipe: Recipe, compressions: list[GradientCompression], samples: TensorSamples, folder: str
) -> list[dict[str, Any]]:
    """Each compression in turn: the replica's state and what it counted."""
    results = []
    for number, compression in enumerate(compressions):
        engine = ReplicaEngine(rank, network(), recipe, compression, Path(folder) / str(number))
        history = train(engine, samples, folder=Path(folder) / str(number))
        quantized = engine.attached.quantized
        results.append(
            {
                "state": engine.model.state_dict(),
                "epochs": history.epochs,
                "levels": quantized.state()["levels"] if quantized else None,
                "sent": engine.attached.bytes_so_far(),
            }
        )
    return results


def one_gradient(
    rank: int, recipe: Recipe, compressions: list[GradientCompression], inputs: Tensor, labels: Tensor
) -> list[dict[str, Any]]:
    """The gradients after each of two equal steps, without an optimizer."""
    results = []
    for compression in compressions:
        engine = ReplicaEngine(rank, network(), recipe, compression)
        engine.begin_epoch(0)
        steps = []
        for step in range(2):
            engine.model.zero_grad()
            engine.gradients(inputs, labels, step)
            steps.append([parameter.grad.clone() for parameter in engine.model.parameters()])
        quantized = engine.attached.quantized
        results.append({"steps": steps, "levels": quantized.state()["levels"] if quantized else None})
    return results


def pipeline_interrupted(
    rank: int, recipe: Recipe, pipeline: Pipeline, samples: TensorSamples, folder: str
) -> dict[str, Any]:
    """A whole run, and one that stops after an epoch and goes on; engines are new each time."""
    histories = []
    for name, stop_after in (("whole", None), ("cut", 1), ("cut", None)):
        place = Path(folder) / name
        engine = PipelineEngine(rank, network(), recipe, pipeline, samples.inputs[: recipe.batch_size], place)
        torch.manual_seed(len(histories))
        histories.append(train(engine, samples, folder=place, stop_after=stop_after))
        dist.barrier()  # the first rank writes the checkpoint that the others go on from
    return {
        "epochs": histories[-1].epochs,
        "states": [history.model.state_dict() for history in histories if history.model is not None],
    }


def replicas_interrupted(
    rank: int, recipe: Recipe, compression: GradientCompression, samples: TensorSamples, folder: str
) -> list[dict[str, Tensor]]:
    states = []
    for name, stop_after in (("whole", None), ("cut", 1), ("cut", None)):
        engine = ReplicaEngine(rank, network(), recipe, compression)
        torch.manual_seed(len(states))
        train(engine, samples, folder=Path(folder) / name, stop_after=stop_after)
        states.append({key: value.clone() for key, value in engine.model.state_dict().items()})
        dist.barrier()
    return states
