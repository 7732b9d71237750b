"""Attention whose projections are called, so that hooks on Linear layers see what they read.

``nn.MultiheadAttention`` and torchvision's swin attention pass their Linears' weights to a function and never call
the Linears. The modules here compute the same, and call them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptq.errors import InputError

_PACKED = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_OWN_STATE = ("_parameters", "_buffers", "_modules")
_WINDOW_ATTENTION = {
    ("torchvision.models.swin_transformer", "ShiftedWindowAttention"),
    ("torchvision.models.swin_transformer", "ShiftedWindowAttentionV2"),
}


def split_attention(model: nn.Module) -> None:
    """Replace, in place, every attention that hides its projections by one that calls them.

    Values, mode, device, hooks and trainability stay; ``in_proj_weight`` becomes the weights of ``q_proj``,
    ``k_proj`` and ``v_proj``. A subclass with a forward of its own is left alone, as is what was split before.

    An ``nn.TransformerEncoder`` stops turning padded batches into nested tensors, which hooks can't read: padded
    positions, zero until then, come out with whatever attention gives them.
    """
    replacements = _replacements(model, copy=True)
    for encoder in _nesting_encoders(model, replacements):
        encoder.use_nested_tensor = False
    _replace(model, replacements)


@contextmanager
def splitting_attention(model: nn.Module) -> Iterator[None]:
    """``split_attention`` for the duration of a ``with``; then the very same modules are back in their places.

    Costs no memory: the new weights are views of the old, so what is written into them stays. Don't move the model
    to another device or type inside.
    """
    replacements = _replacements(model, copy=False)
    encoders = _nesting_encoders(model, replacements)
    for encoder in encoders:
        encoder.use_nested_tensor = False
    _replace(model, replacements)
    try:
        yield
    finally:
        _replace(model, {split: original for original, split in replacements.items()})
        for original, split in replacements.items():
            original.training = split.training
        for encoder in encoders:
            encoder.use_nested_tensor = True


class SplitAttention(nn.Module):
    """``nn.MultiheadAttention`` with called Linears ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj``.

    Three projections always, though self-attention could do with one: whether query, key and value are one tensor
    shows only when the module is called, and may differ from call to call. In self-attention all three are given the
    very same tensor, so whoever watches the graph finds out that they need one smoothing factor.
    """

    # What torch's encoders ask before they go round forward: "separate weights, none of them packed" says no.
    in_proj_weight = None
    in_proj_bias = None

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear
    num_heads: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    bias_k: Tensor | None
    bias_v: Tensor | None

    def __init__(self, attention: nn.MultiheadAttention, *, copy: bool = True) -> None:
        """Without ``copy`` the projections' weights are views of the original's."""
        super().__init__()
        # Attributes and hooks are shared, not copied: a handle of the user's still removes its hook.
        vars(self).update({name: value for name, value in vars(attention).items() if name not in _OWN_STATE})
        self._qkv_same_embed_dim = False
        for name, weight, bias in zip("qkv", *_projections(attention), strict=True):
            self.add_module(f"{name}_proj", _linear(weight, bias, copy).train(self.training))
        self._modules.update(attention._modules)
        self._buffers.update(attention._buffers)
        self._parameters.update({k: v for k, v in attention._parameters.items() if k not in _PACKED})

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """``softmax(q kᵀ / √d + mask) v`` for each head, between the projections; arguments as in torch."""
        if is_causal and attn_mask is None:
            raise InputError("is_causal is only a hint about attn_mask, which is missing: pass the mask too")
        batched = query.dim() == 3
        projected = (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        q, k, v = (self._batch_first(x, batched) for x in projected)
        q, k, v = (_heads(x, self.num_heads) for x in (q, *self._extended(k, v)))  # [N, heads, length, d]
        dropout = self.dropout if self.training else 0.0
        causal = is_causal and key_padding_mask is None and not need_weights  # then the hint stands for the mask
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q.dtype)
        weights = None
        if need_weights:
            scores = q * math.sqrt(1 / q.shape[-1]) @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)  # [N, heads, L, S]
            heads = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            heads = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)
        joined = heads.transpose(1, 2).flatten(2)  # [N, L, E]
        if not batched:
            joined = joined.squeeze(0)
        elif not self.batch_first:
            joined = joined.transpose(0, 1).contiguous()
        return self.out_proj(joined), weights

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with the learnt and the zero one behind them, where the module has these."""
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat((x, bias.expand(len(x), 1, -1)), 1) for x, bias in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return k, v

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores ``[N, heads, L, S]``: both masks; added keys are seen by every query."""
        total = None
        if attn_mask is not None:  # [L, S] or [N · heads, L, S]
            total = _additive(attn_mask, "attn_mask", dtype)
            total = total if total.dim() == 2 else total.view(-1, self.num_heads, *total.shape[1:])
        if key_padding_mask is not None:  # [N, S] or [S]
            padding = _additive(key_padding_mask, "key_padding_mask", dtype)
            padding = padding.reshape(-1, 1, 1, padding.shape[-1])
            total = padding if total is None else total + padding
        added = int(self.bias_k is not None) + int(self.add_zero_attn)
        return total if total is None else F.pad(total, (0, added))


class SplitWindowAttention(nn.Module):
    """torchvision's ``ShiftedWindowAttention``, and its V2, with ``qkv`` and ``proj`` called.

    V2 ignores the keys' part of the bias; here that part is zero. Its attention is the cosine of queries and keys
    times a learnt factor, and its position bias comes from a small network.
    """

    qkv: nn.Linear
    proj: nn.Linear
    cpb_mlp: nn.Sequential
    logit_scale: Tensor
    relative_position_bias_table: Tensor
    relative_position_index: Tensor
    relative_coords_table: Tensor
    window_size: list[int]
    shift_size: list[int]
    num_heads: int
    attention_dropout: float
    dropout: float

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        vars(self).update(vars(attention))
        self._modules = dict(attention._modules)  # its own, for the sake of the original
        if self._cosine and self.qkv.bias is not None and bool(self.qkv.bias.chunk(3)[1].any()):
            self.qkv = _without_key_bias(self.qkv)

    @property
    def _cosine(self) -> bool:
        return "logit_scale" in self._parameters

    def forward(self, x: Tensor) -> Tensor:  # [N, H, W, C]
        height, width = x.shape[1:3]
        rows, columns = self.window_size
        x = F.pad(x, (0, 0, 0, -width % columns, 0, -height % rows))
        padded = x.shape[1:3]
        # A window as large as the map has nowhere to shift to.
        shift = [
            moved if size > window else 0
            for moved, size, window in zip(self.shift_size, padded, self.window_size, strict=True)
        ]
        if any(shift):
            x = x.roll((-shift[0], -shift[1]), (1, 2))
        windows = _partition(x, rows, columns)  # [N, windows, T, C]
        q, k, v = (_heads(part, self.num_heads) for part in self.qkv(windows).chunk(3, -1))  # [N, windows, heads, T, d]
        scores = self._similarity(q, k) + self._position_bias()  # [N, windows, heads, T, T]
        if any(shift):
            scores = scores + self._shift_mask(padded, shift, x)
        weights = F.dropout(scores.softmax(-1), self.attention_dropout, self.training)
        y = self.proj((weights @ v).transpose(-3, -2).flatten(-2))
        y = F.dropout(y, self.dropout, self.training)
        y = _join(y, padded, rows, columns)
        if any(shift):
            y = y.roll((shift[0], shift[1]), (1, 2))
        return y[:, :height, :width].contiguous()

    def _similarity(self, q: Tensor, k: Tensor) -> Tensor:
        if not self._cosine:
            return (q * float(q.shape[-1] ** -0.5)) @ k.transpose(-2, -1)
        cosine = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        factor: Tensor = self.logit_scale.clamp(max=math.log(100.0)).exp()
        return cosine * factor

    def _position_bias(self) -> Tensor:
        """The bias of each pair of tokens in a window, ``[heads, T, T]``."""
        tokens = self.window_size[0] * self.window_size[1]
        if not self._cosine:
            table = self.relative_position_bias_table
        else:
            table = 16 * self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads).sigmoid()
        return table[self.relative_position_index].view(tokens, tokens, -1).permute(2, 0, 1)

    def _shift_mask(self, size: torch.Size, shift: list[int], x: Tensor) -> Tensor:
        """-100 between tokens that only the cyclic shift made neighbours, ``[windows, 1, T, T]``."""
        row, column = (_regions(*sizes, x.device) for sizes in zip(size, self.window_size, shift, strict=True))
        region = _partition((3 * row[:, None] + column)[None, :, :, None], *self.window_size)[0, :, :, 0]
        return (region[:, None, :] != region[:, :, None]).to(x.dtype).mul(-100.0).unsqueeze(1)


def _heads(x: Tensor, count: int) -> Tensor:
    """``[…, L, E]`` → ``[…, heads, L, E / heads]``"""
    return x.view(*x.shape[:-1], count, -1).transpose(-3, -2)


def _regions(length: int, window: int, shift: int, device: torch.device) -> Tensor:
    """Along one axis: 0 before the last window, 1 within it, 2 for what the shift brought round from the other end."""
    place = torch.arange(length, device=device)
    return (place >= length - window).int() + (place >= length - shift).int()


def _partition(x: Tensor, rows: int, columns: int) -> Tensor:
    """``[N, H, W, C]`` → ``[N, windows, rows · columns, C]``"""
    n, height, width, channels = x.shape
    grid = x.reshape(n, height // rows, rows, width // columns, columns, channels).transpose(2, 3)
    return grid.reshape(n, -1, rows * columns, channels)


def _join(windows: Tensor, size: torch.Size, rows: int, columns: int) -> Tensor:
    """The inverse of ``_partition``, for maps of this size."""
    n, channels = windows.shape[0], windows.shape[-1]
    grid = windows.reshape(n, size[0] // rows, size[1] // columns, rows, columns, channels).transpose(2, 3)
    return grid.reshape(n, *size, channels)


def _additive(mask: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """A mask to add: true in a Boolean one becomes -∞."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    if not mask.is_floating_point():
        raise InputError(f"{name}: its type is {mask.dtype}: use bool or a floating-point type")
    return mask


