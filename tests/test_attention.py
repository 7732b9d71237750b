"""Split attention computes what the original does, calls its Linears, and goes away without a trace."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from ptq.attention import SplitAttention, SplitWindowAttention, split_attention, splitting_attention
from ptq.errors import InputError
from ptq.hooks import attached
from ptq.vision import torchvision

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}
N, L, S, E, HEADS = 3, 5, 7, 8, 2

MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "no bias, batch first": {"bias": False, "batch_first": True},
    "learnt key and value": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True, "batch_first": True},
    "both keys": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "other widths": {"kdim": 6, "vdim": 10},
    "other widths, no bias": {"kdim": 6, "vdim": 10, "bias": False, "batch_first": True},
    "odd heads": {"num_heads": 1, "batch_first": True},
}
MASKS = (None, "bool", "float", "bool 3-D", "float 3-D", "causal")
PADDINGS = (None, "bool", "float")


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter random, biases and position tables included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * (0.5 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5))
    return model


def attention(dtype: torch.dtype = torch.float64, **options: Any) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(E, **{"num_heads": HEADS, **options}, dtype=dtype)
    randomized(module)
    return module.eval()


def inputs(module: nn.MultiheadAttention, batched: bool, self_attention: bool) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def tensor(length: int, width: int) -> Tensor:
        shape = (N, length, width) if module.batch_first else (length, N, width)
        shape = shape if batched else (length, width)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(module.out_proj.weight.dtype)

    if self_attention:
        x = tensor(L, E)
        return x, x, x
    return tensor(L, E), tensor(S, module.kdim), tensor(S, module.vdim)


def masks(
    kind: str | None, padding: str | None, heads: int, batched: bool, keys: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Masks that leave every query at least one key."""
    generator = torch.Generator().manual_seed(2)
    chosen: dict[str, Any] = {}
    batch = N if batched else 1
    if kind == "causal":
        chosen["attn_mask"] = torch.ones(L, keys, dtype=torch.bool).triu(1)
        chosen["is_causal"] = True
    elif kind:
        shape = (batch * heads, L, keys) if "3-D" in kind else (L, keys)
        random = torch.randn(shape, generator=generator, dtype=torch.float64)
        chosen["attn_mask"] = random.to(dtype) if "float" in kind else (random > 0.3).index_fill(-1, torch.tensor(0), 0)
    if padding:
        random = torch.randn((batch, keys), generator=generator, dtype=torch.float64)
        mask = random.to(dtype) if padding == "float" else (random > 0.3).index_fill(-1, torch.tensor(0), 0)
        chosen["key_padding_mask"] = mask if batched else mask[0]
    return chosen


def assert_same(actual: Tensor | None, expected: Tensor | None, dtype: torch.dtype) -> None:
    assert (actual is None) == (expected is None)
    if actual is not None and expected is not None:
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        assert expected.isfinite().all()
        difference = (actual - expected).abs().max() / expected.abs().max()
        assert difference <= TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize(
    "options, self_attention",
    [
        pytest.param(options, itself, id=f"{name}, {'self' if itself else 'cross'}")
        for name, options in MODULES.items()
        for itself in (True, False)
        if not (itself and "kdim" in options)  # keys of another width can't be the query
    ],
)
def test_same_output_and_weights(
    options: dict[str, Any], batched: bool, self_attention: bool, dtype: torch.dtype
) -> None:
    """Under every mask, with and without weights; torch's fast and slow path are both the reference."""
    original = attention(dtype, **options)
    split = SplitAttention(original)
    assert not isinstance(split, nn.MultiheadAttention)
    query, key, value = inputs(original, batched, self_attention)
    keys = L if self_attention else S
    for mask in MASKS:
        for padding in PADDINGS:
            chosen = masks(mask, padding, original.num_heads, batched, keys, dtype)
            if mask == "causal" and (original.add_zero_attn or original.bias_k is not None) and not padding:
                chosen.pop("is_causal")  # torch applies the hint to the added keys too: tested apart
            for need_weights, average in ((False, True), (True, True), (True, False)):
                call = {**chosen, "need_weights": need_weights, "average_attn_weights": average}
                for grad in (True, False):
                    with torch.set_grad_enabled(grad):
                        expected = original(query, key, value, **call)
                        actual = split(query, key, value, **call)
                    for ours, theirs in zip(actual, expected, strict=True):
                        assert_same(ours, theirs, dtype)


