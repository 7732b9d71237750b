"""A race between networks on the same images: the worse ones drop out early, each with a stated confidence.

All contenders answer a growing random share of the images. At each look every pair is compared on the images that
exactly one of the two got right, by McNemar's exact test, and whoever is worse than another drops out. With K
contenders and L looks, fixed in advance, each test has the level ``δ / ((K - 1) L)``: the best contender can only be
thrown out by one of the K - 1 others at one of the L looks, so it stays in with probability 1 - δ at least.

When the share of the cost is nearly spent, the leading survivors answer all images, and the best of them wins. The
other survivors may be better, but not by more than a margin that holds with the same confidence; δ covers both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from torch import Tensor

from ptq.batches import Batch, Batches, Call, as_call, regrouped
from ptq.errors import InputError

CONFIDENCE = 0.95
SHARE = 1 / 3  # of what measuring every contender on every image costs
FIRST_LOOK, GROWTH = 1 / 20, 1.25  # the share of images of the first look, and the growth from look to look
LEAST_IMAGES = 32  # of a look
FINALISTS = 2  # at least, unless one is left before
LEAST_CONTENDERS = 7  # with six, a final of two on all images is a third of the cost already
_FOR_MARGINS = 0.2  # the part of δ that pays for how many images two networks differ on

METRICS = ("top1", "top5")  # an answer is right or wrong by these

Answers: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Why a contender is out."""

    by: float  # a contender that is better
    confidence: float  # that it is, after the correction for all tests


