"""Pipelines of processes: what crosses is packed, and what is learnt is what one process would learn."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))  # spawned processes inherit it

import rank_functions

from ptq.errors import InputError
from ptq.formats import NAMES, Format
from ptq.formats import format as read_format
from ptq.tasks.networks.cifar_resnet import resnet20
from ptq.tasks.networks.digits import DigitsNet
from ptq.tasks.networks.mobilenet import cifar10_mobilenetv2
from ptq.training.checkpoints import read_lines
from ptq.training.loop import Engine, train
from ptq.training.pipeline import Pipeline, plan_pipeline, refuse_shared, train_pipeline
from ptq.training.processes import RankError, run_ranks
from ptq.training.recipe import Recipe
from ptq.training.samples import TensorSamples, epoch_batches
from ptq.training.split import balanced_cuts, boundary_tensors, cuts_by_name, stage_modules
from ptq.training.stage import transfer_generator
from ptq.vision import torchvision

RECIPE = Recipe(epochs=2, batch_size=16, learning_rate=0.05, micro_batches=4, seed=5)
BOUNDARY = (4, 6, 8, 8)  # of a micro-batch, between stem and relu


def some_samples(count: int = 40) -> TensorSamples:
    generator = torch.Generator().manual_seed(0)
    return TensorSamples(
        torch.randn(count, 1, 8, 8, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    )


def batches(count: int = 1) -> list[tuple[Tensor, Tensor]]:
    samples = some_samples(48)
    return list(zip(samples.inputs.split(16), samples.labels.split(16), strict=True))[:count]


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield


def cut_at(*names: str) -> tuple[Any, ...]:
    return tuple(cuts_by_name(rank_functions.network(), names))


class Wire(torch.autograd.Function):
    """The gradient on its way back: what arrives is ``fake`` of what was sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, form: Format | None, generator: torch.Generator | None) -> Tensor:
        ctx.form, ctx.generator = form, generator
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (gradient if ctx.form is None else ctx.form.fake(gradient, ctx.generator)), None, None


def simulated(activations: str | None, gradients: str | None, step: int = 0) -> dict[str, Tensor | None]:
    """The network in one process, with ``fake`` where the cut is; micro-batches one after the other."""
    model = rank_functions.network()
    assert isinstance(model, rank_functions.TwoWays)
    model.train()
    forward, backward = (read_format(text) if text else None for text in (activations, gradients))
    for done in range(step + 1):  # BatchNorm's statistics of the steps before
        model.zero_grad()
        inputs, labels = batches(step + 1)[done]
        for index, (x, y) in enumerate(zip(inputs.chunk(4), labels.chunk(4), strict=True)):
            crossing = model.stem(x)
            if forward is not None:
                crossing = forward.fake(crossing, transfer_generator(5, "forward", 0, done, index))
            crossing = Wire.apply(crossing, backward, transfer_generator(5, "backward", 0, done, index))
            crossing = model.relu(crossing.clone())
            crossing = crossing + model.body(crossing)
            nn.functional.cross_entropy(model.head(crossing.mean((2, 3))), y).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(4)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


FORMATS = [
    ("affine:bits=8", "affine:bits=8"),
    ("affine:bits=4,stochastic", "affine:bits=6,symmetric,stochastic"),
    ("affine:bits=8", "multistep:bits=4,parts=16"),
    ("multistep:bits=3,parts=4", "qsgdinf:bits=4,bucket=512"),
    ("topk:ratio=0.2", "topk:ratio=0.3+affine:bits=4"),
    ("topk:ratio=0.5+multistep:bits=4,parts=4", None),
    ("downsample:factor=2+affine:bits=8", "nuqsgd:bits=4,bucket=256"),
    ("alq:bits=3,bucket=512", "amq:bits=3,bucket=512"),
    ("truncate:step=0.01", "terngrad:bucket=128"),
    ("qsgd:bits=4,bucket=256", "alqg:bits=3,bucket=512"),
    ("raw", "raw"),
]


ONE_BY_ONE = {"activations": "qsgdinf:bits=4,bucket=512", "gradients": "affine:bits=4,stochastic"}


