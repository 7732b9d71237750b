"""Replicas that exchange quantized gradients: the mean is right, and they stay the same to the last bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))  # spawned processes inherit it

import rank_functions

from ptq.errors import InputError
from ptq.formats import format as read_format
from ptq.formats.levels import Levels
from ptq.training.checkpoints import read_lines
from ptq.training.gradients import GradientCompression, Updates, of_equal_norm, sampled_buckets
from ptq.training.processes import run_ranks
from ptq.training.recipe import Recipe, generator_for
from ptq.training.samples import TensorSamples

RECIPE = Recipe(epochs=3, batch_size=16, learning_rate=0.05, seed=5)
EARLY = Updates(at=(1, 3), every=4)
PARAMETERS = sum(parameter.numel() for parameter in rank_functions.network().parameters())
COMPRESSIONS = [
    GradientCompression(form="qsgd:bits=4,bucket=64"),
    GradientCompression(form="qsgdinf:bits=4,bucket=64"),
    GradientCompression(form="nuqsgd:bits=3,bucket=64", error_feedback=True, record_every=2),
    GradientCompression(form="terngrad:bucket=64,clip=2.5"),
    GradientCompression(form="alq:bits=3,bucket=64", updates=EARLY),
    GradientCompression(form="levels:alq,bits=3,bucket=64,linf", updates=EARLY, error_feedback=True),
    GradientCompression(form="amq:bits=3,bucket=64", updates=EARLY, normalised=True),
    GradientCompression(form="topk:ratio=0.1+affine:bits=8", error_feedback=True),
    GradientCompression(),
    GradientCompression(form="fp16"),
    GradientCompression(form="powersgd:rank=1", error_feedback=True),
]


def some_samples(count: int = 40) -> TensorSamples:
    generator = torch.Generator().manual_seed(0)
    return TensorSamples(
        torch.randn(count, 1, 8, 8, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    )


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("replicas")
    return folder, run_ranks(rank_functions.replicas_trained, (RECIPE, COMPRESSIONS, some_samples(), str(folder)), 2)


@pytest.mark.parametrize("number", range(len(COMPRESSIONS)), ids=[str(each.form) for each in COMPRESSIONS])
def test_replicas_are_the_same_to_the_last_bit(trained: tuple[Path, list[list[dict[str, Any]]]], number: int) -> None:
    first, second = (results[number] for results in trained[1])
    start = rank_functions.network().state_dict()
    for name, tensor in first["state"].items():
        assert torch.equal(tensor, second["state"][name]), name
        if tensor.is_floating_point():
            assert not torch.equal(tensor, start[name]), f"{name} was not trained"
    assert first["levels"] == second["levels"]
    learned = COMPRESSIONS[number].updates == EARLY
    assert (first["levels"] is not None) == learned


@pytest.mark.parametrize("number", range(len(COMPRESSIONS) - 1), ids=[str(each.form) for each in COMPRESSIONS[:-1]])
def test_bytes_per_step_are_those_of_one_flat_gradient(
    trained: tuple[Path, list[list[dict[str, Any]]]], number: int
) -> None:
    result, form = trained[1][0][number], COMPRESSIONS[number].form
    plain = {None: 4 * PARAMETERS, "fp16": 2 * PARAMETERS}
    if form in plain:
        expected = plain[form]
    else:
        reading = read_format(str(form))
        if isinstance(reading, Levels) and result["levels"]:  # agreed on, they don't travel with each gradient
            reading = Levels(bits=reading.bits, bucket=reading.bucket, levels=tuple(result["levels"]))
        expected = reading.nbytes_for((PARAMETERS,))
    assert [line["payload_bytes_per_rank_per_step"] for line in result["epochs"]] == [expected] * 3
    assert [line["payload_bytes_per_step"] for line in result["epochs"]] == [2 * expected] * 3


def test_power_sgd_sends_less(trained: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    assert 0 < trained[1][0][-1]["epochs"][-1]["payload_bytes_per_rank_per_step"] < 4 * PARAMETERS


def test_what_was_recorded(trained: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    lines = read_lines(trained[0] / "2" / "gradients-1.jsonl")
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert all(line["elements"] == PARAMETERS and 0 < line["cosine"] < 1 for line in lines)


def test_the_size_of_a_published_example() -> None:
    """549,322 gradients at 3 bits in buckets of 8,192: 206,268 bytes a rank."""
    assert read_format("qsgd:bits=3,bucket=8192").nbytes_for((549_322,)) == 206_268


def own_gradients(rank: int, inputs: Tensor, labels: Tensor) -> Tensor:
    """The gradient of one replica's samples, flat, in the order of the parameters."""
    model = rank_functions.network().train()
    nn.functional.cross_entropy(model(inputs[rank::2]), labels[rank::2]).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def test_the_gradient_is_the_mean_of_the_decoded_ones() -> None:
    samples = some_samples(16)
    inputs, labels = samples.inputs, samples.labels
    forms = ["qsgdinf:bits=4,bucket=64", "qsgdinf:bits=2,bucket=64", "alq:bits=3,bucket=64"]
    compressions = [
        GradientCompression(form=forms[0]),
        GradientCompression(form=forms[1], error_feedback=True),
        GradientCompression(form=forms[2], updates=Updates(at=(0,))),
    ]
    results = run_ranks(rank_functions.one_gradient, (RECIPE, compressions, inputs, labels), 2)
    plain = [own_gradients(rank, inputs, labels) for rank in range(2)]

    def found(number: int, step: int) -> Tensor:
        flat = [torch.cat([g.flatten() for g in result[number]["steps"][step]]) for result in results]
        assert torch.equal(flat[0], flat[1])
        return flat[0]

    def mean(form: Any, values: list[Tensor], step: int) -> tuple[Tensor, list[Tensor]]:
        decoded = [form.fake(value, generator_for(5, 3, rank, step)) for rank, value in enumerate(values)]
        return (decoded[0] + decoded[1]) / 2, decoded

    assert torch.equal(found(0, 0), mean(read_format(forms[0]), plain, 0)[0])
    # the second step sees the same batch: in training mode BatchNorm's running statistics change nothing
    assert torch.equal(found(0, 1), mean(read_format(forms[0]), plain, 1)[0])
    first, decoded = mean(read_format(forms[1]), plain, 0)
    assert torch.equal(found(1, 0), first)
    left = [value - was for value, was in zip(plain, decoded, strict=True)]
    second, _ = mean(read_format(forms[1]), [value + rest for value, rest in zip(plain, left, strict=True)], 1)
    assert torch.equal(found(1, 1), second)
    together = torch.cat([value[: PARAMETERS // 64 * 64] for value in plain])
    levels = Levels.fit(together, 3, "alq", bucket=64, previous=Levels(bits=3, levels=results[0][2]["levels"])).levels
    assert levels is not None
    assert results[0][2]["levels"] == pytest.approx(levels, abs=1e-3)  # fitted from another start
    fixed = Levels(bits=3, bucket=64, levels=tuple(results[0][2]["levels"]))
    assert torch.equal(found(2, 0), mean(fixed, plain, 0)[0])


def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Error feedback, learned levels and DDP's own order of parameters leave no trace of the interruption."""
    compression = GradientCompression(form="alq:bits=3,bucket=64", updates=EARLY, error_feedback=True)
    results = run_ranks(rank_functions.replicas_interrupted, (RECIPE, compression, some_samples(), str(tmp_path)), 2)
    for whole, cut, resumed in results:
        for name, tensor in whole.items():
            assert torch.equal(tensor, resumed[name]), name
        assert not torch.equal(cut["head.weight"], resumed["head.weight"])


def test_when_levels_are_learned() -> None:
    due = [step for step in range(30_001) if Updates().due(step)]
    assert due == [100, 2000, 10_000, 20_000, 30_000]
    with pytest.raises(InputError, match="every 0 steps"):
        Updates(every=0)


def test_a_schedule_is_read_from_its_text() -> None:
    assert Updates.parse("100,2000,10000") == Updates()
    assert Updates.parse("50") == Updates(at=(), every=50)
    for text in ("", "100,", "often", "3,0"):
        with pytest.raises(InputError, match="level updates"):
            Updates.parse(text)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_normalised_buckets_weigh_the_same(norm: str) -> None:
    """ALQ-N: levels that minimise the mean over buckets of the error of ``v = x/‖x‖``, not of x."""
    generator = torch.Generator().manual_seed(0)
    shapes = torch.randn(8, 512, generator=generator) ** 3
    sizes = torch.tensor([1e-3, 1.0, 10.0, 0.1, 5.0, 0.0, 1.0, 1e-2])
    buckets = shapes * sizes[:, None]
    form = Levels(bits=3, method="alq", bucket=512, norm=norm)
    found = of_equal_norm(buckets.flatten(), form).view(8, 512).numpy()
    order = 2 if norm == "l2" else np.inf
    np.testing.assert_allclose(np.linalg.norm(found, order, axis=1), [1, 1, 1, 1, 1, 0, 1, 1], rtol=1e-6)

    def error(levels: tuple[float, ...] | None) -> float:
        """Σ (v-ℓ_j)(ℓ_{j+1}-v) over the normalised buckets, with numpy."""
        assert levels is not None
        edges = np.array(levels)
        below = np.clip(np.searchsorted(edges, found, "right") - 1, 0, len(edges) - 2)
        return float(((found - edges[below]) * (edges[below + 1] - found)).sum())

    by_size, alike = (
        Levels.fit(sample, 3, "alq", bucket=512, norm=norm).levels
        for sample in (buckets.flatten(), torch.from_numpy(found).flatten())
    )
    assert error(alike) < error(by_size)


def test_buckets_are_sampled_whole() -> None:
    gradient = torch.arange(1000.0)
    sampled = sampled_buckets(gradient, 8).view(-1, 8)
    assert sampled.shape == (64, 8)
    assert torch.equal(sampled[:, :1] % 8, torch.zeros(64, 1)) and torch.equal(sampled[:, 1:], sampled[:, :-1] + 1)
    assert torch.equal(sampled_buckets(gradient[:5], 8), gradient[:5])


def test_compressions_that_make_no_sense_say_why() -> None:
    with pytest.raises(InputError, match="unknown"):
        GradientCompression(form="qsdg:bits=4")
    with pytest.raises(InputError, match="error feedback doesn't go with fp16"):
        GradientCompression(form="fp16", error_feedback=True)
    with pytest.raises(InputError, match="--normalised doesn't go with qsgd:bits=4"):
        GradientCompression(form="qsgd:bits=4", normalised=True)
    with pytest.raises(InputError, match="powersgd:rank=2"):
        GradientCompression(form="powersgd:rank=none")