def _projections(attention: nn.MultiheadAttention) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Weights and biases of query, key and value, as views; trainable like what they are taken from."""

    def parts(packed: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.requires_grad_(packed.requires_grad) for part in packed.detach().chunk(3))

    if attention._qkv_same_embed_dim:
        weights = parts(attention.in_proj_weight)
    else:
        weights = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
    biases = (None, None, None) if attention.in_proj_bias is None else parts(attention.in_proj_bias)
    return weights, biases


def _linear(weight: Tensor, bias: Tensor | None, copy: bool) -> nn.Linear:
    def parameter(values: Tensor) -> nn.Parameter:
        return nn.Parameter(values.detach().clone() if copy else values.detach(), values.requires_grad)

    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")  # allocates nothing
    linear.weight = parameter(weight)
    if bias is not None:
        linear.bias = parameter(bias)
    return linear


def _without_key_bias(qkv: nn.Linear) -> nn.Linear:
    q, k, v = qkv.bias.detach().chunk(3)
    linear = _linear(qkv.weight, torch.cat((q, torch.zeros_like(k), v)), copy=False)
    linear.weight = qkv.weight
    linear.bias.requires_grad_(qkv.bias.requires_grad)
    return linear.train(qkv.training)


def _replacements(model: nn.Module, copy: bool) -> dict[nn.Module, nn.Module]:
    """Each attention to be replaced, and its replacement."""
    found: dict[nn.Module, nn.Module] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if "forward" in vars(module):  # somebody's own forward
            continue
        if isinstance(module, nn.MultiheadAttention) and kind.forward is nn.MultiheadAttention.forward:
            _check_plain(name, module)
            found[module] = SplitAttention(module, copy=copy)
        elif (kind.__module__, kind.__name__) in _WINDOW_ATTENTION:
            found[module] = SplitWindowAttention(module)
    if model in found:
        raise InputError(
            f"the model is nothing but a {type(model).__name__}, which can't be replaced in place: wrap it"
        )
    return found


def _check_plain(name: str, attention: nn.MultiheadAttention) -> None:
    if any(weight not in attention._parameters for weight in _PACKED):
        raise InputError(
            f"{name}: the weights of this attention are computed (pruning, weight norm or another parametrization): "
            "make them permanent first"
        )


def _replace(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replacements:
                parent._modules[name] = replacements[child]


def _nesting_encoders(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> list[nn.TransformerEncoder]:
    """The encoders with a replaced attention that use nested tensors."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor
        if any(child in replacements for child in module.modules())
    ]