@pytest.fixture(scope="module")
def two_ranks() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Two steps of each pipeline in FORMATS, and of one with the 1F1B schedule, as first and last rank saw them."""
    cuts = cut_at("relu")
    pipelines = [Pipeline(cuts=cuts, activations=forward, gradients=backward) for forward, backward in FORMATS]
    pipelines.append(Pipeline(cuts=cuts, schedule="1f1b", **ONE_BY_ONE))
    first, last = run_ranks(rank_functions.gradients_of_pipelines, (RECIPE, pipelines, batches(2)), 2)
    return list(zip(first, last, strict=True))


@pytest.mark.parametrize(("activations", "gradients"), FORMATS)
def test_first_gradients_are_those_of_one_process_with_fake_in_place(
    two_ranks: list[tuple[dict[str, Any], dict[str, Any]]], activations: str | None, gradients: str | None
) -> None:
    first, last = two_ranks[FORMATS.index((activations, gradients))]
    found = {**first["gradients"][0], **last["gradients"][0]}
    expected = simulated(activations, gradients)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name] is not None, f"{name} has no gradient"
        assert torch.equal(found[name], gradient), name


def test_no_format_is_left_out() -> None:
    used = {part.partition(":")[0] for pair in FORMATS for text in pair if text for part in text.split("+")}
    assert used | {"levels"} == set(NAMES)  # qsgd and its kin are levels


@pytest.mark.parametrize(("activations", "gradients"), FORMATS)
def test_bytes_are_those_that_the_shapes_give_and_those_that_leave_the_sockets(
    two_ranks: list[tuple[dict[str, Any], dict[str, Any]]], activations: str | None, gradients: str | None
) -> None:
    first, last = two_ranks[FORMATS.index((activations, gradients))]
    for result, direction, other, text in (
        (first, "forward", "backward", activations),
        (last, "backward", "forward", gradients),
    ):
        counted = 4 * read_format(text or "raw").nbytes_for(BOUNDARY)  # a step has four micro-batches
        assert result["sent"] == {direction: 2 * counted, other: 0}
        if sys.platform.startswith("linux"):
            measured = result["sockets"][1]  # in the first step the ranks also agree on shapes
            assert counted <= measured <= counted + 4 * 200  # gloo puts a few dozen bytes before a message


def test_one_forward_one_backward_gives_the_same_gradients_in_later_steps_too(
    two_ranks: list[tuple[dict[str, Any], dict[str, Any]]],
) -> None:
    """Random numbers belong to a transfer, not to the order of transfers."""
    first, last = two_ranks[-1]
    expected = simulated(step=1, **ONE_BY_ONE)
    for name, gradient in {**first["gradients"][1], **last["gradients"][1]}.items():
        assert torch.equal(gradient, expected[name]), name


def test_three_stages_with_a_residual_across_a_cut() -> None:
    """Two tensors cross into ``body.1``: its input and the residual."""
    pipeline = Pipeline(cuts=cut_at("relu", "body.1"))
    results = run_ranks(rank_functions.gradients_of_steps, (RECIPE, pipeline, batches()), 3)
    expected = simulated(None, None)
    found = {name: gradient for result in results for name, gradient in result["gradients"][0].items()}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
    plain = 4 * torch.zeros(BOUNDARY).nbytes
    assert [result["sent"]["forward"] for result in results] == [plain, 2 * plain, 0]


def test_an_uncompressed_pipeline_learns_what_plain_training_learns(tmp_path: Path) -> None:
    model, samples = rank_functions.network(), some_samples()
    pipeline = plan_pipeline(model, samples, RECIPE, stages=2)
    history = train_pipeline(model, samples, RECIPE, pipeline, folder=tmp_path, evaluation=batches(2))
    plain = train(Engine(rank_functions.network(), RECIPE), samples, evaluation=batches(2))
    assert history.model is not None and plain.model is not None
    for (name, found), expected in zip(
        history.model.state_dict().items(), plain.model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=name)
    cuts = [cut.name for cut in pipeline.cuts]
    named = plan_pipeline(model, samples, RECIPE, split=["head"], folder=tmp_path)
    assert [cut.name for cut in named.cuts] == ["head"] != cuts  # names that are given go first
    again = plan_pipeline(model, samples, RECIPE, stages=2, folder=tmp_path)
    assert again.cuts == pipeline.cuts  # read from the folder, not measured again
    for found, expected in zip(history.epochs, plain.epochs, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["score"] == pytest.approx(expected["score"], abs=4)
    assert torch.equal(model.state_dict()["head.weight"], rank_functions.network().state_dict()["head.weight"])


def test_an_interrupted_pipeline_ends_with_the_same_bits_and_records_each_step_once(tmp_path: Path) -> None:
    pipeline = Pipeline(
        cuts=cut_at("relu"), activations="affine:bits=4", gradients="qsgdinf:bits=4,bucket=512", record_every=2
    )
    arguments = (RECIPE, pipeline, some_samples(), str(tmp_path))
    first, _ = run_ranks(rank_functions.pipeline_interrupted, arguments, 2)
    whole, cut, resumed = first["states"]
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
    assert not torch.equal(cut["head.weight"], resumed["head.weight"])
    size = 4 * sum(
        read_format(text).nbytes_for(BOUNDARY) for text in (pipeline.activations, pipeline.gradients) if text
    )
    assert [line["payload_bytes_per_step"] for line in first["epochs"]] == [size, size]
    for rank, direction in ((0, "forward"), (1, "backward")):
        lines, others = (read_lines(tmp_path / name / f"boundaries-{rank}.jsonl") for name in ("whole", "cut"))
        assert lines == others
        assert {(line["step"], line["micro_batch"], line["direction"]) for line in lines} == {
            (step, micro_batch, direction) for step in (0, 2) for micro_batch in range(4)
        }
        assert all(0 < line["l1"] < 1 and line["sqnr"] > 0 and 0.5 < line["cosine"] <= 1 for line in lines)


def test_a_rank_that_dies_in_training_says_why_and_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    """One sample is no number; the first epoch happens to leave it out, the second doesn't."""
    samples = some_samples()
    numbered = TensorSamples(torch.arange(40.0), samples.labels)
    seen = [{int(n) for batch, _ in epoch_batches(numbered, RECIPE, epoch) for n in batch} for epoch in range(2)]
    samples.inputs[min(seen[1] - seen[0])] = torch.nan
    pipeline = Pipeline(cuts=cut_at("relu"), activations="affine:bits=8")
    with pytest.raises(RankError, match=r"rank 0: .*NaN"):
        train_pipeline(rank_functions.network(), samples, RECIPE, pipeline, folder=tmp_path)
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert checkpoint["epoch"] == 1 and len(checkpoint["ranks"]) == 2
    state = {name: tensor for rank in checkpoint["ranks"] for name, tensor in rank["model"].items()}
    rank_functions.network().load_state_dict(state)
    assert [line["epoch"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "rank 1: ValueError: the disk is full of sand"),
        ("killed", "rank 1 was ended by SIGKILL"),
        ("leaves", "rank 1 ended with exit code 7"),
    ],
)
def test_a_rank_that_dies_ends_all_with_its_message(tmp_path: Path, how: str, message: str) -> None:
    died = tmp_path / "died"
    with pytest.raises(RankError, match=message):
        run_ranks(rank_functions.fails_in_rank, (1, how, str(died)), 2)
    assert time.time() - float(died.read_text()) < 10
    assert not multiprocessing.active_children()


