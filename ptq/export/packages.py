"""Packages that only the export needs."""

from __future__ import annotations

from importlib.util import find_spec

from ptq.errors import InputError


def required(*packages: str, extra: str = "onnx") -> None:
    """Refuse, in one line, to go on without these packages."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise InputError(f"{', '.join(missing)}: not installed: pip install 'ptq[{extra}]'")
