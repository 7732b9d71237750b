"""Weights from a file into a network: safetensors, or a pickle of tensors that is read without running code."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ptq.errors import InputError, MismatchError
from ptq.tasks.references import one_line

NESTS = ("state_dict", "model_state_dict", "model", "net")  # where training scripts put the weights
PREFIXES = ("module.", "_orig_mod.")  # what DataParallel and torch.compile put before the names
SHOWN = 3

_GLOBAL = re.compile(r"GLOBAL (\S+)")  # how torch names what it refuses to import


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill the network with the weights of the file; every parameter and buffer has to be there, and no other."""
    state = read_state(path)
    expected = model.state_dict()
    missing = [name for name in expected if name not in state and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in state if name not in expected]
    problems = [_listed(kind, names) for kind, names in (("missing", missing), ("unexpected", unexpected)) if names]
    shapes = [
        f"{name} is {list(state[name].shape)} in the file and {list(tensor.shape)} in the network"
        for name, tensor in expected.items()
        if name in state and state[name].shape != tensor.shape
    ]
    types = [
        f"{name} is {state[name].dtype} in the file and {tensor.dtype} in the network".replace("torch.", "")
        for name, tensor in expected.items()
        if name in state and state[name].is_floating_point() != tensor.is_floating_point()
    ]
    if shapes:
        problems.append(_listed("shapes differ", shapes))
    if types:
        problems.append(_listed("types differ", types))
    if problems:
        raise MismatchError(
            f"{path} doesn't fit {type(model).__name__}: {'; '.join(problems)}; give the weights of this network"
        )
    model.load_state_dict(state, strict=False)  # strict but for num_batches_tracked, as checked above


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, out of any nest and without prefixes."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; give --weights a safetensors file or a PyTorch checkpoint")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    state = _unnested(content)
    if state is None:
        raise InputError(f"{path} holds no weights by name: save model.state_dict() into it")
    for prefix in PREFIXES * 2:  # twice, since either may wrap the other
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} can't be read as safetensors ({one_line(error)}): is it complete?") from error


def _read_pickle(path: Path) -> Any:
    try:
        with warnings.catch_warnings():  # the error below says it all
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail anywhere in the unpickler
        found = _GLOBAL.search(str(error))
        if found:
            raise InputError(
                f"{path} holds {found[1]}, which could run code, so it isn't read: save model.state_dict() alone"
            ) from error
        raise InputError(f"{path} can't be read as a PyTorch checkpoint: is it complete, and is it one?") from error


def _unnested(content: Any) -> dict[str, Tensor] | None:
    if not isinstance(content, Mapping):
        return None
    for nest in NESTS:
        if isinstance(content.get(nest), Mapping):
            return _unnested(content[nest])
    if content and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()):
        return dict(content)
    return None


def _listed(kind: str, entries: Sequence[str]) -> str:
    more = f", … ({len(entries)} in all)" if len(entries) > SHOWN else ""
    return f"{kind}: {', '.join(entries[:SHOWN])}{more}"
