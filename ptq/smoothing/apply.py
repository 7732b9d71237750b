"""Smooth a copy of a model, keep a ledger of what happened to each layer, and prove that nothing changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ptq import channels
from ptq.attention import split_attention, splitting_attention
from ptq.batches import Batches
from ptq.batchnorm import folded_parameters
from ptq.calibration import Calibration, LayerStatistics, calibrate
from ptq.errors import InputError
from ptq.graph import ChannelGraph
from ptq.smoothing.equalization import equalizing_factors
from ptq.smoothing.factors import checked_alpha
from ptq.smoothing.fold import write_factors
from ptq.smoothing.ledger import ledger_entry
from ptq.smoothing.modules import is_smoothed
from ptq.smoothing.proof import prove_equivalence
from ptq.smoothing.result import Alpha, Explicit, Smoothed
from ptq.smoothing.search import Choice, Member, output_l1, search_group, shared_factors
from ptq.storage import fingerprint

Form: TypeAlias = Literal["fold", "hook"]


def smooth(
    model: nn.Module,
    calibration: Calibration,
    alpha: Alpha = 0.5,
    *,
    form: Form = "fold",
    explicit: Explicit = "allow",
    weights: int | None = 8,
    activations: int | None = 8,
    clip: bool = False,
    batches: Batches | None = None,
    proof_batches: int = 2,
) -> Smoothed:
    """Smooth a copy of the model: divide what its layers read by s, multiply their weights by s.

    In the form ``fold`` the division goes into whatever produces a tensor and costs nothing at run time; layers that
    read one tensor share their factors. Where that is impossible, ``explicit="allow"`` divides in a hook in front of
    the layer, and ``"never"`` leaves the layer as it is. The form ``hook`` divides in front of every layer.

    ``alpha="auto"`` chooses α, or none, for each group of layers that share a factor by the error of the layers'
    outputs at these numbers of bits, on rows sampled by the calibration; ``clip`` also chooses how much of the range
    of activations and weights is kept. ``alpha="equalize"`` looks at no activations: the weights that make a channel
    and those that read it get one size (cross-layer equalization), which only folding can do.

    With ``batches`` the equivalence is proven on the first ``proof_batches`` of them, and a calibration with
    histograms gets new ones (a histogram of the whole tensor can't be rescaled channel by channel).
    """
    check_smoothing(alpha, form, explicit, clip=clip)
    if any(is_smoothed(layer) for _, layer in channels.layers_of(model)):
        raise InputError("the model is smoothed already: undo() it first, or smooth the original")
    calibration.check(model)
    smoothed = copy.deepcopy(model)
    split_attention(smoothed)
    graph = calibration.graph if form == "fold" else ChannelGraph(batchnorms=calibration.batchnorms)
    layers = dict(channels.layers_of(smoothed))
    owners = channels.weight_owners(smoothed)
    skipped = {
        name: reason
        for name, layer in layers.items()
        if (
            reason := _reason_to_skip(calibration.layers.get(name))
            or channels.why_fixed(name, layer, owners)
            or calibration.graph.fixed.get(name)
        )
    }
    folded = torch.ones(1 + max((int(classes.max()) for classes in graph.readers.values()), default=0))
    factors: dict[str, Tensor] = {}
    chosen: dict[str, Choice] = {}
    groups = list(_groups(layers, graph, skipped, explicit=explicit == "allow"))
    if alpha == "equalize":
        folded = equalizing_factors(smoothed, graph, calibration.batchnorms)
        unmade = [
            name for name in graph.readers if graph.foldable(name) and bool((folded[graph.readers[name]] == 1).all())
        ]
        skipped = dict.fromkeys(unmade, "no layer's weights make what it reads") | skipped
    else:
        for group in groups:
            members = [_member(smoothed, name, layers[name], calibration, graph) for name in group]
            choice = _choice(members, alpha, weights, activations, clip=clip)
            chosen |= dict.fromkeys(group, choice)
            if choice.alpha is None:
                continue
            for name, member, factor in zip(group, members, shared_factors(members, choice.alpha), strict=True):
                factors[name] = factor
                if graph.foldable(name):
                    folded[member.classes] = factor
    for name, classes in graph.readers.items():  # what arrives scaled has to be made good, smoothed or not
        if name not in factors and bool((folded[classes] != 1).any()):
            factors[name] = folded[classes]
    undo = write_factors(smoothed, graph, folded, factors)
    ledger = [
        ledger_entry(name, layer, calibration, graph, skipped.get(name), chosen.get(name), factors.get(name), groups)
        for name, layer in layers.items()
    ]
    if alpha != "auto" and not factors:
        reasons = "; ".join(f"{entry.layer}: {entry.reason}" for entry in ledger[:3])
        raise InputError(f"no layer was smoothed ({reasons})")
    proof = None
    rescaled = _rescaled(calibration, factors, chosen, smoothed)
    if batches is not None:
        proof = prove_equivalence(
            model,
            smoothed,
            batches,
            limit=proof_batches,
            output_factors={name: folded[classes] for name, classes in graph.producers.items()},
        )
        if any(layer.histogram is not None for layer in calibration.layers.values()):
            rescaled = _with_histograms(
                rescaled, calibrate(smoothed, batches, calibration.observer, calibration.batches)
            )
    return Smoothed(
        model=smoothed,
        calibration=rescaled,
        factors=factors,
        ledger=ledger,
        alpha=alpha,
        explicit=explicit,
        proof=proof,
        curves={name: {a: errors[name] for a, errors in choice.curve.items()} for name, choice in chosen.items()},
        _undo=undo,
    )


def sampled_errors(
    model: nn.Module,
    calibration: Calibration,
    weights: int | None,
    activations: int | None,
    smoothed: Smoothed | None = None,
) -> dict[str, float]:
    """The relative L1 error of what each layer computes by itself, on the rows that the calibration sampled.

    ``model`` and ``calibration`` are those before smoothing. No data is run: a layer is a few small matrix products.
    """
    errors = {}
    with splitting_attention(model):
        for name, layer in channels.layers_of(model):
            if name not in calibration.layers:
                continue
            statistics = (smoothed.calibration if smoothed else calibration).layers[name]
            factor = smoothed.factors.get(name) if smoothed else None
            errors[name] = output_l1(
                _member(model, name, layer, calibration, ChannelGraph()),
                torch.ones(statistics.channels) if factor is None else factor,
                weights,
                activations,
                statistics.activation_clip,
                statistics.weight_clip,
            )
    return errors


def check_smoothing(alpha: float | str, form: str, explicit: str, *, clip: bool) -> None:
    """Refuse what can't be smoothed, before any work is done."""
    if alpha == "equalize" and form == "hook":
        raise InputError("alpha = 'equalize' changes what makes a channel: it needs the form fold")
    if alpha != "auto":
        if alpha != "equalize":
            checked_alpha(alpha)  # type: ignore[arg-type]
        if clip:
            raise InputError("clip: ratios are searched together with α: use alpha='auto'")
    if form not in get_args(Form):
        raise InputError(f"form = {form!r}: choose fold or hook")
    if explicit not in get_args(Explicit):
        raise InputError(f"explicit = {explicit!r}: choose allow or never")
    if form == "hook" and explicit == "never":
        raise InputError("form 'hook' divides explicitly in front of every layer: it can't be never")


def _groups(
    layers: dict[str, channels.Layer], graph: ChannelGraph, skipped: dict[str, str], *, explicit: bool
) -> Iterator[list[str]]:
    """Layers whose factors are chosen together: those that share classes or read one tensor; others by themselves."""
    for group in graph.groups():
        if any(name not in skipped for name in group):
            yield group
    if explicit:
        alone = [name for name in layers if name not in skipped and not graph.foldable(name)]
        for name in alone:
            family = next((names for names in graph.siblings if name in names), [name])
            together = [sibling for sibling in family if sibling in alone]
            if together[0] == name:
                yield together


def _member(
    model: nn.Module, name: str, layer: channels.Layer, calibration: Calibration, graph: ChannelGraph
) -> Member:
    statistics = calibration.layers[name]
    rows = statistics.rows if statistics.rows is not None else torch.empty(0, statistics.channels, 1)
    return Member(
        name=name,
        layer=layer,
        weight=_weight_to_quantize(model, layer, calibration.batchnorms.get(name)),
        rows=rows,
        minimum=statistics.minimum,
        maximum=statistics.maximum,
        activation_absmax=statistics.activation_absmax,
        classes=graph.readers[name] if graph.foldable(name) else torch.arange(statistics.channels),
    )


def _choice(
    members: Sequence[Member],
    alpha: float | Literal["auto"],
    weights: int | None,
    activations: int | None,
    *,
    clip: bool,
) -> Choice:
    if alpha == "auto":
        return search_group(members, weights, activations, clip=clip)
    whole = {member.name: 1.0 for member in members}
    return Choice(alpha=alpha, activation_clips=whole, weight_clips=whole, error=float("nan"), curve={})


def _weight_to_quantize(model: nn.Module, layer: channels.Layer, batchnorm_name: str | None) -> Tensor:
    """The weight as it will be quantized, with the BatchNorm that will be folded into it.

    Its factors decide how the channels of one output compare; leaving them out costs ResNet-20 at W4A4 two points.
    """
    batchnorm = model.get_submodule(batchnorm_name) if batchnorm_name else None
    return folded_parameters(layer, batchnorm)[0] if isinstance(batchnorm, _BatchNorm) else layer.weight


def _reason_to_skip(statistics: LayerStatistics | None) -> str | None:
    if statistics is None:
        return "never ran during calibration"
    if not bool((statistics.activation_absmax > 0).any()):
        return "its input was always zero"
    if not bool((statistics.weight_absmax > 0).any()):
        return "its weight is zero"
    return None


def _rescaled(
    calibration: Calibration, factors: dict[str, Tensor], chosen: dict[str, Choice], smoothed: nn.Module
) -> Calibration:
    """The statistics after smoothing: ranges and rows divided by s, weights measured again; no histograms."""
    layers = dict(channels.layers_of(smoothed))

    def rescale(name: str, statistics: LayerStatistics) -> LayerStatistics:
        factor = factors.get(name, torch.ones(statistics.channels))
        minimum, maximum = statistics.minimum / factor, statistics.maximum / factor
        choice = chosen.get(name)
        return replace(
            statistics,
            minimum=minimum,
            maximum=maximum,
            activation_absmax=channels.absmax_of(minimum, maximum),
            weight_absmax=channels.weight_absmax(layers[name].weight, layers[name]).float().cpu(),
            histogram=None,
            rows=None if statistics.rows is None else (statistics.rows / factor[:, None]).half(),
            activation_clip=choice.activation_clips[name] if choice else 1.0,
            weight_clip=choice.weight_clips[name] if choice else 1.0,
        )

    return replace(
        calibration,
        layers={name: rescale(name, statistics) for name, statistics in calibration.layers.items()},
        model_fingerprint=fingerprint(smoothed),
    )


def _with_histograms(calibration: Calibration, collected: Calibration) -> Calibration:
    return replace(
        calibration,
        layers={
            name: replace(statistics, histogram=collected.layers[name].histogram)
            for name, statistics in calibration.layers.items()
        },
    )
