"""Files are data, never code: safetensors and JSON, whole or absent, with a schema and fingerprints."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ptq import distributed
from ptq.errors import InputError, MismatchError

METADATA_KEY = "ptq"  # safetensors metadata maps strings to strings: ours is one JSON text under this key


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name beside ``path`` to write to; it takes the place of ``path`` when all went well.

    Of several processes that share a job, all write and the file of the first counts; the others wait for it.
    """
    if distributed.rank() > 0:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / path.name
        distributed.wait()
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    except OSError as error:
        raise InputError(f"{path.parent}: can't write there ({error.strerror}): choose another folder") from error
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o666 & ~_umask())  # mkstemp's 0600 would keep colleagues from reading a shared run folder
        partial.replace(path)
        distributed.wait()
    except OSError as error:
        raise InputError(f"{path}: can't be written ({error.strerror}): free some space and try again") from error
    finally:
        partial.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{path}: not a JSON file ({error}): delete it and run the command that makes it") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: a JSON object is expected, this holds {type(content).__name__}")
    return content


def write_tensors(path: Path, kind: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors with JSON metadata; the same content gives the same bytes."""
    header = json.dumps({"kind": kind, **metadata}, sort_keys=True, ensure_ascii=False, allow_nan=False)
    # A copy each: safetensors refuses tensors that share memory, as tied weights do.
    plain = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    with replacing(path) as partial:
        try:
            save_file(plain, partial, metadata={METADATA_KEY: header})
        except SafetensorError as error:  # a full disk, in safetensors' own words
            raise OSError(errno.EIO, str(error).splitlines()[0]) from error


def read_tensors(path: Path, kind: str, schema: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what ``write_tensors`` wrote, refusing another kind of file or another schema version."""
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(METADATA_KEY)
            metadata = json.loads(header) if header else {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file: run `ptq {_MAKERS.get(kind, kind)}` first") from error
    except (OSError, SafetensorError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: not a readable safetensors file ({reason}): make it again") from error
    found = metadata.get("kind") if isinstance(metadata, dict) else None
    if found != kind:
        raise InputError(
            f"{path}: holds {found or 'no ptq data'}, not a {kind}: make it with `ptq {_MAKERS.get(kind)}`"
        )
    if metadata.get("schema") != schema:
        raise InputError(f"{path}: {kind} schema {metadata.get('schema')}, this version reads {schema}: make it again")
    return tensors, metadata


_MAKERS = {
    "calibration": "calibrate",
    "smoothed model": "smooth",
    "quantized model": "quantize",
    "packed checkpoint": "pack",
}


def load_state(model: nn.Module, state: dict[str, Tensor], path: str | Path) -> None:
    """Load a state dict that has to fit exactly."""
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise MismatchError(f"{path}: doesn't fit this model ({reason[:300]})") from error


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over names, types, shapes and bytes of a model's parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):
            continue
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)};".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def checksum(tensor: Tensor) -> int:
    """A 64-bit sum over a batch that depends on every element and its place in its sample, not on batch borders.

    ``Σ bits(x[n, i]) · (2 i + 1) mod 2^64``: batches and ranks add up to the same number in any order.
    """
    if not tensor.numel() or tensor.is_complex():
        return 0
    samples = tensor.detach().cpu().reshape(len(tensor) if tensor.dim() else 1, -1)
    bits = samples.float().contiguous().view(torch.int32) if samples.is_floating_point() else samples.contiguous()
    if bits.dtype == torch.int32 and bits.shape[1] % 2 == 0:
        bits = bits.view(torch.int64)  # two elements at a time, without a conversion: four times faster
    weights = torch.arange(bits.shape[1], dtype=torch.int64) * 2 + 1
    return int((bits.sum(0, dtype=torch.int64) * weights).sum()) % 2**64