def test_the_causal_hint_reaches_added_keys_as_in_torch() -> None:
    original = attention(add_bias_kv=True, add_zero_attn=True)
    query, key, value = inputs(original, batched=True, self_attention=True)
    call = {"attn_mask": torch.ones(L, L, dtype=torch.bool).triu(1), "is_causal": True, "need_weights": False}
    assert_same(
        SplitAttention(original)(query, key, value, **call)[0], original(query, key, value, **call)[0], query.dtype
    )


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_same_dropout_and_gradients_in_training(need_weights: bool, batch_first: bool) -> None:
    original = attention(dropout=0.4, batch_first=batch_first).train()
    split = SplitAttention(original)
    assert split.training and split.q_proj.training
    query, key, value = inputs(original, batched=True, self_attention=False)
    outputs = []
    for module in (original, split):
        torch.manual_seed(5)
        output, weights = module(query, key, value, need_weights=need_weights)
        output.square().sum().backward()
        outputs.append((output, weights))
        if module is original:
            out_gradient = original.out_proj.weight.grad.clone()
            original.out_proj.weight.grad = None
    for ours, theirs in zip(outputs[1], outputs[0], strict=True):
        assert_same(ours, theirs, torch.float64)
    gradient = torch.cat([split.q_proj.weight.grad, split.k_proj.weight.grad, split.v_proj.weight.grad])
    assert_same(gradient, original.in_proj_weight.grad, torch.float64)
    assert_same(split.out_proj.weight.grad, out_gradient, torch.float64)


def test_outputs_can_be_viewed_like_torchs() -> None:
    original = attention()
    query, key, value = inputs(original, batched=True, self_attention=False)
    assert original(query, key, value)[0].is_contiguous()
    assert SplitAttention(original)(query, key, value)[0].is_contiguous()


@pytest.mark.parametrize(
    "call, message",
    [({"is_causal": True}, "attn_mask"), ({"attn_mask": torch.ones(L, L, dtype=torch.int64)}, "int64")],
    ids=["causal without mask", "integer mask"],
)
def test_refused_calls(call: dict[str, Any], message: str) -> None:
    split = SplitAttention(attention())
    with pytest.raises(InputError, match=message):
        split(*inputs(attention(), True, True), **call)


def test_a_mask_that_misses_a_key_is_an_error() -> None:
    split = SplitAttention(attention(add_zero_attn=True))
    with pytest.raises(RuntimeError, match="must match"):
        split(*inputs(attention(), True, False), attn_mask=torch.zeros(L, S - 1, dtype=torch.float64))


# Whole networks


