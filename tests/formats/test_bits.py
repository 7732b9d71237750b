"""Bit packing: sizes, and that nothing is lost, for every width."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ptq.formats import bits
from ptq.formats.tensors import BLOCK


@given(st.integers(1, 16), st.integers(0, 300), st.integers(0, 2**32 - 1))
def test_codes_come_back_from_as_few_bytes_as_hold_them(width: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**width, (count,), generator=generator, dtype=torch.int32).to(bits.code_dtype(width))
    payload = bits.pack(codes, width)
    assert payload.dtype == torch.uint8 and len(payload) == -(-count * width // 8) == bits.packed_length(count, width)
    assert torch.equal(bits.unpack(payload, count, width), codes)


@pytest.mark.parametrize("width", [1, 3, 4, 8, 11])
@pytest.mark.parametrize("count", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 13])
def test_blocks_join(width: int, count: int) -> None:
    codes = (torch.arange(count, dtype=torch.int32) * 7919 % 2**width).to(bits.code_dtype(width))
    assert torch.equal(bits.unpack(bits.pack(codes, width), count, width), codes)


@pytest.mark.parametrize("width", range(1, 17))
def test_the_layout_is_the_documented_one(width: int) -> None:
    """Files outlive versions: the planes are written down here once more, with Python's integers."""
    count = 45
    codes = [(37 * index + 11) % 2**width for index in range(count)]
    group = 8 // np.gcd(width, 8)
    plane, width_bytes = count // group, width * group // 8
    expected = np.zeros((width_bytes, plane), dtype=np.uint8)
    for place in range(plane):
        word = sum(codes[index * plane + place] << (index * width) for index in range(group))
        expected[:, place] = list(word.to_bytes(width_bytes, "little"))
    rest = codes[plane * group :]
    word = sum(code << (index * width) for index, code in enumerate(rest))
    tail = word.to_bytes(-(-len(rest) * width // 8), "little")
    packed = bits.pack(torch.tensor(codes, dtype=torch.int32).to(bits.code_dtype(width)), width)
    assert bytes(packed.tolist()) == expected.tobytes() + tail


@pytest.mark.parametrize("width", [1, 3, 8, 12])
def test_a_gpu_s_blocks_are_laid_out_as_a_cpu_s(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 3 * BLOCK + 77
    codes = (torch.arange(count, dtype=torch.int32) * 7919 % 2**width).to(bits.code_dtype(width))
    expected = bits.pack(codes, width)
    one_by_one = bits._runs
    monkeypatch.setattr(bits, "_runs", lambda whole, device: one_by_one(whole, torch.device("cuda")))
    assert torch.equal(bits.pack(codes, width), expected)
    assert torch.equal(bits.unpack(expected, count, width), codes)
