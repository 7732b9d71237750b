"""What folds through which operation, and what is said where nothing folds; the function never changes."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves

import ptq
from ptq import channels
from ptq.batchnorm import fold_batchnorms
from ptq.errors import InputError
from ptq.smoothing.modules import ChannelClamp, InputScaling

# torch says it once a process, to whichever test comes first.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

C = 6  # channels between the layer a, which reads the model's input, and the layer b, the one to be smoothed


class Net(nn.Module):
    """Modules and parameters by name, wired by a function."""

    def __init__(self, wiring: Callable[..., Any], parts: Mapping[str, Any]) -> None:
        super().__init__()
        self.wiring = wiring
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.wiring(self, *inputs, **named)


@dataclass(frozen=True)
class Case:
    """A network, what has to happen to each of its layers, and a piece of the reason that the ledger has to give."""

    wiring: Callable[..., Any]
    parts: Callable[[], Mapping[str, Any]]
    actions: Mapping[str, str]
    reasons: Mapping[str, str] = field(default_factory=dict)
    shape: Sequence[int] = (3, 4, 4)  # of a sample
    clamps: int = 0
    one_factor: bool = False  # for all channels that b reads
    explicit: Literal["allow", "never"] = "allow"
    batch: Callable[[Tensor], Any] = lambda x: x


def two(**more: Any) -> Callable[[], Mapping[str, Any]]:
    """The 1 × 1 convolutions a and b, and more, in fresh copies."""
    return lambda: {"a": nn.Conv2d(3, C, 1), "b": nn.Conv2d(C, 2, 1)} | fresh(more)


def linears(**more: Any) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"a": nn.Linear(3, C), "b": nn.Linear(C, 2)} | fresh(more)


def fresh(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Copies, initialised again, since a test has set the seed by now."""
    copies = copy.deepcopy(dict(parts))
    for part in copies.values():
        for module in part.modules() if isinstance(part, nn.Module) else ():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
    return copies


