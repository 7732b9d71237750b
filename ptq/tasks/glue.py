"""``--data glue:DIR``: sentences and their labels in train.tsv and dev.tsv, as GLUE's folders hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptq.errors import InputError

PREFIX = "glue:"
TRAIN, DEV = "train.tsv", "dev.tsv"
LABEL = "label"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which columns the text stands in, and what the labels mean."""

    texts: tuple[str, ...]  # one column, or two for pairs of sentences
    classes: tuple[str, ...]  # label i is class i; files hold the number or the name
    columns: tuple[str, ...] | None = None  # of a file without a header

    @property
    def needed(self) -> tuple[str, ...]:
        return (*self.texts, LABEL)


COLA = Layout(
    texts=("sentence",), classes=("unacceptable", "acceptable"), columns=("source", LABEL, "mark", "sentence")
)
RTE = Layout(texts=("sentence1", "sentence2"), classes=("entailment", "not_entailment"))


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Texts with their labels."""

    texts: tuple[tuple[str, ...], ...]  # [n], of one sentence or of two
    labels: tuple[int, ...]  # [n]

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, places: Sequence[int]) -> Examples:
        return Examples(
            texts=tuple(self.texts[place] for place in places), labels=tuple(self.labels[place] for place in places)
        )


def read_folder(specification: str, layout: Layout) -> tuple[Examples, Examples]:
    """What ``glue:DIR`` has in train.tsv and in dev.tsv."""
    folder = Path(specification.removeprefix(PREFIX)).expanduser()
    for path in (folder / TRAIN, folder / DEV):
        if not path.is_file():
            raise InputError(f"{path}: no such file: --data glue:DIR is a folder with {TRAIN} and {DEV} in it")
    return read_examples(folder / TRAIN, layout), read_examples(folder / DEV, layout)


def read_examples(path: Path, layout: Layout) -> Examples:
    """The examples of one file: tabs between the columns, no quoting, one example a line.

    A first line that names the columns is a header, which a file needs unless it has just ``layout.columns``.
    """
    lines = _lines(path)
    number, first = next(lines, (1, [""]))
    columns: Sequence[str] = first
    rows: Iterator[tuple[int, list[str]]] = lines
    if not set(layout.needed) <= set(first):
        if layout.columns is None:
            raise InputError(
                f"{path}, line {number}: no header with {', '.join(layout.needed)}: name the columns in the first line"
            )
        columns, rows = layout.columns, _lines(path)
    places = [columns.index(name) for name in layout.texts]
    label_place = columns.index(LABEL)
    texts, labels = [], []
    for number, fields in rows:
        if len(fields) != len(columns):
            raise InputError(
                f"{path}, line {number}: {len(fields)} columns where {len(columns)} are needed"
                f" ({', '.join(columns)}): put tabs between them"
            )
        text = tuple(fields[place].strip() for place in places)
        if not all(text):
            raise InputError(f"{path}, line {number}: no text in {layout.texts[text.index('')]}: fill or delete it")
        texts.append(text)
        labels.append(_label(f"{path}, line {number}", fields[label_place], layout.classes))
    if not labels:
        raise InputError(f"{path}: no examples in it: give one a line, with {', '.join(columns)}")
    return Examples(texts=tuple(texts), labels=tuple(labels))


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The number and the fields of each line that isn't empty; a line ends at a line feed and nowhere else."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise InputError(f"{path}, line {number}: not UTF-8: save the file in that encoding") from error
            if text:
                yield number, text.split("\t")


def _label(place: str, text: str, classes: tuple[str, ...]) -> int:
    if text in classes:
        return classes.index(text)
    if text.isdecimal() and int(text) < len(classes):
        return int(text)
    known = ", ".join(f"{number} ({name})" for number, name in enumerate(classes))
    raise InputError(f"{place}: label {text!r}: give {known}")
