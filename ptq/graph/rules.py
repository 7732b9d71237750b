"""How each operation hands on the labels of what it reads: ``f(x / s) = f(x) / s``, for whom and under what condition.

A rule returns the labels of the result (a list for several), or None if nothing that the operation reads may be scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from ptq import channels
from ptq.graph.labels import ANY, FIXED, compressed

if TYPE_CHECKING:
    from ptq.graph.watch import Watch

Labels: TypeAlias = Tensor | list[Tensor | None] | None


_SECOND_NAMES = {
    **dict.fromkeys(("concat", "concatenate"), "cat"),
    **dict.fromkeys(("divide", "true_divide"), "div"),
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "absolute": "abs",
    "clip": "clamp",
    "view_as": "view",
    "reshape_as": "reshape",
    "moveaxis": "movedim",
    "swapdims": "swapaxes",
}
_TAKE_ONE_VALUE = {"to", "type_as", "expand_as", "view", "reshape"}  # and of another tensor its shape or type
_TAKE_NO_VALUE = {
    *(f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn")),
    *(f"new_{kind}" for kind in ("empty", "zeros", "ones", "full")),
}


class Op:
    """One operation as the dispatcher saw it."""

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        self.func, self.args, self.kwargs, self.result = func, args, kwargs, result
        self.name: str = func.overloadpacket.__name__
        self._in_place = self.name.endswith("_") and not self.name.endswith("__")
        self.layer: str | None = None  # the layer whose operation this is, if a rule finds out
        self.tensors = list(_tensors_in((*args, *kwargs.values())))

    @cached_property
    def kind(self) -> str:
        """The name; that of ``relu_`` is ``relu``, too."""
        name = self.name.removesuffix("_") if self._in_place else self.name
        return _SECOND_NAMES.get(name, name)

    @cached_property
    def read(self) -> list[Tensor]:
        """Tensors whose values it reads."""
        if self.kind in _TAKE_NO_VALUE:
            return []
        return self.tensors[:1] if self.kind in _TAKE_ONE_VALUE else self.tensors

    @property
    def written(self) -> list[Tensor]:
        """Tensors of before that it writes into."""
        return [self.args[0]] if self._in_place else list(_tensors_in([self.kwargs.get("out")]))

    @property
    def outputs(self) -> list[Any]:
        return list(self.result) if isinstance(self.result, (list, tuple)) else [self.result]

    def argument(self, index: int, default: Any = None) -> Any:
        return self.args[index] if index < len(self.args) else default


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments and in its lists of tensors."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _along(labels: Tensor, axis: int, result: Tensor) -> Tensor:
    """Labels ``[C]`` repeated over a tensor that has its channels at ``axis``."""
    return channels.over_inputs(labels, axis, result).expand(result.shape)


# Layers and norms: producers


def _layer(watch: Watch, op: Op) -> Labels:
    x, weight = op.args[:2]
    name = watch.running_layer(weight)
    if name is None:
        return None
    op.layer, layer = name, watch.layers[name]
    axis = channels.channel_axis(layer) % x.dim()
    labels, value = watch.labels(x), watch.value(x)
    if value is not None:
        watch.reads.setdefault(name, []).append(value)
    if labels is None:
        read = torch.full((channels.input_channels(layer),), FIXED, dtype=torch.int32)
        watch.origins.setdefault(name, f"it reads {value.origin if value else 'an input of the model'}")
    else:
        others = [dim for dim in range(x.dim()) if dim != axis]
        read = watch.equalities.constant_along(labels, others, f"{name} reads it across channels").flatten()
    if name in watch.inputs:
        read = watch.equalities.equate(watch.inputs[name], read, f"{name} also reads what can't be scaled")
    watch.inputs[name] = read
    if name not in watch.outputs:
        watch.outputs[name] = watch.equalities.fresh(channels.output_channels(layer))
        if (reason := watch.why_bias_fixed(name)) is not None:
            watch.equalities.fix(watch.outputs[name], reason)
    return _along(watch.outputs[name], channels.channel_axis(layer), op.result)


def _batch_norm(watch: Watch, op: Op) -> Labels:
    x, weight, bias, mean, _, training = op.args[:6]
    if training or mean is None:
        return None
    if isinstance(watch.modules[watch.active], _BatchNorm) and (value := watch.value(x)) is not None:
        value.batchnorm = watch.active
    return _affine(watch, x, weight, bias, lambda labels: _along(labels, 1, op.result))


def _layer_norm(watch: Watch, op: Op) -> Labels:
    return _affine(watch, op.args[0], op.argument(2), op.argument(3), lambda labels: labels.expand(op.result.shape))


def _rms_norm(watch: Watch, op: Op) -> Labels:
    return _affine(watch, op.args[0], op.argument(2), None, lambda labels: labels.expand(op.result.shape))


def _group_norm(watch: Watch, op: Op) -> Labels:
    return _affine(watch, op.args[0], op.argument(2), op.argument(3), lambda labels: _along(labels, 1, op.result))


def _affine(watch: Watch, x: Tensor, weight: Any, bias: Any, spread: Callable[[Tensor], Tensor]) -> Labels:
    """``norm(x) · weight + bias``: the input can't be scaled; weight and bias can carry the output's factor."""
    labels, shift = watch.parameter(weight), watch.parameter(bias)
    if labels is None or (bias is not None and shift is None):
        return None
    if shift is not None:
        labels = watch.equalities.equate(labels, shift, "")
    watch.stop([x], f"the norm{watch.place} reads it")
    return spread(labels)


# Operations that act on each element alone


def _same(watch: Watch, op: Op) -> Labels:
    return watch.labels(op.args[0])


def _prelu(watch: Watch, op: Op) -> Labels:
    x, slope = op.args
    watch.stop([slope], f"it is the slope of prelu{watch.place}")
    return watch.labels(x)


def _dropout(watch: Watch, op: Op) -> Labels:
    return None if op.argument(2, True) else _same(watch, op)


def _convert(watch: Watch, op: Op) -> Labels:
    return _same(watch, op) if op.result.is_floating_point() else None


def _clamp(watch: Watch, op: Op) -> Labels:
    """A bound of 0 has no scale. ReLU6 and Hardtanh get bounds per channel if they are modules, to be exchanged."""
    low = op.argument(1, op.kwargs.get("min"))
    high = op.argument(2, op.kwargs.get("max"))
    labels, name = watch.labels(op.args[0]), watch.active
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return None
    if labels is None or (low == 0 and high is None):
        return labels
    module = watch.modules[name]
    if type(module) not in (nn.ReLU6, nn.Hardtanh):
        return None
    varying = [dim for dim in range(labels.dim()) if labels.stride(dim) != 0 and labels.shape[dim] > 1]
    axis = (varying[0] if len(varying) == 1 else 1) - labels.dim()
    reason = f"{type(module).__name__} ({name}) has one bound for several channels"
    others = [dim for dim in range(labels.dim()) if dim != axis % labels.dim()]
    bounds = watch.equalities.constant_along(labels, others, reason).flatten()
    if name in watch.clamps:
        known_axis, known = watch.clamps[name]
        if len(known) != len(bounds) or known_axis != axis:
            watch.equalities.fix(known, reason)
            return None
        bounds = watch.equalities.equate(known, bounds, reason)
    watch.clamps[name] = axis, bounds
    return labels


def _add(watch: Watch, op: Op) -> Labels:
    x, y = op.args[:2]
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return watch.labels(x) if y == 0 else None
    a, b = watch.labels_of_any(x), watch.labels_of_any(y)
    if a is None or b is None:
        return None
    return watch.equalities.equate(a, b, f"what is added to it{watch.place} can't be scaled")


def _multiply(watch: Watch, op: Op) -> Labels:
    """``x · y``: one of the two carries the factor, a parameter if there is one, and the other stays as it is."""
    x, y = op.args[:2]
    if op.kwargs.get("rounding_mode") is not None:
        return None
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return watch.labels(x)
    candidates = [(x, y)] if op.kind == "div" else [(x, y), (y, x)]
    for labels_of in (watch.parameter, watch.labels):
        for carrier, other in candidates:
            labels = labels_of(carrier)
            if labels is not None:
                watch.stop([other], f"it is multiplied{watch.place}")
                return labels.expand(op.result.shape)
    return None


# Operations that mix elements


def _pool(spatial: int) -> Callable[[Watch, Op], Labels]:
    """Windows over the last axes: what is pooled carries one factor."""

    def rule(watch: Watch, op: Op) -> Labels:
        labels = watch.labels(op.args[0])
        if labels is None:
            return None
        axes = [labels.dim() - 1 - i for i in range(spatial)]
        pooled = watch.equalities.constant_along(labels, axes, f"{op.kind}{watch.place} mixes channels")
        first, *others = op.outputs
        return [pooled.expand(first.shape), *(None for _ in others)]

    return rule


def _reduce(watch: Watch, op: Op) -> Labels:
    labels, dims = watch.labels(op.args[0]), op.argument(1)
    if labels is None or not dims or not isinstance(op.result, Tensor):
        return None
    dims = [dim % labels.dim() for dim in dims]
    one = watch.equalities.constant_along(labels, dims, f"{op.kind}{watch.place} mixes channels")
    if op.result.dim() < one.dim():
        one = one[tuple(0 if dim in dims else slice(None) for dim in range(one.dim()))]
    return one


def _matmul(watch: Watch, op: Op) -> Labels:
    """``a @ b`` with b scaled along its columns: attention weights times values."""
    a, b = op.args[:2]
    labels = watch.labels(b)
    if labels is None or min(a.dim(), b.dim()) < 2:
        return None
    watch.stop([a], f"it is multiplied{watch.place}")
    return _tokens_mixed(watch, labels, op.result)


def _attention(watch: Watch, op: Op) -> Labels:
    query, _, value = op.args[:3]
    labels = watch.labels(value)
    if labels is None or query.shape[:-2] != value.shape[:-2]:
        return None
    watch.stop([*op.args[:2], *op.args[3:], *op.kwargs.values()], f"attention{watch.place} compares it")
    return _tokens_mixed(watch, labels, op.result)


def _tokens_mixed(watch: Watch, labels: Tensor, result: Tensor) -> Tensor:
    one = watch.equalities.constant_along(labels, [labels.dim() - 2], f"attention{watch.place} mixes channels")
    return one.expand(result.shape)


# Operations that only move data


def _move(watch: Watch, op: Op) -> Labels:
    """The same operation on the labels."""
    known = {id(x): watch.labels_of_any(x) for x in op.tensors}
    if all(labels is None for labels in known.values()):
        return None
    watch.stop((x for x in op.read if known[id(x)] is None), f"{op.kind}{watch.place} reads it")

    def labels_of(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        labels = known[id(x)]
        # detach: transpose_() and its like shall not change the labels of others
        return torch.tensor(FIXED, dtype=torch.int32).expand(x.shape) if labels is None else labels.detach()

    try:
        moved = op.func(*tree_map(labels_of, op.args), **op.kwargs)
    except RuntimeError:  # no form of it for integers, or a view that the labels don't allow
        return None
    return [compressed(part) for part in moved] if isinstance(moved, (list, tuple)) else compressed(moved)


def _reshape(watch: Watch, op: Op) -> Labels:
    """A view of a tensor need not be one of its labels."""
    labels = watch.labels_of_any(op.args[0])
    if labels is None or op.result.dtype != op.args[0].dtype:
        return None
    return compressed(labels.reshape(op.result.shape))


def _pad(watch: Watch, op: Op) -> Labels:
    labels, sizes = watch.labels(op.args[0]), op.args[1]
    mode, value = (op.argument(2, "constant"), op.argument(3)) if op.kind == "pad" else ("constant", op.argument(2))
    if labels is None:
        return None
    if mode != "constant":
        return _move(watch, op)
    return compressed(F.pad(labels, sizes, "constant", FIXED if value else ANY))


RULES: dict[str, Callable[[Watch, Op], Labels]] = {
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d", "convolution"), _layer),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _layer),
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    **dict.fromkeys(("relu", "leaky_relu", "clone", "alias", "detach", "contiguous", "lift_fresh"), _same),
    "prelu": _prelu,
    **dict.fromkeys(("neg", "abs", "positive"), _same),
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout"), _dropout),
    **dict.fromkeys(("to", "_to_copy", "type_as", "float", "double"), _convert),
    **dict.fromkeys(("hardtanh", "clamp", "clamp_min", "relu6"), _clamp),
    **dict.fromkeys(("add", "sub"), _add),
    **dict.fromkeys(("mul", "div"), _multiply),
    **{
        f"{kind}_pool{spatial}d{ending}": _pool(spatial)
        for kind in ("max", "avg", "adaptive_avg", "adaptive_max")
        for spatial in (1, 2, 3)
        for ending in ("", "_with_indices")
    },
    **{
        f"upsample_{kind}": _pool(int(kind[-2]))
        for kind in ("nearest1d", "nearest2d", "nearest3d", "bilinear2d", "linear1d", "bicubic2d", "trilinear3d")
    },
    **{f"_upsample_nearest_exact{spatial}d": _pool(spatial) for spatial in (1, 2, 3)},
    **dict.fromkeys(("mean", "sum", "amax", "amin"), _reduce),
    **dict.fromkeys(("matmul", "bmm"), _matmul),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("view", "reshape", "flatten", "ravel", "_unsafe_view", "unflatten"), _reshape),
    **dict.fromkeys(("permute", "transpose", "t", "movedim", "swapaxes", "unsqueeze", "squeeze"), _move),
    **dict.fromkeys(("select", "slice", "narrow", "chunk", "split", "split_with_sizes", "unbind"), _move),
    **dict.fromkeys(("unsafe_chunk", "unsafe_split", "tensor_split", "hsplit", "vsplit"), _move),
    **dict.fromkeys(("cat", "stack", "hstack", "vstack", "expand", "expand_as", "repeat"), _move),
    **dict.fromkeys(("roll", "flip", "rot90"), _move),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"), _move),
    **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
}