def test_ranks_return_what_they_found() -> None:
    """They also get networks made of torchvision's parts, which can be imported through ``ptq.vision`` alone."""
    before = os.environ.get("OMP_NUM_THREADS")
    network = torchvision("ops").Conv2dNormActivation(1, 2)
    results = run_ranks(rank_functions.adds_up, (2, network), 2)
    assert [result["network"] for result in results] == ["Conv2dNormActivation"] * 2
    assert [float(result["total"]) for result in results] == [5.0, 5.0]
    assert [(result["threads"], result["omp"]) for result in results] == [(1, "1")] * 2
    assert os.environ.get("OMP_NUM_THREADS") == before


def test_under_torchrun_each_process_is_one_rank(tmp_path: Path) -> None:
    """Two processes with the environment that torchrun gives them; both know what both found."""
    code = (
        "import sys, rank_functions; from ptq.training.processes import run_ranks;"
        "results = run_ranks(rank_functions.adds_up, (2,), 2); print([float(r['total']) for r in results])"
    )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    search = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "PYTHONPATH": search}
    command = [sys.executable, "-c", code]
    ranks = [
        subprocess.Popen(command, env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=60)[0].strip() for rank in ranks] == ["[5.0, 5.0]"] * 2


def test_torchrun_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match="--nproc-per-node 2"):
        run_ranks(rank_functions.adds_up, (2,), 2)


