"""``package.module:name``: a reference to the user's own code, and help for names that don't exist."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ptq.errors import InputError, PtqError
from ptq.vision import torchvision

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_reference(text: str) -> bool:
    return _REFERENCE.fullmatch(text) is not None


def load(reference: str, forms: str) -> Any:
    """What ``package.module:name`` refers to; the current directory is searched too.

    ``forms`` says what else could have been meant, where there is no such module.
    """
    module_name, _, attribute = reference.partition(":")
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    torchvision()  # so that a plain "import torchvision" in the user's module works beside a CPU-only torch
    importlib.invalidate_caches()
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise InputError(
                f"{reference}: no module {error.name!r} here or among the installed packages; give {forms}"
            ) from error
        raise InputError(f"{reference}: importing it needs {error.name!r}, which isn't installed") from error
    except Exception as error:
        raise InputError(f"{reference}: importing it failed with {one_line(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name in vars(found) if not name.startswith("_")]
            raise InputError(f"{reference}: {module_name} has no {part!r}{suggestion(part, names)}")
        found = getattr(found, part)
    return found


def call(reference: str, factory: Any, wanted: str) -> Any:
    """Call the user's factory without arguments; what goes wrong inside becomes one line that names it."""
    if not callable(factory):
        raise InputError(f"{reference} is a {type(factory).__name__}: give a function without arguments that {wanted}")
    function: Callable[[], Any] = factory
    try:
        return function()
    except PtqError:
        raise
    except Exception as error:
        raise InputError(f"{reference}() failed with {one_line(error)}: it is called without arguments") from error


def suggestion(name: str, known: Iterable[str], count: int = 3) -> str:
    """``: did you mean a, b?``, or nothing where no known name is near."""
    close = difflib.get_close_matches(name.lower(), list(known), n=count, cutoff=0.5)
    return f": did you mean {', '.join(close)}?" if close else ""


def one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
