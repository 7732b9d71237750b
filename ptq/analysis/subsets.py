"""Parts of labelled data: one tells what to try, another judges it."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from itertools import islice

from ptq.batches import LABEL_KEYS, Batch, Batches, Call, as_call


def count_samples(batches: Batches) -> int | None:
    """How many samples there are, if all batches but the last are as long as the first; None if nobody can tell."""
    if not isinstance(batches, Sized):
        return None
    first = next(iter(batches), None)
    return 0 if first is None else len(batches) * as_call(first).samples


def after(batches: Batches, samples: int) -> Batches:
    """What follows the first so many samples; everything, if nothing follows them."""
    rest = _After(batches, samples)
    return batches if next(iter(rest), None) is None else rest


@dataclass(frozen=True)
class _After:
    batches: Batches
    samples: int

    def __iter__(self) -> Iterator[Batch]:
        left = self.samples
        for batch in self.batches:
            call = as_call(batch)
            if not left:
                yield batch
            elif call.samples > left:
                yield from map(_as_batch, islice(call.split(left), 1, None))
            left = max(0, left - call.samples)


def _as_batch(call: Call) -> Batch:
    return (*call.args, call.labels) if call.args else {**call.kwargs, LABEL_KEYS[0]: call.labels}