def through(operation: Callable[[Any, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda net, x: net.b(operation(net, net.a(x)))


BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
FOLDED = {"a": "explicit", "b": "folded"}
EXPLICIT = {"a": "explicit", "b": "explicit"}


def folds(operation: Callable[[Any, Tensor], Tensor], **more: Any) -> Case:
    return Case(through(operation), two(**more), FOLDED, {"a": "an input of the model", "b": "into "})


def stays(operation: Callable[[Any, Tensor], Tensor], reason: str, **more: Any) -> Case:
    return Case(through(operation), two(**more), EXPLICIT, {"b": reason})


def folds_tokens(operation: Callable[[Any, Tensor], Tensor], **more: Any) -> Case:
    return Case(through(operation), linears(**more), FOLDED, {"b": "into "}, (5, 3))


def stays_tokens(operation: Callable[[Any, Tensor], Tensor], reason: str, **more: Any) -> Case:
    return Case(through(operation), linears(**more), EXPLICIT, {"b": reason}, (5, 3))


def used_elsewhere(wiring: Callable[..., Any], reasons: Mapping[str, str], **more: nn.Module) -> Case:
    """Beside what is wired there are layers d and e, of which e folds: smoothing without an effect would be refused."""
    names = ("a", "b", *more)
    return Case(
        lambda net, x: wiring(net, x) + net.e(net.d(x)),
        linears(d=nn.Linear(3, C), e=nn.Linear(C, 2), **more),
        dict.fromkeys(names, "skipped") | {"d": "skipped", "e": "folded"},
        reasons,
        (3,),
        explicit="never",
    )


def tied(a: str, b: str, attribute: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def tie(parts: dict[str, Any]) -> dict[str, Any]:
        setattr(parts[a], attribute, getattr(parts[b], attribute))
        return parts

    return tie


def written(y: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    write(y)
    return y


class HandWrittenRMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) + F.relu(x * 2)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, but in use
        return torch.jit.script(Doubling())


def squeeze_and_excite(net: Any, x: Tensor) -> Tensor:
    y = net.a(x).relu()
    gate = net.up(net.down(y.mean((2, 3), keepdim=True)).relu()).sigmoid()
    return net.b(gate * y)


def attention(net: Any, x: Tensor, *, fused: bool) -> Tensor:
    x = net.norm(x)
    q, k, v = (layer(x).unflatten(-1, (2, 3)).transpose(-3, -2) for layer in (net.q, net.k, net.v))
    mixed = F.scaled_dot_product_attention(q, k, v) if fused else (q @ k.transpose(-2, -1)).softmax(-1) @ v
    return net.b(mixed.transpose(-3, -2).flatten(-2))


def attention_parts() -> Mapping[str, Any]:
    names = ("q", "k", "v", "b")
    return {"norm": nn.LayerNorm(C)} | {name: nn.Linear(C, C) for name in names}


ATTENTION = {"q": "folded", "k": "folded", "v": "folded", "b": "folded"}


def biased_attention(net: Any, x: Tensor) -> Tensor:
    """The layer a makes the bias of the scores, [N, T, T], and b reads it."""
    bias = net.a(x)
    return F.scaled_dot_product_attention(x, x, net.value(x), bias) + net.b(bias)


class ByValue(nn.Module):
    """What runs depends on the largest activation."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if x.max().item() > 0 else x.abs()


class Raising(nn.Module):
    """Can't be run by anyone who is watching."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("nobody may watch me")
        return x.relu()


class WholeBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 4:
            raise ValueError("4 samples are needed")
        return x.relu()


def through_numpy(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    return net.b(y) + torch.from_numpy(y.numpy().copy()).sin().sum()


def through_list(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    return net.b(y) + torch.tensor(y.tolist(), dtype=y.dtype).sin().sum()


def written_by_out(net: Any, x: Tensor) -> Tensor:
    """The view that ``out`` writes and the whole are the same memory."""
    y = net.a(x)
    whole = torch.empty(y.shape, dtype=y.dtype)
    part = whole[:, :]
    torch.add(y, y, out=part)
    return net.b(part).sum(1, keepdim=True) + whole.sin()


CASES: dict[str, Case] = {
    # element by element
    "nothing": folds(lambda net, y: y),
    "transposed in place": folds(lambda net, y: written(F.relu(y), lambda z: z.transpose_(1, 3)).transpose(1, 3) + y),
    "relu module": folds(lambda net, y: net.act(y), act=nn.ReLU()),
    "relu module in place": folds(lambda net, y: net.act(y), act=nn.ReLU(inplace=True)),
    "relu functional": folds(lambda net, y: F.relu(y)),
    "relu in place": folds(lambda net, y: y.relu_()),
    "relu as clamp": folds(lambda net, y: y.clamp(min=0)),
    "relu as clamp_min": folds(lambda net, y: torch.clamp_min(y, 0)),
    "leaky relu": folds(lambda net, y: net.act(y), act=nn.LeakyReLU(0.2)),
    "prelu": folds(lambda net, y: net.act(y), act=nn.PReLU()),
    "prelu by channel": folds(lambda net, y: net.act(y), act=nn.PReLU(C)),
    "prelu's slopes used again": stays(
        lambda net, y: net.act(y).sigmoid() * net.act.weight.view(1, -1, 1, 1),
        "used elsewhere.*slope of prelu",
        act=nn.PReLU(C),
    ),
    "dropout": folds(lambda net, y: net.drop(y), drop=nn.Dropout(0.5)),
    "dropout in place": folds(lambda net, y: net.drop(y), drop=nn.Dropout(0.5, inplace=True)),
    "dropout of channels": folds(lambda net, y: net.drop(y), drop=nn.Dropout2d(0.5)),
    "identity": folds(lambda net, y: net.same(y), same=nn.Identity()),
    "abs, neg, clone": folds(lambda net, y: -y.abs().clone()),
    "times a number": folds(lambda net, y: y * 3 / 7),
    "times a constant": folds(lambda net, y: y * torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)),
    "plus zero": folds(lambda net, y: 0 + y),
    "plus one": stays(lambda net, y: y + 1, "it reads add"),
    "one minus": stays(lambda net, y: 1 - y, "it reads rsub"),
    "floor division": stays(lambda net, y: torch.div(y, 0.01, rounding_mode="floor"), "it reads div"),
    "another type's bits": stays(lambda net, y: y.view(BITS[y.dtype]).to(y) * 1e-9, "it reads mul"),
    "integers and back": stays(lambda net, y: y.to(torch.int32).to(y), "it reads to"),
    "half precision": folds(lambda net, y: y.to(torch.bfloat16).to(y) * 0 + y),
    "double and back": folds(lambda net, y: y.double().to(y)),
    # by other names
    "concat": folds(lambda net, y: torch.concat(y.chunk(2, 1)[::-1], 1)),
    "concatenate": folds(lambda net, y: torch.concatenate(y.split(3, 1)[::-1], 1)),
    "hstack and tensor_split": folds(lambda net, y: torch.hstack(y.tensor_split(2, 1)[::-1])),
    "multiply, divide, negative": folds(lambda net, y: torch.divide(torch.multiply(y, 3), 2).negative()),
    "absolute, clip": folds(lambda net, y: torch.clip(y - y.absolute() / 2, 0)),
    "subtract": Case(
        lambda net, x: net.b(torch.subtract(net.a(x), net.c(x))),
        two(c=nn.Conv2d(3, C, 1)),
        {"a": "explicit", "b": "folded", "c": "explicit"},
        {"b": "into a, c"},
    ),
    "moveaxis, swapdims": folds(lambda net, y: y.moveaxis(1, -1).swapdims(1, 3).swapaxes(2, 3).transpose(2, 3)),
    "movedim, narrow": folds(lambda net, y: y.movedim(1, 0).movedim(0, 1).narrow(1, 0, C)),
    "ravel, view_as, reshape_as": folds(lambda net, y: y[:1].ravel().view_as(y[:1]).reshape_as(y[:1]).expand_as(y)),
    "rot90": folds(lambda net, y: y.rot90(1, (2, 3))),
    "type_as, float, double": folds(lambda net, y: y.double().type_as(y)),
    "alpha dropout": folds(lambda net, y: F.alpha_dropout(y, 0.5, training=False)),
    "alpha dropout in training": stays(lambda net, y: F.alpha_dropout(y, 0.0, training=True), "it reads alpha_dropout"),
    "asked for its shape by zeros_like": folds(lambda net, y: y * (torch.zeros_like(y) + y.new_ones(1))),
    "pixel unshuffle": folds(lambda net, y: F.pixel_shuffle(F.pixel_unshuffle(y, 2), 2)),
    "amin": folds(lambda net, y: y.amin((2, 3), keepdim=True)),
    # nonlinear
    **{
        type(act).__name__: stays(lambda net, y: net.act(y), rf"it reads \w+ \(act, {type(act).__name__}\)", act=act)
        for act in (nn.SiLU(), nn.GELU(), nn.Hardswish(), nn.Sigmoid(), nn.Tanh(), nn.Softmax(1), nn.ELU())
    },
    "silu in place": stays(lambda net, y: F.silu(y, inplace=True), "it reads silu"),
    "clamp from above": stays(lambda net, y: y.clamp(max=1.0), "it reads clamp"),
    "clamp by tensors": stays(lambda net, y: y.clamp(torch.zeros(1), torch.ones(1)), "it reads clamp"),
    # clamps
    "relu6 module": Case(through(lambda net, y: net.act(y)), two(act=nn.ReLU6()), FOLDED, {"b": "into a"}, clamps=1),
    "relu6 module in place": Case(
        through(lambda net, y: net.act(y)), two(act=nn.ReLU6(inplace=True)), FOLDED, {"b": "into a"}, clamps=1
    ),
    "hardtanh module": Case(
        through(lambda net, y: net.act(y)), two(act=nn.Hardtanh(-0.7, 0.4)), FOLDED, {"b": "into a"}, clamps=1
    ),
    "relu6 behind a linear": Case(
        through(lambda net, y: net.act(y)), linears(act=nn.ReLU6()), FOLDED, {"b": "into a"}, (5, 3), clamps=1
    ),
    "relu6 functional": stays(lambda net, y: F.relu6(y), "it reads (relu6|hardtanh)"),
    "hardtanh functional": stays(lambda net, y: F.hardtanh(y), "it reads hardtanh"),
    "clamp functional": stays(lambda net, y: y.clamp(0, 6), "it reads clamp"),
    "relu6 used twice": Case(
        lambda net, x: net.b(net.act(net.c(net.act(net.a(x))))),
        lambda: {**two(act=nn.ReLU6())(), "c": nn.Conv2d(C, C, 1)},
        {"a": "explicit", "b": "folded", "c": "folded"},
        {"b": "into a, c", "c": "into a, c"},
        clamps=1,
    ),
    "relu6 under two names": Case(
        lambda net, x: net.layers(x),
        lambda: {
            "layers": nn.Sequential(nn.Conv2d(3, C, 1), act := nn.ReLU6(), nn.Conv2d(C, C, 1), act, nn.Conv2d(C, 2, 1))
        },
        {"layers.0": "explicit", "layers.2": "folded", "layers.4": "folded"},
        clamps=2,
    ),
    "relu6 used for two widths": Case(
        lambda net, x: net.b(net.act(net.c(net.act(net.a(x))))),
        lambda: {**two(act=nn.ReLU6())(), "c": nn.Conv2d(C, 4, 1), "b": nn.Conv2d(4, 2, 1)},
        {"a": "explicit", "b": "explicit", "c": "explicit"},
        {"b": "relu6|ReLU6", "c": r"ReLU6 \(act\) has one bound for several channels"},
    ),
    "relu6 used for two axes": Case(
        lambda net, x: net.b(net.act(net.c(net.act(net.a(x)).permute(0, 2, 3, 1)))),
        lambda: {"a": nn.Conv2d(3, C, 1), "act": nn.ReLU6(), "c": nn.Linear(C, C), "b": nn.Linear(C, 2)},
        {"a": "explicit", "b": "explicit", "c": "explicit"},
        {"c": r"ReLU6 \(act\) has one bound for several channels"},
    ),
    # windows
    **{
        f"{kind} pooling {d}d": Case(
            lambda net, x: net.b(net.pool(net.a(x))),
            lambda d=d, kind=kind: {
                "a": getattr(nn, f"Conv{d}d")(3, C, 1),
                "pool": getattr(nn, f"{kind}Pool{d}d")(2),
                "b": getattr(nn, f"Conv{d}d")(C, 2, 1),
            },
            FOLDED,
            {"b": "into a"},
            (3, *[4] * d),
        )
        for d in (1, 2, 3)
        for kind in ("Max", "Avg", "AdaptiveMax", "AdaptiveAvg")
    },
    "padded pooling": folds(lambda net, y: F.max_pool2d(F.avg_pool2d(y, 3, 2, 1), 3, 1, 1)),
    "pooling across channels": Case(
        through(lambda net, y: F.max_pool1d(y, 2)),
        lambda: {"a": nn.Linear(3, C), "b": nn.Linear(C // 2, 2)},
        FOLDED,
        {"b": "into a"},
        (5, 3),
        one_factor=True,
    ),
    "indices of a pooling": stays(
        lambda net, y: F.max_unpool2d(*F.max_pool2d(y, 2, return_indices=True), 2), "max_unpool2d"
    ),
    **{
        f"upsample {mode}": folds(lambda net, y, mode=mode: F.interpolate(y, scale_factor=2, mode=mode))
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")
    },
    **{
        f"upsample {mode} {d}d": Case(
            lambda net, x, mode=mode: net.b(F.interpolate(net.a(x), scale_factor=2, mode=mode)),
            lambda d=d: {"a": getattr(nn, f"Conv{d}d")(3, C, 1), "b": getattr(nn, f"Conv{d}d")(C, 2, 1)},
            FOLDED,
            {"b": "into a"},
            (3, *[4] * d),
        )
        for d, mode in ((1, "nearest"), (1, "linear"), (3, "nearest"), (3, "trilinear"))
    },
    "mean over space": folds(lambda net, y: y.mean((2, 3), keepdim=True)),
    "mean over space, dropped": Case(
        lambda net, x: net.b(net.a(x).mean((-2, -1))),
        lambda: {"a": nn.Conv2d(3, C, 1), "b": nn.Linear(C, 2)},
        FOLDED,
    ),
    "mean over pairs of channels": Case(
        through(lambda net, y: y.unflatten(1, (3, 2)).mean(2)),
        lambda: {"a": nn.Conv2d(3, C, 1), "b": nn.Conv2d(3, 2, 1)},
        FOLDED,
        {"b": "into a"},
    ),
    "amax over space": folds(lambda net, y: y.amax((2, 3), keepdim=True)),
    "sum of everything": stays(lambda net, y: y - y.sum(), "it reads sub"),
    "mean over channels": Case(
        through(lambda net, y: y + y.mean(1, keepdim=True)), two(), FOLDED, {"b": "into a"}, one_factor=True
    ),
    # moving
    "flatten into a linear": Case(
        lambda net, x: net.b(net.a(x).relu().flatten(1)),
        lambda: {"a": nn.Conv2d(3, C, 1), "b": nn.Linear(C * 16, 2)},
        FOLDED,
        {"b": "into a"},
    ),
    "permute to channels last": Case(
        lambda net, x: net.b(net.a(x).permute(0, 2, 3, 1)),
        lambda: {"a": nn.Conv2d(3, C, 1), "b": nn.Linear(C, 2)},
        FOLDED,
    ),
    "transpose, reshape, contiguous": folds(
        lambda net, y: y.transpose(1, 3).contiguous().reshape(len(y), 16, -1).transpose(1, 2).reshape(y.shape)
    ),
    "squeeze and unsqueeze": folds(lambda net, y: y.unsqueeze(1).squeeze(1)[:, :, None][:, :, 0]),
    "chunk and cat the other way round": folds(lambda net, y: torch.cat(y.chunk(2, 1)[::-1], 1)),
    "split": folds(lambda net, y: torch.cat([part.relu() for part in y.split([1, 2, 3], 1)], 1)),
    "unbind and stack": folds(lambda net, y: torch.stack(y.unbind(1)[::-1], 1)),
    "expand and repeat": Case(
        through(lambda net, y: y.repeat(1, 2, 1, 1)),
        lambda: {"a": nn.Conv2d(3, C, 1), "b": nn.Conv2d(2 * C, 2, 1)},
        FOLDED,
    ),
    "roll and flip": folds(lambda net, y: y.roll(1, 1).flip(1)),
    "channel shuffle": folds(lambda net, y: y.reshape(len(y), 2, 3, 4, 4).transpose(1, 2).reshape(y.shape).relu()),
    "pixel shuffle": Case(
        through(lambda net, y: F.pixel_shuffle(y, 2)),
        lambda: {"a": nn.Conv2d(3, 32, 1), "b": nn.Conv2d(8, 3, 1)},
        FOLDED,
        {"b": "into a"},
    ),
    "zero padding": folds(lambda net, y: F.pad(y, (1, 1, 1, 1))),
    "zero padding module": folds(lambda net, y: net.pad(y), pad=nn.ZeroPad2d(1)),
    "padding with ones": stays(lambda net, y: F.pad(y, (1, 1, 1, 1), value=1.0), "across channels"),
    "padding of the channels": Case(
        through(lambda net, y: F.pad(y, (0, 0, 0, 0, 1, 1)) + net.c(y)),
        lambda: {"a": nn.Conv2d(3, C, 1), "b": nn.Conv2d(C + 2, 2, 1), "c": nn.Conv2d(C, C + 2, 1)},
        {"a": "explicit", "b": "folded", "c": "folded"},
    ),
    "sorted": stays(lambda net, y: y.sort(1).values, "it reads sort"),
    "einsum": stays(lambda net, y: torch.einsum("nchw,cd->ndhw", y, torch.eye(C, dtype=y.dtype)), "it reads einsum"),
    "vector times matrix": Case(
        through(lambda net, y: torch.ones(5, dtype=y.dtype) @ y),
        linears(),
        EXPLICIT,
        {"b": "matmul reads it|it reads matmul"},
        (5, 3),
    ),
    # several producers
    "add": Case(
        lambda net, x: net.b(net.a(x) + net.c(x)),
        lambda: {**two()(), "c": nn.Conv2d(3, C, 1)},
        {"a": "explicit", "b": "folded", "c": "explicit"},
        {"b": "into a, c"},
    ),
    "add in place": Case(
        lambda net, x: net.b(net.a(x).add_(net.c(x)).relu_()),
        lambda: {**two()(), "c": nn.Conv2d(3, C, 1)},
        {"a": "explicit", "b": "folded", "c": "explicit"},
        {"b": "into a, c"},
    ),
    "subtract a multiple": Case(
        lambda net, x: net.b(torch.sub(net.a(x), net.c(x), alpha=0.3)),
        lambda: {**two()(), "c": nn.Conv2d(3, C, 1)},
        {"a": "explicit", "b": "folded", "c": "explicit"},
    ),
    "add a parameter": folds(lambda net, y: y + net.shift, shift=nn.Parameter(torch.linspace(-1, 2, C).view(C, 1, 1))),
    "add a buffer": stays(
        lambda net, y: y + net.norm.running_mean.view(1, -1, 1, 1), "it reads add", norm=nn.BatchNorm2d(C)
    ),
    "add a constant": stays(lambda net, y: y + torch.ones(1, C, 1, 1, dtype=y.dtype), "it reads add"),
    "add the input": Case(
        lambda net, x: net.b(net.a(x) + x),
        lambda: {"a": nn.Conv2d(3, 3, 1), "b": nn.Conv2d(3, 2, 1)},
        EXPLICIT,
        {"b": "it reads add"},
    ),
    "cat": Case(
        lambda net, x: net.b(torch.cat([net.a(x), net.c(x)], 1)),
        lambda: {"a": nn.Conv2d(3, 2, 1), "c": nn.Conv2d(3, 4, 1), "b": nn.Conv2d(C, 2, 1)},
        {"a": "explicit", "b": "folded", "c": "explicit"},
        {"b": "into a, c"},
    ),
    "cat with the input": Case(
        lambda net, x: net.b(torch.cat([net.a(x), x], 1)),
        lambda: {"a": nn.Conv2d(3, C, 1), "b": nn.Conv2d(C + 3, 2, 1)},
        EXPLICIT,
        {"b": "it reads|can't be scaled|input"},
    ),
    "gate": stays(lambda net, y: y * y, "it is multiplied"),
    "squeeze and excite": Case(
        squeeze_and_excite,
        two(down=nn.Conv2d(C, 2, 1), up=nn.Conv2d(2, C, 1)),
        {"a": "explicit", "b": "folded", "down": "folded", "up": "folded"},
        {"b": "into a", "down": "into a", "up": "into down"},
    ),
    "gate made of the other branch": Case(
        lambda net, x: net.b(net.a(x) * net.c(x).sigmoid()),
        two(c=nn.Conv2d(3, C, 1)),
        {"a": "explicit", "b": "folded", "c": "explicit"},
        {"b": "into a"},
    ),
    # norms
    "layer norm": folds_tokens(lambda net, y: net.norm(y), norm=nn.LayerNorm(C)),
    "layer norm without bias": folds_tokens(lambda net, y: net.norm(y), norm=nn.LayerNorm(C, bias=False)),
    "layer norm without affine": stays_tokens(
        lambda net, y: net.norm(y),
        r"it reads layer_norm \(norm, LayerNorm\)",
        norm=nn.LayerNorm(C, elementwise_affine=False),
    ),
    "rms norm": folds_tokens(lambda net, y: net.norm(y), norm=nn.RMSNorm(C)),
    "rms norm by hand": folds_tokens(lambda net, y: net.norm(y), norm=HandWrittenRMSNorm(C)),
    "group norm": folds(lambda net, y: net.norm(y), norm=nn.GroupNorm(2, C)),
    "instance norm": stays(
        lambda net, y: net.norm(y), "it reads instance_norm", norm=nn.InstanceNorm2d(C, affine=True)
    ),
    "batch norm 2d": folds(lambda net, y: net.norm(y).relu_(), norm=nn.BatchNorm2d(C)),
    "batch norm 2d without affine": stays(
        lambda net, y: net.norm(y), "it reads batch_norm", norm=nn.BatchNorm2d(C, affine=False)
    ),
    "batch norm 2d of the batch": stays(
        lambda net, y: net.norm(y), "it reads batch_norm", norm=nn.BatchNorm2d(C, track_running_stats=False)
    ),
    "batch norm 1d": Case(
        through(lambda net, y: net.norm(y)), linears(norm=nn.BatchNorm1d(C)), FOLDED, {"b": "into norm"}, (3,)
    ),
    "batch norm 3d": Case(
        through(lambda net, y: net.norm(y)),
        lambda: {"a": nn.Conv3d(3, C, 1), "norm": nn.BatchNorm3d(C), "b": nn.Conv3d(C, 2, 1)},
        FOLDED,
        {"b": "into norm"},
        (3, 2, 2, 2),
    ),
    "parameter by hand": folds(
        lambda net, y: y.sigmoid() * net.gain.view(1, -1, 1, 1), gain=nn.Parameter(torch.linspace(0.5, 2, C))
    ),
    "a parameter that is one number": folds(lambda net, y: y * net.gain, gain=nn.Parameter(torch.tensor([0.3]))),
    # layers
    **{
        f"{kind} to {other}": Case(
            lambda net, x: net.b(net.a(x)),
            lambda d=d, options=options, kind=kind, others=others, other=other: {
                "a": getattr(nn, kind)(4, 8, **options),
                "b": getattr(nn, other)(8, 4, **others),
            },
            FOLDED,
            {"b": "into a"},
            (4, *[5] * d),
        )
        for d in (1, 2, 3)
        for kind, options in (
            (f"Conv{d}d", {"kernel_size": 3, "groups": 2}),
            (f"ConvTranspose{d}d", {"kernel_size": 2, "stride": 2, "groups": 4, "bias": False}),
        )
        for other, others in (
            (f"Conv{d}d", {"kernel_size": 2, "groups": 4, "padding": "same"}),
            (f"ConvTranspose{d}d", {"kernel_size": 2, "groups": 2}),
        )
    },
    "depthwise": Case(
        lambda net, x: net.b(net.depthwise(net.a(x))),
        two(depthwise=nn.Conv2d(C, 2 * C, 3, padding=1, groups=C))
        and (
            lambda: {
                "a": nn.Conv2d(3, C, 1),
                "depthwise": nn.Conv2d(C, 2 * C, 3, padding=1, groups=C),
                "b": nn.Conv2d(2 * C, 2, 1),
            }
        ),
        {"a": "explicit", "depthwise": "folded", "b": "folded"},
        {"b": "into depthwise", "depthwise": "into a"},
    ),
    "reflecting convolution": Case(
        lambda net, x: net.b(net.a(x)),
        lambda: {"a": nn.Conv2d(3, C, 1), "b": nn.Conv2d(C, 2, 3, padding=1, padding_mode="circular")},
        FOLDED,
    ),
    "attention, fused": Case(
        lambda net, x: attention(net, x, fused=True),
        attention_parts,
        ATTENTION,
        {"q": "into norm", "b": "into v"},
        (5, C),
    ),
    "attention, by softmax": Case(
        lambda net, x: attention(net, x, fused=False),
        attention_parts,
        ATTENTION,
        {"v": "into norm", "b": "into v"},
        (5, C),
    ),
    "bmm": folds_tokens(lambda net, y: torch.bmm(torch.tril(torch.ones(5, 5)).to(y).expand(len(y), 5, 5), y)),
    "a table of positions": folds_tokens(
        lambda net, y: y + net.table[:5], table=nn.Parameter(torch.linspace(-3, 5, 5 * C).view(5, C))
    ),
    "scores that are read elsewhere": Case(
        lambda net, x: net.b(y := net.a(x)) + (y @ net.v(x)).mean(),
        lambda: {"a": nn.Linear(3, 5), "b": nn.Linear(5, 2), "v": nn.Linear(3, C)},
        EXPLICIT | {"v": "explicit"},
        {"b": "it is multiplied"},
        (5, 3),
    ),
    "a bias of attention scores": Case(
        biased_attention,
        lambda: {"a": nn.Linear(5, 5), "b": nn.Linear(5, 5), "value": nn.Linear(5, 5)},
        EXPLICIT | {"value": "explicit"},
        {"b": "attention|scaled_dot_product"},
        (5, 5),
    ),
    "attention of a tensor to itself": stays_tokens(
        lambda net, y: F.scaled_dot_product_attention(y, y, y), "attention compares it"
    ),
    # other readers
    "also returned": Case(lambda net, x: (net.b(y := net.a(x)), y), two(), EXPLICIT, {"b": "the model returns it"}),
    "also returned in a dict": Case(
        lambda net, x: {"logits": net.b(y := net.a(x)), "hidden": [y.relu()]},
        two(),
        EXPLICIT,
        {"b": "the model returns it"},
    ),
    "a dict with nothing else in it": Case(lambda net, x: {"logits": net.b(net.a(x))}, two(), FOLDED),
    "also read by a nonlinearity": Case(
        lambda net, x: net.b(y := net.a(x)) + y.tanh().mean(), two(), EXPLICIT, {"b": "tanh reads it"}
    ),
    "also read by a norm": Case(
        lambda net, x: net.b(y := net.a(x)) + net.norm(y).mean(),
        two(norm=nn.LayerNorm(4)),
        EXPLICIT,
        {"b": r"the norm \(norm, LayerNorm\) reads it"},
    ),
    "also asked for its shape": folds(lambda net, y: y.view(y.shape[0], y.size(1), *y.shape[2:])),
    "a layer used twice": Case(
        lambda net, x: net.b(net.c(net.c(net.a(x)).relu())),
        two(c=nn.Conv2d(C, C, 1)),
        {"a": "explicit", "b": "folded", "c": "folded"},
        {"c": "into a, c", "b": "into a, c"},
    ),
    "a layer that also reads the input": Case(
        lambda net, x: net.a(net.a(x).relu()),
        lambda: {"a": nn.Conv2d(3, 3, 1)},
        {"a": "explicit"},
        {"a": "an input of the model|also reads what can't be scaled"},
    ),
    "tied weights": Case(
        lambda net, x: net.b(net.a(x)),
        lambda: tied("a", "b", "weight")({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 3)}),
        {"a": "skipped", "b": "skipped", "c": "skipped"},
        {"a": "its weight is shared with b", "b": "its weight is shared with a", "c": "never ran"},
        (3,),
    ),
    "tied weights between others": Case(
        lambda net, x: net.b(net.d(net.c(net.a(x)))),
        lambda: tied("c", "d", "weight")(
            {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 3), "d": nn.Linear(3, 3)}
        ),
        {"a": "explicit", "b": "explicit", "c": "skipped", "d": "skipped"},
        {"b": r"it reads linear \(d, Linear\)", "c": "its weight is shared with d"},
        (3,),
    ),
    "tied biases": Case(
        lambda net, x: net.b(net.a(x)) + net.d(net.c(x)),
        lambda: tied("c", "a", "bias")(
            {"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 3), "d": nn.Linear(3, 3)}
        ),
        {"a": "explicit", "b": "explicit", "c": "explicit", "d": "explicit"},
        {"b": "a.bias is shared", "d": "bias is shared"},
        (3,),
    ),
    # a weight that is used elsewhere: nothing may change it
    "the producer's weight used elsewhere": used_elsewhere(
        lambda net, x: net.b(net.a(x)) + F.linear(x, net.a.weight).mean(),
        {"b": "a.weight is used elsewhere, too: linear reads it"},
    ),
    "the producer's weight moved elsewhere": used_elsewhere(
        lambda net, x: net.b(net.a(x)) + net.c(x @ net.a.weight.t()),
        {"b": "a.weight is used elsewhere, too: t reads it", "c": "it reads matmul"},
        c=nn.Linear(C, 2),
    ),
    "the producer's weight in a cat": used_elsewhere(
        lambda net, x: net.b(net.a(x)) + net.c(torch.cat([net.f(x), net.a.weight])).mean(),
        {"b": "a.weight is used elsewhere, too: cat reads it", "c": "c reads it across channels"},
        f=nn.Linear(3, 3),
        c=nn.Linear(3, 2),
    ),
    "the producer's bias used elsewhere": used_elsewhere(
        lambda net, x: net.b(net.a(x)) + net.c(net.f(x) + net.a.bias),
        {"b": "a.bias is used elsewhere, too: add reads it", "c": "it reads add"},
        c=nn.Linear(C, 2),
        f=nn.Linear(3, C),
    ),
    "the reader's weight used elsewhere": used_elsewhere(
        lambda net, x: net.b(net.a(x)) + net.b.weight.norm(),
        {"b": r"its weight is used elsewhere, too: \w*norm reads it"},
    ),
    # writing in place
    "written in place once more": folds(lambda net, y: written(written(y, Tensor.relu_), lambda z: z.mul_(3))),
    "written through a view": stays(
        lambda net, y: written(y, lambda z: z[:, 1:].mul_(2)), "writes into memory that other tensors share"
    ),
    "set through a view": stays(lambda net, y: written(y, lambda z: z[:, 0].fill_(1)), "fill"),
    "written by index": stays(lambda net, y: written(y, lambda z: z.__setitem__((0, 0), 2.0)), "fill|copy|index_put"),
    "written by out": Case(written_by_out, two(), EXPLICIT, {"b": "memory that other tensors share|out|add"}),
    "a view of the input written": Case(
        lambda net, x: net.b(written(x[:, :3], lambda part: part.mul_(net.gain))) + net.other(x),
        lambda: {"gain": nn.Parameter(torch.rand(3, 1, 1) + 0.5), "b": nn.Conv2d(3, 2, 1), "other": nn.Conv2d(3, 2, 1)},
        {"b": "explicit", "other": "explicit"},
        {"b": "memory that other tensors share"},
    ),
    # what can't be watched
    "control flow by values": Case(
        through(lambda net, y: net.act(y)),
        two(act=ByValue()),
        EXPLICIT,
        {"a": "Python looks at values", "b": r"Python looks at values \(\w+ \(act, ByValue\)\)"},
    ),
    "values compared": Case(
        lambda net, x: net.b(y := net.a(x)) + (1 if torch.allclose(y, torch.zeros(1).to(y), atol=1.0) else 2),
        two(),
        EXPLICIT,
        {"b": r"Python looks at values \(allclose\)"},
    ),
    "values to numpy": Case(through_numpy, two(), EXPLICIT, {"b": "resolve_conj reads it"}),
    "values to a list": Case(through_list, two(), EXPLICIT, {"b": "resolve_conj reads it"}),
    "whole batches": folds(lambda net, y: net.act(y), act=WholeBatch()),
    "raises": Case(
        through(lambda net, y: net.act(y)),
        two(act=Raising()),
        EXPLICIT,
        {"a": r"the forward pass can't be watched \(.?nobody may watch me.?\)", "b": "can't be watched"},
    ),
    "scripted": Case(
        through(lambda net, y: net.act(y)), lambda: {**two()(), "act": scripted()}, FOLDED, {"b": "into a"}
    ),
    "weight norm": Case(
        through(lambda net, y: net.c(y)),
        lambda: {**two()(), "c": parametrizations.weight_norm(nn.Conv2d(C, C, 1))},
        {"a": "explicit", "b": "explicit", "c": "skipped"},
        {"c": "computed by a parametrization", "b": r"it reads conv2d \(c, ParametrizedConv2d\)"},
    ),
    "a parametrized bias": Case(
        through(lambda net, y: net.c(y)),
        lambda: {**two()(), "c": parametrizations.weight_norm(nn.Conv2d(C, C, 1), "bias", dim=None)},
        {"a": "explicit", "b": "explicit", "c": "folded"},
        {"b": "bias"},
    ),
    "a mask may be looked at": Case(
        lambda net, x, mask: net.b(net.a(x) * mask[..., None] if bool(mask.any()) else net.a(x)),
        linears(),
        FOLDED,
        {"b": "into a"},
        (5, 3),
        batch=lambda x: {"x": x, "mask": (torch.arange(5) < 3).expand(len(x), 5)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_operation(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = with_outliers(Net(case.wiring, case.parts())).eval()
    batches = [case.batch(torch.randn(4, *case.shape)) for _ in range(2)]
    calibration = ptq.calibrate(model, batches)
    if set(case.actions.values()) == {"skipped"}:
        with pytest.raises(InputError, match="no layer was smoothed"):
            ptq.smooth(model, calibration, 0.5)
        for layer, reason in case.reasons.items():
            assert re.search(reason, calibration.graph.reasons[layer]) or layer in calibration.never_ran
        return
    smoothed = ptq.smooth(model, calibration, 0.5, explicit=case.explicit)
    ledger = {entry.layer: entry for entry in smoothed.ledger}
    assert {layer: entry.action for layer, entry in ledger.items()} == case.actions, ledger
    for layer, reason in case.reasons.items():
        assert re.search(reason, ledger[layer].reason), ledger[layer].reason
    for layer, module in channels.layers_of(smoothed.model):
        assert hasattr(module, "smoothing") == (ledger[layer].action == "explicit")
        if ledger[layer].action == "folded":
            spread = smoothed.factors[layer].log().std()
            assert spread == 0 if layer == "b" and case.one_factor else spread > 0.1
    replaced = [
        module for _, module in smoothed.model.named_modules(remove_duplicate=False) if isinstance(module, ChannelClamp)
    ]
    assert len(replaced) == case.clamps
    new_batches = [case.batch(torch.randn(4, *case.shape) * 2) for _ in range(2)]
    assert_same_function(model, smoothed.model, [*batches, *new_batches])
    if "folded" in case.actions.values():
        free = ptq.smooth(model, calibration, 0.5, explicit="never").model
        assert not any(isinstance(module, InputScaling) for module in free.modules())
        assert_same_function(model, free, [*batches, *new_batches])


PARTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "slice": lambda table, length: table[:length],
    "narrow": lambda table, length: table.view(1, 9, C).narrow(1, 0, length),
    "row": lambda table, length: table[length - 1],
}


@pytest.mark.parametrize("name", PARTS)
def test_a_table_that_is_used_in_part_is_left_alone(name: str) -> None:
    """Positions that no calibration sample was long enough to reach would keep their old scale."""
    part = PARTS[name]
    torch.manual_seed(0)
    parts = {**linears()(), "table": nn.Parameter(torch.randn(9, C))}
    model = Net(lambda net, x: net.b(net.a(x) + part(net.table, x.shape[1])), parts)
    calibration = ptq.calibrate(model, [torch.randn(2, 5, 3)])
    assert calibration.graph.reasons["b"] == "table was used in part: other inputs may use more of it"
    smoothed = ptq.smooth(model, calibration, 0.5)
    assert_same_function(model, smoothed.model, [torch.randn(2, length, 3) for length in (1, 5, 9)])


class Standardized(nn.Conv2d):
    """A convolution that normalises its weight at each call."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias)


WEIGHTS_THAT_NOTHING_MAY_CHANGE: dict[str, tuple[Callable[..., Any], Callable[[], Mapping[str, Any]], str]] = {
    "used elsewhere": (
        lambda net, x: net.norm(net.a(x)) + F.conv2d(x, net.a.weight),
        two(norm=nn.BatchNorm2d(C)),
        "its weight is used elsewhere, too: conv2d reads it",
    ),
    "measured": (
        lambda net, x: net.norm(net.a(x)) + net.a.weight.square().sum(),
        two(norm=nn.BatchNorm2d(C)),
        "its weight is used elsewhere, too: square reads it",
    ),
    "standardized": (
        lambda net, x: net.norm(net.a(x)),
        lambda: {"a": Standardized(3, C, 1), "norm": nn.BatchNorm2d(C)},
        "its weight isn't used as it is",
    ),
    "asked for its type and shape": (
        lambda net, x: net.norm(net.a(x.type_as(net.a.weight)) + torch.zeros_like(net.a.weight).sum()),
        two(norm=nn.BatchNorm2d(C)),
        "",
    ),
}


@pytest.mark.parametrize("name", WEIGHTS_THAT_NOTHING_MAY_CHANGE)
def test_a_weight_that_nothing_may_change(name: str) -> None:
    """Not even a BatchNorm may be folded into it, nor may it be multiplied in the hook form."""
    wiring, parts, reason = WEIGHTS_THAT_NOTHING_MAY_CHANGE[name]
    torch.manual_seed(0)
    model = with_outliers(Net(wiring, parts())).eval()
    batch = torch.randn(4, 3, 4, 4)
    calibration = ptq.calibrate(model, [batch])
    assert calibration.graph.fixed == ({"a": reason} if reason else {})
    assert calibration.graph.batchnorms == {}
    folded = copy.deepcopy(model)
    fold_batchnorms(folded, calibration.batchnorms)
    assert_same_function(model, folded, [batch])


def with_outliers(model: nn.Module) -> nn.Module:
    """Give every channel a size of its own, over two decades, and every bias and shift a value that matters."""
    with torch.no_grad():
        for _, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if name in ("weight", "gain") and not isinstance(module, nn.PReLU):
                    sizes = 10 ** (2 * torch.rand(len(parameter)) - 1)
                    parameter.mul_(sizes.view(-1, *(1 for _ in parameter.shape[1:])))
                elif name == "bias":
                    parameter.copy_(torch.randn(parameter.shape))
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                module.running_mean.copy_(torch.randn(module.running_mean.shape))
                module.running_var.copy_(torch.rand(module.running_var.shape) + 0.5)
    return model


@torch.no_grad()
def assert_same_function(model: nn.Module, rewritten: nn.Module, batches: Sequence[Any]) -> None:
    """The same outputs in float64, to the rounding of the new weights to float32."""
    model, rewritten = copy.deepcopy(model).double(), copy.deepcopy(rewritten).double()
    for batch in batches:
        batch = batch if isinstance(batch, dict) else {"x": batch}
        x = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
        expected, found = (
            tree_leaves(net(*{k: v.clone() for k, v in x.items()}.values())) for net in (model, rewritten)
        )
        for y, rewritten_y in zip(expected, found, strict=True):
            assert (y - rewritten_y).abs().max() <= 1e-5 * y.abs().max()