# Cutting ------------------------------------------------------------------------------------------------------------


def test_stages_together_are_the_network() -> None:
    model = rank_functions.network()
    example = torch.randn(4, 1, 8, 8)
    stages = stage_modules(model, cuts_by_name(model, ["body", "head"]))
    borders = boundary_tensors(stages, example)
    assert [[tuple(value.shape) for value in border] for border in borders] == [
        [(4, 1, 8, 8)], [(4, 6, 8, 8)], [(4, 6)], [(4, 3)]
    ]  # fmt: skip
    assert {name for stage in stages for name in stage.state_dict()} == set(model.state_dict())
    model.eval()
    value: Any = example
    for stage in stages:
        stage.eval()
        value = stage(value)
    assert torch.equal(value, model(example))


@pytest.mark.parametrize(
    ("build", "size", "channels", "names"),
    [
        (DigitsNet, 16, 1, ["features.3", "features.6"]),
        (resnet20, 32, 3, ["layer2"]),
        (cifar10_mobilenetv2, 32, 3, ["features.8", "classifier"]),
    ],
    ids=["digits", "resnet20", "mobilenetv2"],
)
def test_real_networks_can_be_cut(build: Callable[[], nn.Module], size: int, channels: int, names: list[str]) -> None:
    torch.manual_seed(0)
    model = build().eval()
    example = torch.randn(2, channels, size, size)
    for cuts in (cuts_by_name(model, names), balanced_cuts(model, 3, example)):
        stages = stage_modules(model, cuts)
        refuse_shared(stages)
        assert {name for stage in stages for name in stage.state_dict()} == set(model.state_dict())
        value: Any = (example,)
        for stage in stages:
            value = stage(*value)
            value = value if isinstance(value, tuple) else (value,)
        assert torch.equal(value[0], model(example))


def test_balanced_cuts_put_the_slow_layer_alone() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1500), nn.Linear(1500, 1500), nn.Linear(1500, 8), nn.Linear(8, 2)
    )
    cuts = balanced_cuts(model, 3, torch.randn(256, 8))
    assert [cut.name for cut in cuts] == ["3", "4"]


def test_cuts_that_cannot_be_made_say_why() -> None:
    model = rank_functions.network()
    with pytest.raises(InputError, match="no module of that name runs"):
        cuts_by_name(model, ["layer7"])
    with pytest.raises(InputError, match="in the order in which they run"):
        cuts_by_name(model, ["head", "body"])
    with pytest.raises(InputError, match="first stage would be empty"):
        cuts_by_name(model, ["stem"])
    with pytest.raises(InputError, match="places to cut it at"):
        balanced_cuts(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 3, torch.zeros(1, 2))
    with pytest.raises(InputError, match="schedule 'zigzag'"):
        Pipeline(cuts=(), schedule="zigzag")

    class Chooses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(InputError, match=r"torch\.fx can't follow it"):
        cuts_by_name(Chooses(), ["x"])


def test_a_layer_in_two_stages_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.again, self.between = nn.Linear(4, 4), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.between(self.again(x)))

    model = Twice()
    with pytest.raises(InputError, match=r"again\.weight: stages 0 and 1 both use it"):
        refuse_shared(stage_modules(model, cuts_by_name(model, ["between"])))
