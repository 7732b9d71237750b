"""The layers of a block refined one by one, then learned together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from ptq import channels
from ptq.batches import Call
from ptq.refinement.learning import Recipe, drawn_parts, fresh, learn
from ptq.refinement.walking import Arrival, LayerRefiner, Networks, Way, walk, ways_through

RECIPE = Recipe(steps=400)


def refine_blocks(
    refiner: LayerRefiner, given: Sequence[Call], names: Sequence[str], blocks: Mapping[str, Sequence[str]]
) -> None:
    """Refine these layers in the order of execution; those of a block are learned before the next one starts."""
    block_of = {layer: block for block, layers in blocks.items() for layer in layers}
    places = list(dict.fromkeys(block_of.get(name, name) for name in names))
    alone = [name for name in names if name not in block_of]
    with refiner.networks.stopping_at(alone, list(blocks)):
        for place, arrived in walk(ways_through(refiner.networks, given), places):
            if place in blocks:
                _refine_block(refiner, place, blocks[place], arrived)
            else:
                refiner.refine_layer(place, arrived)


def _refine_block(refiner: LayerRefiner, block: str, names: Sequence[str], arrived: Sequence[Arrival]) -> None:
    reference, quantized = refiner.networks.modules(block)
    ways = [
        replace(
            arrival.way,
            through_reference=partial(fresh(arrival.reference).run, reference),
            through_quantized=partial(fresh(arrival.quantized).run, quantized),
        )
        for arrival in arrived
    ]
    refiner.refine(ways, names)
    given = [arrival.quantized for arrival in arrived]
    targets = [fresh(arrival.reference).run(reference) for arrival in arrived]
    with kept_if_better(quantized, partial(squared_error, quantized, list(zip(given, targets, strict=True)))):
        _learn_and_round(refiner, block, names, ways, given, targets)


@contextmanager
def kept_if_better(module: nn.Module, error: Callable[[], float], error_before: float | None = None) -> Iterator[None]:
    """What is changed inside stays only if the error is less than before, which need not be measured if it is known."""
    before, error_before = copy.deepcopy(module.state_dict()), error() if error_before is None else error_before
    yield
    if not error() < error_before:
        module.load_state_dict(before)


def _learn_and_round(
    refiner: LayerRefiner,
    block: str,
    names: Sequence[str],
    ways: Sequence[Way],
    given: Sequence[Call],
    targets: Sequence[Tensor],
) -> None:
    """Learn a block, then round its weights again: towards the learned block in place of the float one.

    ``given`` are the block's calls, one for each way, and ``targets`` what the float one answers.
    """
    quantized = refiner.networks.quantized.get_submodule(block)
    within = [name.removeprefix(f"{block}.") for name in names]
    layers = {name: layer for name, layer in channels.layers_of(quantized) if name in within}
    learn(quantized, layers, drawn_parts(given, targets, RECIPE, refiner.seed), RECIPE)
    learned = copy.deepcopy(quantized)
    rounder = LayerRefiner(
        Networks(learned, quantized),
        bits={short: refiner.bits[name] for short, name in zip(within, names, strict=True)},
        calibration=None,
        rows=refiner.rows,
        seed=refiner.seed,
    )
    rounder.refine(
        [
            replace(
                way,
                through_reference=partial(fresh(call).run, learned),
                through_quantized=partial(fresh(call).run, quantized),
            )
            for way, call in zip(ways, given, strict=True)
        ],
        within,
    )


def squared_error(block: nn.Module, examples: Iterable[tuple[Call, Tensor]]) -> float:
    """Of what the block answers."""
    return sum(float((fresh(call).run(block) - target).square().sum()) for call, target in examples)
