"""``--model`` and ``--weights``: a network out of torchvision, timm or the user's own code."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ptq.errors import InputError
from ptq.tasks import references
from ptq.tasks.checkpoints import load_weights
from ptq.tasks.task import IMAGENET, Normalization
from ptq.vision import torchvision

FORMS = "torchvision:NAME, timm:NAME or package.module:factory"
RANDOM = "random"  # --weights random: a network to train, or one whose accuracy is of no interest
RANDOM_NOTE = "random weights: the accuracy means nothing (--weights FILE gives trained ones)"


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A network in eval mode, and what is known about its input and output."""

    model: nn.Module
    normalization: Normalization | None = None
    labels: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()


def load_model(specification: str, weights: str | None, seed: int) -> LoadedModel:
    """The network that ``--model`` names, with the weights that ``--weights`` names."""
    source, separator, name = specification.partition(":")
    loader = _SOURCES.get(source, _own) if separator else None
    if loader is None or not name:
        known = [f"torchvision:{model}" for model in torchvision("models").list_models()]
        near = references.suggestion(f"torchvision:{specification}", known) if not separator else ""
        raise InputError(f"--model {specification}: give {FORMS}{near}")
    return loader(specification, name, weights, seed)


def build(factory: Callable[[], Any], weights: str | None, seed: int) -> nn.Module:
    """Call the factory with a fixed seed, so that the same command gives the same network; then fill it from a file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = factory()
    if weights is not None and weights != RANDOM:
        load_weights(model, Path(weights))
    return model.eval()


def _torchvision(specification: str, name: str, weights: str | None, seed: int) -> LoadedModel:
    models = torchvision("models")
    if name not in models.list_models():
        raise InputError(
            f"--model {specification}: torchvision has no {name!r}{references.suggestion(name, models.list_models())}"
        )
    known = models.get_model_weights(name)
    chosen = known.__members__.get(weights) if weights is not None else None
    if chosen is None and weights is not None and weights != RANDOM and not Path(weights).exists():
        raise InputError(
            f"--weights {weights}: no such file, and {name} has no weights of that name (it has"
            f" {', '.join(known.__members__) or 'none'})"
        )
    normalization = _torchvision_normalization(chosen or getattr(known, "DEFAULT", None))
    if chosen is None:
        # detection and segmentation models fetch a pretrained backbone unless told otherwise
        with_backbone = models.list_models(models.detection) + models.list_models(models.segmentation)
        backbone = {"weights_backbone": None} if name in with_backbone else {}
        model = build(lambda: models.get_model(name, weights=None, **backbone), weights, seed)
        return LoadedModel(model=model, normalization=normalization, notes=_notes(weights))
    try:
        model = build(lambda: models.get_model(name, weights=chosen), None, seed)
    except (OSError, RuntimeError) as error:  # no network, or a download whose hash is wrong
        raise InputError(
            f"--weights {weights}: downloading it failed ({references.one_line(error)});"
            " give a file, or try again with a network"
        ) from error
    return LoadedModel(
        model=model, normalization=normalization, labels=tuple(chosen.meta.get("categories", ())) or None
    )


def _torchvision_normalization(weights: Any) -> Normalization:
    """What the published weights expect; ImageNet's usual figures where that isn't said."""
    preset: Any = weights.transforms() if weights is not None else None
    if not all(hasattr(preset, field) for field in ("mean", "std", "crop_size")):
        return IMAGENET
    return Normalization(mean=tuple(preset.mean), std=tuple(preset.std), image_size=preset.crop_size[0])


def _timm(specification: str, name: str, weights: str | None, seed: int) -> LoadedModel:
    torchvision()  # timm imports it
    try:
        timm = importlib.import_module("timm")
    except ImportError as error:
        raise InputError(f"--model {specification} needs timm: pip install timm") from error
    if not timm.is_model(name):
        raise InputError(
            f"--model {specification}: timm has no {name!r}{references.suggestion(name, timm.list_models())}"
        )
    model = build(lambda: timm.create_model(name, pretrained=False), weights, seed)
    known: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    normalization = replace(
        IMAGENET,
        mean=tuple(known.get("mean", IMAGENET.mean)),
        std=tuple(known.get("std", IMAGENET.std)),
        image_size=known.get("input_size", (3, IMAGENET.image_size))[1],
    )
    return LoadedModel(model=model, normalization=normalization, notes=_notes(weights))


def _own(specification: str, name: str, weights: str | None, seed: int) -> LoadedModel:
    del name
    if not references.is_reference(specification):
        raise InputError(f"--model {specification}: give {FORMS}")
    factory = references.load(specification, f"--model {FORMS}")
    if isinstance(factory, nn.Module):
        model = build(lambda: factory, weights, seed)
    else:
        model = build(lambda: _called(specification, factory), weights, seed)
    return LoadedModel(model=model)


def _called(specification: str, factory: Any) -> nn.Module:
    model = references.call(specification, factory, "returns an nn.Module")
    if not isinstance(model, nn.Module):
        raise InputError(f"--model {specification} returned {type(model).__name__}: return an nn.Module")
    return model


def _notes(weights: str | None) -> tuple[str, ...]:
    return (RANDOM_NOTE,) if weights in (None, RANDOM) else ()


_SOURCES: dict[str, Callable[[str, str, str | None, int], LoadedModel]] = {"torchvision": _torchvision, "timm": _timm}
