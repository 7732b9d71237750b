"""The layers of a block refined one by one, then learned together."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from ptq import channels
from ptq.batches import Call
from ptq.refinement.learning import Recipe, fresh, learn
from ptq.refinement.walking import Arrival, LayerRefiner, Networks, Way, walk, ways_through

RECIPE = Recipe(steps=400)


def refine_blocks(
    refiner: LayerRefiner, given: Sequence[Call], names: Sequence[str], blocks: Mapping[str, Sequence[str]]
) -> None:
    """Refine these layers in the order of execution; those of a block are learned before the next one starts.

    The network as a whole isn't learned: on the images that it was trained on its logits say too little, and what
    they teach doesn't reach others.
    """
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
    before, error = copy.deepcopy(quantized.state_dict()), squared_error(quantized, given, targets)
    _learn_and_round(refiner, block, names, ways, given, targets)
    if squared_error(quantized, given, targets) >= error:
        quantized.load_state_dict(before)


def _learn_and_round(
    refiner: LayerRefiner,
    block: str,
    names: Sequence[str],
    ways: Sequence[Way],
    given: Sequence[Call],
    targets: Sequence[Tensor],
) -> None:
    """Learn the block, then round its weights again: towards the learned block in place of the float one."""
    quantized = refiner.networks.quantized.get_submodule(block)
    within = [name.removeprefix(f"{block}.") for name in names]
    learn(
        quantized,
        {name: layer for name, layer in channels.layers_of(quantized) if name in within},
        given,
        targets,
        RECIPE,
        refiner.seed,
    )
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


def squared_error(block: nn.Module, given: Sequence[Call], targets: Sequence[Tensor]) -> float:
    """Of what the block answers to these calls."""
    errors = (fresh(call).run(block) - target for call, target in zip(given, targets, strict=True))
    return sum(float(error.square().sum()) for error in errors)
