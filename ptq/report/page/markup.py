"""HTML and SVG elements in which everything that isn't markup already is escaped."""

from __future__ import annotations

from markupsafe import Markup, escape


def tag(name: str, *content: str, **attributes: object) -> Markup:
    """An element: ``class_`` is class, ``stroke_width`` stroke-width, and what is None is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(escape(part) for part in content)
    return Markup(f"<{name}{written}>{inside}</{name}>")


def short(value: object) -> str:
    """A number with two digits behind the point at most: a hundredth of a pixel is enough."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def code(command: str) -> Markup:
    """A command that wraps between its words, not inside ``--option``."""
    return tag("code", Markup(" ").join(tag("span", word) for word in command.split(" ")))


def breakable(name: str) -> Markup:
    """A dotted name that may wrap behind its dots."""
    return Markup(".<wbr>").join(name.split("."))
