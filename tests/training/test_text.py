"""Text through the same loop: integers cross a cut as they are, and embeddings are never pruned."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))  # spawned processes inherit it

from rank_functions import Words

from ptq.errors import InputError
from ptq.evaluation import evaluate
from ptq.tasks import Task
from ptq.tasks.encoders import PooledClassifier
from ptq.tasks.text import TextBatches
from ptq.training.gradients import GradientCompression
from ptq.training.loop import Engine, train
from ptq.training.pipeline import plan_pipeline, train_pipeline
from ptq.training.recipe import Recipe
from ptq.training.replicas import train_ddp
from ptq.training.samples import TensorSamples, samples_of
from ptq.training.split import balanced_cuts, boundary_tensors, cuts_by_name, stage_modules
from ptq.training.text import Sentences, with_one_input
from ptq.vision import torchvision

RECIPE = Recipe(epochs=2, batch_size=8, learning_rate=0.2, micro_batches=2)


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def packed_words(count: int = 16, tokens: int = 5) -> TensorSamples:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 11, (count, tokens), generator=generator)
    lengths = torch.randint(1, tokens + 1, (count, 1), generator=generator)
    mask = (torch.arange(tokens) < lengths).long()
    return TensorSamples(torch.stack([ids * mask, mask], 1), torch.randint(0, 3, (count,), generator=generator))


def test_ids_and_mask_cross_a_cut_beside_the_hidden_state() -> None:
    torch.manual_seed(5)
    model, samples = Words(), packed_words()
    plain = copy.deepcopy(model)
    train(Engine(plain, RECIPE), samples)
    history = train_pipeline(model, samples, RECIPE, plan_pipeline(model, samples, RECIPE, split=["second"]))
    assert history.model is not None
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(history.model.state_dict()[name], tensor, atol=1e-5, rtol=1e-4)
    assert not torch.equal(plain.embedding.weight, model.embedding.weight)
    # two micro-batches: [4, 5, 6] floats each way, and the [4, 2, 5] integers forward alone
    assert history.epochs[-1]["forward_bytes_per_step"] == 2 * (4 * 5 * 6 * 4 + 4 * 2 * 5 * 8)
    assert history.epochs[-1]["backward_bytes_per_step"] == 2 * (4 * 5 * 6 * 4)


def test_embeddings_are_never_pruned() -> None:
    model, samples = Words(), packed_words()
    for formats in ({"activations": "topk:ratio=0.5"}, {"gradients": "topk:ratio=0.5+affine:bits=4"}):
        with pytest.raises(InputError, match=r"embedding: topk:ratio=0.5.* drops values, and embeddings are never"):
            plan_pipeline(model, samples, RECIPE, split=["first"], **formats)
        plan_pipeline(model, samples, RECIPE, split=["second"], **formats)  # hidden states may be
    plan_pipeline(model, samples, RECIPE, split=["first"], activations="affine:bits=4", gradients="affine:bits=4")
    with pytest.raises(InputError, match="embeddings are never pruned"):
        train_ddp(model, samples, RECIPE, GradientCompression(form="topk:ratio=0.1"))


# Networks of transformers ---------------------------------------------------------------------------------------


def made(kind: str) -> tuple[nn.Module, tuple[str, ...]]:
    """A random network with what it takes."""
    torchvision()  # transformers imports it
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    options: dict[str, Any] = {
        "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
        "intermediate_size": 24, "max_position_embeddings": 34, "pad_token_id": 0, "num_labels": 3,
    }  # fmt: skip
    if kind == "roberta":
        model = transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**options))
        return model.eval(), ("input_ids", "attention_mask")
    config = transformers.BertConfig(**options)
    if kind == "bert":
        return transformers.BertForSequenceClassification(config).eval(), (
            "input_ids", "attention_mask", "token_type_ids",
        )  # fmt: skip
    encoder = transformers.BertModel(config, add_pooling_layer=False)
    return PooledClassifier(encoder, 16, 3).eval(), ("input_ids", "attention_mask", "token_type_ids")


def made_batch(columns: tuple[str, ...], count: int = 6, tokens: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, tokens + 1, (count, 1), generator=generator)
    mask = (torch.arange(tokens) < lengths).long()
    ids = torch.randint(1, 20, (count, tokens), generator=generator) * mask
    types = (torch.arange(tokens) >= lengths // 2).long() * mask
    return {name: {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}[name] for name in columns}


@pytest.mark.parametrize("kind", ["pooled", "bert", "roberta"])
def test_the_written_out_network_is_the_network(kind: str) -> None:
    network, columns = made(kind)
    batch = made_batch(columns)
    packed = torch.stack([batch[name] for name in columns], 1)
    written_out = Sentences(network, columns).eval()
    assert written_out.state_dict().keys() == network.state_dict().keys()
    output = network(**batch)
    expected = output if isinstance(output, Tensor) else output.logits
    torch.testing.assert_close(written_out(packed), expected, atol=1e-5, rtol=1e-5)

    name = f"{written_out.body}.encoder.layer.1"
    cuts = cuts_by_name(written_out, [name])
    stages = stage_modules(written_out, cuts)
    ids, hidden = stages[0](packed)
    assert hidden.shape == (6, 9, 16) and torch.equal(ids, packed)
    torch.testing.assert_close(stages[1](ids, hidden), expected, atol=1e-5, rtol=1e-5)
    assert [tensor.requires_grad for tensor in boundary_tensors(stages, packed)[1]] == [False, True]
    (cut,) = balanced_cuts(written_out, 2, packed)
    assert cut.name in written_out.called_as_one
    with pytest.raises(InputError, match="embeddings are never pruned"):
        plan_pipeline(
            written_out,
            TensorSamples(packed, torch.zeros(6)),
            RECIPE,
            split=[f"{written_out.body}.encoder.layer.0"],
            activations="topk:ratio=0.1",
        )


class Tokens:
    """What TextBatches asks of a source: numbers for words, and how to pad."""

    inputs, max_length = ("input_ids", "attention_mask"), 34
    pad_token_id, pad_token_type_id, padding_side = 0, 0, "right"

    @property
    def tokenizer(self) -> Tokens:
        return self

    def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
        ids = [[len(word) for word in text.split()] for text in texts]
        return {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}


def test_a_task_on_text_is_packed_and_learns() -> None:
    from ptq.tasks.glue import Examples

    network, columns = made("roberta")
    texts = tuple((" ".join("x" * (1 + (n * k) % 7) for k in range(1, 2 + n % 6)),) for n in range(24))
    labels = tuple(len(text.split()) % 3 for (text,) in texts)
    batches = TextBatches(Examples(texts=texts, labels=labels), Tokens(), 10)  # type: ignore[arg-type]
    task = Task(name="words", model=network, calibration=batches, evaluation=batches)
    packed = with_one_input(task)
    assert with_one_input(packed) is packed
    samples = samples_of(packed.calibration)
    inputs, given = samples.batch(torch.arange(24))
    assert inputs.shape == (24, 2, 6) and tuple(given.tolist()) == labels
    assert inputs[0, 1].tolist() == [1, 0, 0, 0, 0, 0]
    short = samples_of(with_one_input(task, tokens=3).calibration)
    lengths = [len(text.split()) for (text,) in texts]
    assert len(short) == sum(length <= 3 for length in lengths)
    inputs, given = short.batch(torch.arange(len(short)))
    assert inputs.shape[2] == 3 and inputs[:, 1].sum(1).tolist() == [length for length in lengths if length <= 3]
    assert given.tolist() == [label for label, length in zip(labels, lengths, strict=True) if length <= 3]
    with pytest.raises(InputError, match="no text has at most 0 tokens, the shortest has 1"):
        with_one_input(task, tokens=0)
    assert [inputs.shape[2] for inputs, _ in packed.evaluation] == [6, 6, 6]  # type: ignore[misc]
    assert evaluate(packed.model, packed.evaluation).top1 == evaluate(network, batches).top1
    history = train(Engine(packed.model, Recipe(epochs=3, batch_size=8, learning_rate=0.05)), samples)
    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]
    with pytest.raises(InputError, match="isn't built as BERT or RoBERTa"):
        Sentences(nn.Sequential(nn.Linear(2, 2)), columns)
