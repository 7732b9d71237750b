"""What every format promises, held for every format."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ptq import formats
from ptq.errors import InputError
from ptq.formats import NAMES, Format, Packed, format, from_spec

TEXTS = [
    "raw",
    "affine",
    "affine:bits=4,symmetric,axis=0",
    "affine:bits=2,full",
    "affine:bits=3,axis=-1,group=2",
    "affine:bits=5,group=7",
    "affine:bits=16",
    "affine:bits=12,power_of_two",
    "affine:bits=4,stochastic",
    "affine:bits=3,symmetric,stochastic,axis=0",
    "affine:bits=3,power_of_two,stochastic",
    "truncate:step=0.03125",
    "truncate:step=0.1,floor,bits=5,saturate",
    "topk:ratio=0.3",
    "topk:ratio=0.01",
    "topk:ratio=1",
    "topk:ratio=0.3+affine:bits=4",
    "topk:ratio=0.5+multistep:parts=3,bits=3",
    "downsample",
    "downsample:factor=3,bilinear+affine:bits=8",
    "downsample+topk:ratio=0.5+affine:bits=4",
    "multistep",
    "multistep:parts=5,bits=3",
    "multistep:parts=1,bits=8",
    "multistep:parts=16,bits=1",
    "levels:bits=2,levels=-1/-0.1/0.25/1",
    "qsgd:bits=3,bucket=16",
    "qsgdinf:bits=4,nearest",
    "nuqsgd:bits=3,zero,bucket=10",
    "terngrad:clip=2.5",
    "alq:bits=3,bucket=32",
    "alqg:bits=2,zero",
    "amq:bits=3,linf,nearest",
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(), (1,), (0,), (3, 0), (13,), (5, 7), (2, 3, 5, 4), (2, 1, 3, 2, 5)]
VALUES = ["normal", "relu", "constant", "zero", "tied", "large"]


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tensor(values: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    normal = torch.randn(shape, generator=generator(seed))
    made = {
        "normal": normal,
        "relu": normal.relu(),
        "constant": torch.full(shape, -0.7),
        "zero": torch.zeros(shape),
        "tied": normal.round(),
        "large": normal.sign() * (6e4 if dtype == torch.float16 else 3e38),
    }
    return made[values].to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    whole = kinds[a.element_size()]
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))
    )


def fits(form: Format, values: str) -> bool:
    return not (form.name == "truncate" and values == "large" and "saturate" not in str(form))


@pytest.mark.parametrize("text", TEXTS)
def test_fake_is_decode_of_encode_and_sizes_depend_on_shapes_alone(text: str) -> None:
    form = format(text)
    for shape in SHAPES:
        for dtype in DTYPES:
            for values in filter(lambda values: fits(form, values), VALUES):
                x = tensor(values, shape, dtype)
                kept = x.clone()
                packed = form.encode(x, generator())
                restored = form.decode(packed)
                case = (shape, dtype, values)
                assert same_bits(x, kept), case
                assert restored.shape == x.shape and restored.dtype == dtype and restored.isfinite().all(), case
                assert same_bits(form.fake(x, generator()), restored), case
                assert packed.payload.dtype == torch.uint8, case
                assert packed.nbytes == packed.payload.numel() == form.nbytes_for(shape, dtype), case
                if values == "zero" and "levels" not in form.name:
                    assert not restored.any(), case


@pytest.mark.parametrize("text", TEXTS)
def test_views_give_what_copies_give(text: str) -> None:
    form = format(text)
    base = tensor("normal", (6, 10))
    for view in (base.t(), base[::2, 1::3], base.t()[1:], base[0].expand(4, 10)):
        kept = base.clone()
        packed = form.encode(view, generator())
        assert torch.equal(packed.payload, form.encode(view.contiguous(), generator()).payload)
        assert same_bits(form.fake(view, generator()), packed.decode())
        assert torch.equal(base, kept)


@pytest.mark.parametrize("text", TEXTS)
def test_specs_and_texts_read_back(text: str) -> None:
    form = format(text)
    assert format(str(form)) == form
    assert from_spec(json.loads(json.dumps(form.spec()))) == form
    assert format(form) is form
    x = tensor("normal", (3, 4))
    packed = form.encode(x, generator())
    again = Packed.from_json(json.loads(json.dumps(packed.to_json())), packed.payload)
    assert same_bits(again.decode(), packed.decode())


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_are_refused_with_their_place(text: str, bad: float) -> None:
    x = tensor("normal", (4, 5))
    x[2, 1] = x[3, 4] = bad
    for call in (format(text).encode, format(text).fake):
        with pytest.raises(InputError, match=r"2 of 20 values are NaN or Inf, the first at index \(2, 1\)"):
            call(x)


@pytest.mark.parametrize("text", [text for text in TEXTS if not text.startswith(("topk", "downsample"))])
def test_the_gradient_passes_straight_through(text: str) -> None:
    x = tensor("normal", (4, 6)).requires_grad_()
    weight = torch.arange(24.0).reshape(4, 6)
    (format(text).fake(x, generator()) * weight).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, weight)


@pytest.mark.parametrize("text", [text for text in TEXTS if "stochastic" not in text and "alq" not in text])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), values=st.sampled_from(["normal", "relu", "tied"]))
def test_the_same_tensor_and_generator_give_the_same_bytes(text: str, seed: int, values: str) -> None:
    form = format(text)
    x = tensor(values, (7, 9), seed=seed)
    assert torch.equal(form.encode(x, generator()).payload, form.encode(x, generator()).payload)


IDEMPOTENT = [
    "raw",
    "affine:bits=4,symmetric,axis=0",
    "affine:bits=8,symmetric",
    "truncate:step=0.03125",
    "topk:ratio=0.3",
    "topk:ratio=0.3+affine:bits=4,symmetric",
    "multistep:parts=1,bits=4",
    "qsgdinf:bits=3,nearest,zero",
    "downsample",
]


@pytest.mark.parametrize("text", IDEMPOTENT)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_is_on_the_grid_stays(text: str, seed: int) -> None:
    """Where the range is kept by the first pass, a second changes nothing but the last bits of a scale."""
    form = format(text)
    once = form.fake(tensor("normal", (6, 10), seed=seed))
    torch.testing.assert_close(form.fake(once), once, rtol=1e-6, atol=1e-6)


MONOTONE = [
    "affine:bits=3",
    "affine:bits=4,symmetric",
    "affine:bits=2,full,power_of_two",
    "truncate:step=0.1,floor",
    "multistep:parts=4,bits=2",
    "multistep:parts=3,bits=1",
    "qsgdinf:bits=3,nearest",
    "amq:bits=3,nearest",
]


@pytest.mark.parametrize("text", MONOTONE)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), values=st.sampled_from(["normal", "relu", "tied", "constant"]))
def test_the_order_of_values_is_kept(text: str, seed: int, values: str) -> None:
    x = tensor(values, (50,), seed=seed).sort().values
    # A grid point is min + code · step in float32: neighbouring parts may meet in its last bit.
    assert (format(text).fake(x).diff() >= -1e-6).all()


PERMUTED = [
    "affine:bits=3",
    "affine:bits=4,full",
    "truncate:step=0.1",
    "topk:ratio=0.3",
    "topk:ratio=0.3+affine:bits=3",
    "multistep:parts=4,bits=3",
    "qsgdinf:bits=3,nearest",
    "nuqsgd:bits=3,nearest",
]


@pytest.mark.parametrize("text", PERMUTED)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_permuting_the_values_permutes_the_result(text: str, seed: int) -> None:
    form = format(text)
    x = tensor("normal", (60,), seed=seed)  # without ties, which go by index
    order = torch.randperm(60, generator=generator(seed))
    torch.testing.assert_close(form.fake(x)[order], form.fake(x[order]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "text", ["affine:bits={}", "affine:bits={},symmetric", "multistep:parts=2,bits={}", "qsgdinf:bits={},nearest"]
)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_more_bits_mean_a_smaller_bound(text: str, seed: int) -> None:
    x = tensor("normal", (400,), seed=seed)
    errors = [float((format(text.format(bits)).fake(x) - x).abs().max()) for bits in (2, 4, 6, 8)]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("affin", "'affin' is unknown, the names are raw, affine, truncate"),
        ("affine:bit=4", "'bit=4' is not an option of affine; its options are bits=…, symmetric, full, axis=…"),
        ("affine:bits", "is not an option"),
        ("affine:bits=four", "bits=four needs a whole number"),
        ("affine:bits=17", "from 2 to 16"),
        ("affine:symmetric=maybe", "needs true or false"),
        ("affine:rounding=up", "choose one of nearest, stochastic"),
        ("affine:symmetric,full", "give one of them"),
        ("affine:group=0", "at least one member"),
        ("affine+affine", "affine ends a chain, only topk, downsample"),
        ("topk:ratio=0", "above 0 and up to 1"),
        ("topk+affine:axis=0", "the kept values have no axes"),
        ("multistep:parts=129", "from 1 to 128"),
        ("multistep:parts=4,bits=15", "words of 17 bits"),
        ("truncate:step=0", "above 0"),
        ("downsample:factor=0", "from 1 up"),
        ("downsample:mode=cubic", "nearest, bilinear"),
        ("levels:levels=-1/0.5/0.2/1", "rising numbers from -1 to 1"),
        ("levels:bits=9", "from 1 to 8"),
        ("levels:norm=l1", "choose one of l2, linf"),
        ("nuqsgd:p=1.5", "between 0 and 1"),
        ("", "the names are"),
    ],
)
def test_a_wrong_text_lists_what_is_right(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        format(text)


def test_every_name_stands_for_a_format() -> None:
    for name in NAMES:
        assert isinstance(format(name), Format)


def test_a_spec_of_the_wrong_kind_is_explained() -> None:
    with pytest.raises(InputError, match="a mapping with the key 'format'"):
        from_spec({"bits": 4})
    with pytest.raises(InputError, match="its options are bits"):
        from_spec({"format": "affine", "bit": 4})
    with pytest.raises(InputError, match="wrong kind"):
        from_spec({"format": "affine", "group": "many"})
    with pytest.raises(InputError, match="from 2 to 16"):
        from_spec({"format": "affine", "bits": "4"})
    packed = format("affine").encode(torch.ones(3))
    with pytest.raises(InputError, match="needs shape, dtype and format"):
        Packed.from_json({"shape": [3]}, packed.payload)
    assert packed.to("cpu").decode().tolist() == packed.decode().tolist()


def test_the_classes_are_there_by_name() -> None:
    assert formats.Affine(bits=4, symmetric=True) == format("affine:bits=4,symmetric")
    for name in formats.__all__:
        assert getattr(formats, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Afine'"):
        formats.Afine  # noqa: B018


def test_only_floats_are_taken_and_payloads_are_checked() -> None:
    form = format("affine:bits=4")
    with pytest.raises(InputError, match=r"float16, bfloat16, float32, float64; this is torch\.int64"):
        form.encode(torch.arange(3))
    packed = form.encode(torch.ones(10))
    cut = Packed(payload=packed.payload[:-1], shape=packed.shape, dtype=packed.dtype, format=form)
    with pytest.raises(InputError, match="takes 13 bytes, the payload has 12"):
        cut.decode()
    with pytest.raises(InputError, match="can't be decoded as"):
        format("affine:bits=5").decode(packed)
    with pytest.raises(InputError, match="beyond float32"):
        form.encode(torch.tensor([1e200], dtype=torch.float64))
    with pytest.raises(InputError, match="has axes -1 to 0"):
        format("affine:axis=1").encode(torch.ones(3))


STOCHASTIC = [
    "affine:bits=3,stochastic",
    "affine:bits=3,symmetric,stochastic",
    "affine:bits=2,full,stochastic",
    "affine:bits=4,power_of_two,stochastic",
    "qsgd:bits=2",
    "qsgdinf:bits=3",
    "nuqsgd:bits=3,zero",
    "terngrad",
    "levels:bits=2,levels=-1/-0.3/0.6/1",
]


@pytest.mark.parametrize("text", STOCHASTIC)
def test_stochastic_rounding_is_unbiased(text: str) -> None:
    """The mean of 2,000 roundings lies within five of its standard deviations of the value, at every element."""
    form, draws, x = format(text), generator(), tensor("normal", (40,), seed=5)
    results = torch.stack([form.fake(x, draws) for _ in range(2000)]).double()
    deviation = results.std(0) / 2000**0.5
    assert ((results.mean(0) - x).abs() <= 5 * deviation + 1e-6 * x.abs().max()).all()
    assert (results.std(0) > 0).any()


@pytest.mark.parametrize(
    "text",
    [
        "affine:bits=3,stochastic,axis=0",
        "affine:bits=4,stochastic,group=20",
        "qsgd:bits=3,bucket=10",
        "terngrad:bucket=20",
    ],
)
@settings(max_examples=20, deadline=None)
@given(cut=st.integers(0, 12))
def test_batch_splits_don_t_change_stochastic_rounding(text: str, cut: int) -> None:
    """Where every group lies within a sample: one generator, the same numbers for the whole and for its pieces."""
    form, x = format(text), tensor("normal", (12, 20))
    draws = generator()
    pieces = [form.fake(part, draws) for part in (x[:cut], x[cut:])]
    assert torch.equal(torch.cat(pieces), form.fake(x, generator()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("text", [text for text in TEXTS if "stochastic" not in text])
def test_a_gpu_gives_what_the_cpu_gives(text: str) -> None:
    form, x = format(text), tensor("normal", (8, 12))
    if "nearest" in text or "levels" not in form.name:
        torch.testing.assert_close(form.decode(form.encode(x.cuda())).cpu(), form.decode(form.encode(x)))