class Crossing(nn.Module):
    """Cross-attention, a module used under two names, and one that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = nn.MultiheadAttention(E, HEADS, kdim=6, vdim=6)
        self.shared = nn.MultiheadAttention(E, HEADS)
        self.inner = nn.ModuleDict({"again": self.shared})
        self.idle = nn.MultiheadAttention(E, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        memory = x[..., :6].flip(0)
        x = x + self.cross(x, memory, memory)[0]
        x = x + self.shared(x, x, x, need_weights=False)[0]
        return x + self.inner["again"](x, x, x)[0]


class Decoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(E, HEADS, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.flip(1))


def vit() -> tuple[nn.Module, Tensor]:
    transformer = torchvision("models").VisionTransformer
    model = transformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=5
    )
    return model, torch.randn(3, 3, 16, 16)


def swin(version: int, size: tuple[int, int], window: list[int]) -> tuple[nn.Module, Tensor]:
    module = torchvision("models.swin_transformer")
    extra = {1: {}, 2: {"block": module.SwinTransformerBlockV2, "downsample_layer": module.PatchMergingV2}}[version]
    model = module.SwinTransformer(
        patch_size=[2, 2], embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=window, num_classes=5, **extra
    )
    return model, torch.randn(2, 3, *size)


def encoder(norm_first: bool, batch_first: bool, layers: int = 2) -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(E, HEADS, 16, norm_first=norm_first, batch_first=batch_first)
    nested = batch_first and not norm_first
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=nested), torch.randn(N, L, E)


NETWORKS = {
    "vit": vit,
    "swin": lambda: swin(1, (32, 32), [4, 4]),
    "swin, padded": lambda: swin(1, (30, 38), [4, 3]),
    "swin, shifted one way": lambda: swin(1, (8, 32), [4, 4]),
    "swin v2": lambda: swin(2, (32, 32), [4, 4]),
    "swin v2, padded": lambda: swin(2, (30, 38), [4, 3]),
    "encoder": lambda: encoder(False, True),
    "encoder, norm first": lambda: encoder(True, True),
    "encoder, batch second": lambda: encoder(False, False),
    "encoder layer": lambda: (nn.Sequential(nn.TransformerEncoderLayer(E, HEADS, 16)), torch.randn(N, L, E)),
    "decoder": lambda: (Decoding(), torch.randn(N, L, E)),
    "crossing": lambda: (Crossing(), torch.randn(L, N, E)),
}


def network(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = NETWORKS[name]()
    return randomized(model).to(dtype).eval(), x.to(dtype)


def called_linears(model: nn.Module, x: Tensor) -> set[str]:
    called: set[str] = set()
    names = {module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    with attached(m.register_forward_hook(lambda m, args, out: called.add(names[m])) for m in names):
        model(x)
    return called


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("inference", [True, False], ids=["inference", "gradients"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_stay_the_same_function(name: str, inference: bool, dtype: torch.dtype) -> None:
    model, x = network(name, dtype)
    split = copy.deepcopy(model)
    split_attention(split)
    with torch.inference_mode(inference):
        assert_same(split(x), model(x), dtype)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_linear_is_called_only_when_split(name: str) -> None:
    model, x = network(name)
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert called_linears(model, x) < linears
    split_attention(model)
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert called_linears(model, x) == {name for name in linears if not name.startswith("idle")}


def test_self_attention_gives_its_three_projections_one_tensor() -> None:
    model, x = network("vit")
    split_attention(model)
    read: dict[str, list[Tensor]] = {}

    def reading(name: str) -> Callable[..., None]:
        block = name.rpartition(".")[0]
        return lambda module, args: read.setdefault(block, []).append(args[0])

    projections = [item for item in model.named_modules() if item[0].endswith((".q_proj", ".k_proj", ".v_proj"))]
    with attached(module.register_forward_pre_hook(reading(name)) for name, module in projections):
        model(x)
    assert len(read) == 2
    assert all(len(tensors) == 3 and len({id(tensor) for tensor in tensors}) == 1 for tensors in read.values())


def test_swin_v2_limits_its_factor() -> None:
    model, x = network("swin v2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("logit_scale"):
                parameter.fill_(6.0)  # the limit is log 100, 4.6
    expected = model(x)
    with splitting_attention(model):
        assert_same(model(x), expected, torch.float64)


def test_swin_v2_ignores_the_bias_of_its_keys() -> None:
    model, x = network("swin v2")
    blocks = [m for m in model.modules() if type(m).__name__ == "ShiftedWindowAttentionV2"]
    assert all(block.qkv.bias.chunk(3)[1].any() for block in blocks)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(x)
    with splitting_attention(model):
        assert_same(model(x), expected, torch.float64)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_swin_keeps_its_very_linears() -> None:
    model, _ = network("swin")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    keys = list(model.state_dict())
    split_attention(model)
    assert {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)} == linears
    assert list(model.state_dict()) == keys


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_in_an_encoder_that_uses_nested_tensors() -> None:
    """Told because it broke at first: the encoder itself makes nested tensors, before any attention is asked."""
    model, x = network("encoder")
    assert isinstance(model, nn.TransformerEncoder) and model.use_nested_tensor
    padding = torch.arange(L) >= torch.tensor([[L], [3], [2]])
    with torch.inference_mode():
        nested = model(x, src_key_padding_mask=padding)
        with splitting_attention(model):
            split = model(x, src_key_padding_mask=padding)
        assert torch.equal(model(x, src_key_padding_mask=padding), nested)
        split_attention(model)
        split_for_good = model(x, src_key_padding_mask=padding)
    assert_same(split[~padding], nested[~padding], torch.float64)
    assert torch.equal(split_for_good, split)


# Replacing and restoring


@pytest.mark.parametrize("name", NETWORKS)
def test_everything_is_back_after_the_context(name: str) -> None:
    model, x = network(name)
    modules = [*model.named_modules(remove_duplicate=False)]
    state, attributes = model.state_dict(keep_vars=True), {m: dict(vars(m)) for m in model.modules()}
    expected = model(x)
    with pytest.raises(ZeroDivisionError), splitting_attention(model):
        split = [m for m in model.modules() if isinstance(m, (SplitAttention, SplitWindowAttention))]
        assert split
        assert_same(model(x), expected, torch.float64)
        _ = 1 / 0
    after = [*model.named_modules(remove_duplicate=False)]
    assert len(after) == len(modules)
    assert all(a == b and m is n for (a, m), (b, n) in zip(after, modules, strict=True))
    assert list(model.state_dict()) == list(state)
    assert all(value is state[key] for key, value in model.state_dict(keep_vars=True).items())
    assert {m: dict(vars(m)) for m in model.modules()} == attributes
    assert torch.equal(model(x), expected)


def test_the_context_holds_views_and_splitting_for_good_does_not() -> None:
    original = attention()
    model = nn.Sequential(original)
    storage = original.in_proj_weight.untyped_storage().data_ptr()
    state = torch.random.get_rng_state()
    with splitting_attention(model):
        split = model[0]
        assert isinstance(split, SplitAttention)
        for layer in (split.q_proj, split.k_proj, split.v_proj):
            assert layer.weight.untyped_storage().data_ptr() == storage
        with torch.no_grad():
            split.k_proj.weight.mul_(2)
            split.v_proj.bias.fill_(3)
        doubled = split.k_proj.weight.clone()
    assert torch.equal(original.in_proj_weight[E : 2 * E], doubled)
    assert (original.in_proj_bias[2 * E :] == 3).all()
    split_attention(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(
        torch.cat([model[0].q_proj.bias, model[0].k_proj.bias, model[0].v_proj.bias]), original.in_proj_bias
    )
    for layer in (model[0].q_proj, model[0].k_proj, model[0].v_proj):
        assert layer.weight.untyped_storage().nbytes() == layer.weight.nbytes
    assert model[0].out_proj is original.out_proj


def test_mode_set_inside_the_context_stays() -> None:
    model, _ = network("vit")
    with splitting_attention(model):
        model.train()
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("name", ["crossing", "swin v2", "encoder"])
def test_splitting_twice_changes_nothing(name: str) -> None:
    model, _ = network(name)
    split_attention(model)
    modules = list(model.modules())
    split_attention(model)
    with splitting_attention(model):
        assert all(m is n for m, n in zip(model.modules(), modules, strict=True))
    assert all(m is n for m, n in zip(model.modules(), modules, strict=True))


def test_a_module_at_two_places_stays_one() -> None:
    model, _ = network("crossing")
    split_attention(model)
    assert isinstance(model.shared, SplitAttention)
    assert model.shared is model.inner["again"]


def test_frozen_weights_type_and_mode_are_kept() -> None:
    original = attention(torch.bfloat16).train()
    original.in_proj_weight.requires_grad_(False)
    original.layer_id = 7
    model = nn.Sequential(original, attention()).train()
    model[1].eval()
    split_attention(model)
    first, second = model
    assert isinstance(first, SplitAttention) and first.layer_id == 7
    assert first.training and first.q_proj.training and not second.training and not second.q_proj.training
    assert first.q_proj.weight.dtype == torch.bfloat16
    assert not first.v_proj.weight.requires_grad and first.v_proj.bias.requires_grad
    assert isinstance(first.v_proj.weight, nn.Parameter)
    assert (first.embed_dim, first.num_heads, first.head_dim, first.batch_first) == (E, HEADS, E // HEADS, False)


@pytest.mark.parametrize("name", ["encoder layer", "swin"])
def test_hooks_of_the_user_stay_and_can_be_removed(name: str) -> None:
    model, x = network(name)
    place = "0.self_attn" if name == "encoder layer" else "features.1.0.attn"
    calls: list[str] = []
    module = model.get_submodule(place)
    before = module.register_forward_pre_hook(lambda m, args, kwargs: calls.append("before"), with_kwargs=True)
    after = module.register_forward_hook(lambda m, args, out: calls.append("after"))
    backward = module.register_full_backward_hook(lambda m, into, out: calls.append("backward"))
    split_attention(model)
    assert model.get_submodule(place) is not module
    x.requires_grad_()  # or torch warns about the backward hook
    model(x).sum().backward()
    assert calls == ["before", "after", "backward"]
    for handle in (before, after, backward):
        handle.remove()
    model(x).sum().backward()
    assert len(calls) == 3


class Subclass(nn.MultiheadAttention):
    pass


class OwnForward(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return 2 * output, weights


def test_only_torchs_own_forward_is_replaced() -> None:
    model = nn.Sequential(Subclass(E, HEADS), OwnForward(E, HEADS), attention())
    patched = model[2]
    patched.forward = lambda *args, **kwargs: None
    split_attention(model)
    assert isinstance(model[0], SplitAttention)
    assert type(model[1]) is OwnForward
    assert model[2] is patched


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize(
    "reparametrize",
    [
        lambda m: parametrize.register_parametrization(m, "in_proj_weight", Doubling()),
        lambda m: prune.random_unstructured(m, "in_proj_weight", 0.5),
    ],
    ids=["parametrized", "pruned"],
)
def test_computed_weights_are_refused_before_anything_is_replaced(reparametrize: Any) -> None:
    model = nn.ModuleDict({"first": attention(), "second": attention()})
    reparametrize(model["second"])
    first = model["first"]
    with pytest.raises(InputError, match="second: the weights of this attention are computed"):
        split_attention(model)
    assert model["first"] is first


def test_a_bare_attention_can_not_be_replaced_in_place() -> None:
    with pytest.raises(InputError, match="MultiheadAttention"):
        split_attention(attention())


@pytest.mark.parametrize("name", NETWORKS)
def test_copies_and_pickles(name: str) -> None:
    model, x = network(name)
    with splitting_attention(model):
        expected = model(x)
        copied = copy.deepcopy(model)
    assert torch.equal(copied(x), expected)
    file = io.BytesIO()
    torch.save(copied, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(copied))(x), expected)