@dataclass
class Race:
    """The answers so far and what follows from them; the same answers always lead to the same verdict."""

    contenders: tuple[float, ...]
    images: int  # of a full measurement
    answers: dict[float, Answers] = field(default_factory=dict)  # right or wrong, in the order of the race
    confidence: float = CONFIDENCE
    share: float = SHARE
    dropped: dict[float, Dropped] = field(default_factory=dict, init=False)
    _judged: int = field(default=0, init=False)  # looks

    def __post_init__(self) -> None:
        self.answers = {contender: self.answers.get(contender, np.zeros(0, bool)) for contender in self.contenders}
        self._judge_what_is_there()

    @property
    def looks(self) -> list[int]:
        """After how many images there is a look: known before, since what is seen must not decide when to look."""
        looks = [min(self.images, max(LEAST_IMAGES, math.ceil(self.images * FIRST_LOOK)))]
        while looks[-1] < self.images:
            looks.append(min(self.images, math.ceil(looks[-1] * GROWTH)))
        return looks

    @property
    def survivors(self) -> list[float]:
        return [contender for contender in self.contenders if contender not in self.dropped]

    @property
    def seen(self) -> int:
        """Images of the last look."""
        return self.looks[self._judged - 1] if self._judged else 0

    @property
    def finalists(self) -> list[float]:
        """The survivors with the most right answers at the last look, as many as the share lets answer all images."""
        leading = sorted(self.survivors, key=lambda contender: (-self._right(contender, self.seen), contender))
        left = self.share * self._full_cost - self._cost_until(self.seen)
        return leading[: max(1, int(left // max(1, self.images - self.seen)))]

    @property
    def winner(self) -> float:
        """The finalist with the most right answers; of equal ones the leading one."""
        complete = all(len(self.answers[contender]) == self.images for contender in self.finalists)
        until = self.images if complete else self.seen
        return max(self.finalists, key=lambda contender: self._right(contender, until))

    def _right(self, contender: float, until: int) -> int:
        return int(self.answers[contender][:until].sum())

    @property
    def cost(self) -> float:
        """Evaluations over those of all contenders on all images."""
        return sum(map(len, self.answers.values())) / self._full_cost

    @property
    def _full_cost(self) -> int:
        return len(self.contenders) * self.images

    def _cost_until(self, until: int) -> int:
        """Evaluations when all survivors have answered so many images."""
        return sum(len(self.answers[contender]) for contender in self.dropped) + len(self.survivors) * until

    @property
    def _tests(self) -> int:
        return (len(self.contenders) - 1) * len(self.looks)

    def margin(self) -> float:
        """By how many points another contender may be better than the winner, at most; 0 if no other is left.

        Of the images that one of the two alone gets right, the other one wins at most the share ``θ``; on at most the
        share ``d`` of all images they differ. Both are Clopper and Pearson's bounds, and the margin is
        ``100 (2 θ - 1) d``. ``θ < 1/2`` is what throws a contender out.
        """
        winner = self.winner
        return max((self._margin(winner, other) for other in self.survivors if other != winner), default=0.0)

    def _margin(self, winner: float, other: float) -> float:
        complete = len(self.answers[winner]) == len(self.answers[other]) == self.images
        until = self.images if complete else self.seen
        if not until:
            return 100.0
        wins = self._alone_right([winner, other], until)
        theirs, either = wins[1, 0], wins[1, 0] + wins[0, 1]
        error = (1 - self.confidence) / self._tests
        theta = float(upper_bound(theirs, either, (1 - _FOR_MARGINS) * error))
        differ = float(upper_bound(either, np.int64(until), _FOR_MARGINS * error))
        return 100 * max(0.0, 2 * theta - 1) * differ

    def missing(self) -> tuple[int, list[float]] | None:
        """Until which image who still has to answer; None when the race is over.

        Survivors go on to the next look while the share also pays for a final of two on all images.
        """
        until, running = self.images, self.finalists
        if self._judged < len(self.looks) and len(self.survivors) > 1:
            look = self.looks[self._judged]
            cost = self._cost_until(look) + FINALISTS * (self.images - look)
            if not self._judged or cost <= self.share * self._full_cost:
                until, running = look, self.survivors
        waiting = [contender for contender in running if len(self.answers[contender]) < until]
        return (until, waiting) if waiting else None

    def add(self, contender: float, answers: Answers) -> None:
        """What a contender answered to the images that follow those it had."""
        self.answers[contender] = np.concatenate([self.answers[contender], answers])
        self._judge_what_is_there()

    def _judge_what_is_there(self) -> None:
        for until in self.looks[self._judged :]:
            if len(self.survivors) == 1 or any(len(self.answers[contender]) < until for contender in self.survivors):
                return
            self._judge(until)
            self._judged += 1

    def _judge(self, until: int) -> None:
        level = (1 - _FOR_MARGINS) * (1 - self.confidence) / self._tests
        running = self.survivors
        wins = self._alone_right(running, until)
        chance = sign_test(wins, wins.T)  # [i, j]: that i looks so much better than j without being so
        for column, contender in enumerate(running):
            better = int(chance[:, column].argmin())
            if chance[better, column] <= level:
                confidence = 1 - self._tests * float(chance[better, column])
                self.dropped[contender] = Dropped(by=running[better], confidence=confidence)

    def _alone_right(self, contenders: Sequence[float], until: int) -> NDArray[np.int64]:
        """``[i, j]``: how many images i got right and j wrong."""
        right = np.stack([self.answers[contender][:until] for contender in contenders]).astype(np.float32)
        both = right @ right.T  # whole numbers below 2^24: exact
        alone: NDArray[np.int64] = (right.sum(1)[:, None] - both).astype(np.int64)
        return alone

    def to_json(self) -> dict[str, Any]:
        entries = []
        for contender, answers in self.answers.items():
            dropped = self.dropped.get(contender)
            entries.append(
                {
                    "alpha": contender,
                    "images": len(answers),
                    "right": int(answers.sum()),
                    "dropped": asdict(dropped) if dropped else None,
                    "answers": np.packbits(answers).tobytes().hex(),
                }
            )
        return {
            "images": self.images,
            "confidence": self.confidence,
            "share": self.share,
            "finished": self.missing() is None,
            "winner": self.winner,
            "finalists": self.finalists,
            "survivors": self.survivors,
            "margin": self.margin(),
            "cost": self.cost,
            "contenders": entries,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Race:
        answers = {entry["alpha"]: _unpacked(entry["answers"], entry["images"]) for entry in content["contenders"]}
        return cls(tuple(answers), content["images"], answers, content["confidence"], content["share"])


def _unpacked(text: str, count: int) -> Answers:
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=count).astype(bool)


def sign_test(wins: NDArray[np.int64], losses: NDArray[np.int64]) -> NDArray[np.float64]:
    """McNemar's exact test, one-sided: the probability of so many wins or more if both were equally likely.

    ``P(Binomial(wins + losses, 1/2) >= wins)``; 1 where nothing was won.
    """
    return np.where(wins > 0, special.betainc(np.maximum(wins, 1), losses + 1, 0.5), 1.0)


def upper_bound(successes: NDArray[np.int64], trials: NDArray[np.int64], error: float) -> NDArray[np.float64]:
    """Clopper and Pearson's upper bound of a probability: the p with ``P(Binomial(n, p) <= k) = error``; 1 if k = n."""
    failures = np.maximum(trials - successes, 1)
    return np.where(successes < trials, special.betaincinv(successes + 1, failures, 1 - error), 1.0)


def check_race(contenders: Sequence[float], metric: str) -> None:
    """Refuse what can't be raced."""
    if metric not in METRICS:
        raise InputError(f"a race compares right answers, but this task is judged by {metric}: sweep without --race")
    if len(set(contenders)) < LEAST_CONTENDERS or len(set(contenders)) < len(contenders):
        raise InputError(
            f"a race of {len(contenders)} α saves nothing: give {LEAST_CONTENDERS} or more, all different, or no --race"
        )


def hold(race: Race, data: Shuffled, right: Callable[[float, Stretch], Answers]) -> Iterator[float]:
    """Run a race to its end, or on from where it is; gives each contender after it has answered once more.

    ``right(contender, stretch)`` says for each sample whether its answer is right.
    """
    while (missing := race.missing()) is not None:
        until, waiting = missing
        start = min(len(race.answers[contender]) for contender in waiting)
        part = data.between(start, min(until, start + data.affordable))
        for contender in waiting:
            if len(race.answers[contender]) == start:  # an interrupted race may have gone further
                race.add(contender, right(contender, part))
                yield contender


@dataclass(frozen=True)
class Stretch:
    """Some samples of a data set."""

    indices: NDArray[np.int64]  # in the data set, ascending
    batches: list[Batch]  # the samples, in that order


class Shuffled:
    """A data set in a fixed random order, of which any stretch can be had; data may be sorted by class."""

    def __init__(self, batches: Batches, memory: int, seed: int = 0) -> None:
        self._batches = batches
        calls = [as_call(batch) for batch in islice(batches, 1)]
        sizes = [as_call(batch).samples for batch in batches]
        self._batch_size = max(sizes, default=0)
        self._places = np.random.default_rng(seed).permutation(sum(sizes))  # of each sample
        self.affordable = max(1, memory // max(1, sum(map(_bytes_of_a_sample, calls))))  # samples at once

    def __len__(self) -> int:
        return len(self._places)

    def between(self, start: int, stop: int) -> Stretch:
        """The samples with places from start to stop, sorted as in the data set, in batches of the usual size."""
        chosen = (start <= self._places) & (self._places < stop)
        first, parts = 0, []
        for batch in self._batches:
            size = as_call(batch).samples
            here = np.flatnonzero(chosen[first : first + size])
            if len(here):
                parts.append(_taken(batch, torch.from_numpy(here)))
            first += size
        return Stretch(np.flatnonzero(chosen), list(regrouped(parts, self._batch_size)))


def _bytes_of_a_sample(call: Call) -> int:
    tensors = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) // max(1, call.samples)


def _taken(batch: Batch, chosen: Tensor) -> Batch:
    if isinstance(batch, Mapping):
        return {key: _taken(value, chosen) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(_taken(value, chosen) for value in batch)
    return batch[chosen] if isinstance(batch, Tensor) and batch.dim() else batch
