"""Packed checkpoints: what is packed, what is not, and that the file reads back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ptq.errors import InputError
from ptq.formats import format
from ptq.packing import PackedCheckpoint, pack

RULES = {"conv": "affine:bits=8,symmetric,axis=0", "linear": "affine:bits=4"}


@pytest.fixture
def state(small_network: nn.Module) -> dict[str, Tensor]:
    return dict(small_network.state_dict())


def test_each_kind_follows_its_own_rule_and_the_rest_is_untouched(state: dict[str, Tensor]) -> None:
    before = {name: tensor.clone() for name, tensor in state.items()}
    checkpoint = pack(state, RULES)
    restored = checkpoint.state_dict()
    assert list(restored) == list(state)
    for name, tensor in state.items():
        assert torch.equal(tensor, before[name]), "the source was changed"
        assert restored[name].shape == tensor.shape and restored[name].dtype == tensor.dtype
        if name in checkpoint.packed:
            form = format(RULES[checkpoint.kinds[name]])
            assert torch.equal(restored[name], form.fake(tensor))
        else:
            assert torch.equal(restored[name], tensor)
            assert restored[name].data_ptr() != tensor.data_ptr()
    kinds = {name: checkpoint.kinds.get(name) for name in state if name.endswith("weight")}
    assert kinds["stem.weight"] == kinds["up.weight"] == kinds["depthwise.weight"] == "conv"
    assert kinds["head.weight"] == "linear" and kinds["stem_norm.weight"] is None
    assert checkpoint.kept["stem_norm.num_batches_tracked"].dtype == torch.int64


def test_names_and_the_model_agree_on_what_is_a_layer(small_network: nn.Module, state: dict[str, Tensor]) -> None:
    assert pack(state, RULES).kinds == pack(state, RULES, model=small_network).kinds


def test_embeddings_are_told_by_their_name() -> None:
    state = {
        "token_embedding.weight": torch.randn(10, 4),
        "mlp.weight": torch.randn(4, 4),
        "wte.weight": torch.ones(3, 2),
    }
    assert list(pack(state, RULES).kinds) == ["mlp.weight"]


def test_the_file_reads_back_and_its_size_is_reported(state: dict[str, Tensor], tmp_path: Path) -> None:
    checkpoint = pack(state, RULES)
    path = tmp_path / "model.packed.safetensors"
    size = checkpoint.save(path)
    assert size == path.stat().st_size and size >= checkpoint.nbytes
    loaded = PackedCheckpoint.load(path)
    assert loaded.entries == checkpoint.entries
    for name, tensor in checkpoint.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert checkpoint.source_bytes == sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    head = next(entry for entry in loaded.entries if entry.name == "head.weight")
    assert head.packed_bytes == 8 + 15 and head.source_bytes == 120  # 30 values: 4 bits each, scale and zero-point


def test_a_kind_without_a_rule_is_kept(state: dict[str, Tensor]) -> None:
    assert set(pack(state, {"linear": "affine:bits=4"}).packed) == {"head.weight"}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"convolution": "affine"}, "the rules are conv, linear"),
        ({"conv": "affin"}, "the names are raw, affine"),
    ],
)
def test_wrong_rules_are_explained(state: dict[str, Tensor], rules: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pack(state, rules)


def test_errors_name_the_tensor() -> None:
    with pytest.raises(InputError, match=r"a\.weight: 1 of 4 values are NaN or Inf, the first at index \(1, 0\)"):
        pack({"a.weight": torch.tensor([[0.0, 1.0], [torch.nan, 2.0]])}, RULES)
    with pytest.raises(InputError, match="no conv or linear weights"):
        pack({"bias": torch.ones(3)}, RULES)


def test_a_cut_payload_is_refused(state: dict[str, Tensor], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = tmp_path / "cut.safetensors"
    pack(state, RULES).save(path)
    tensors = load_file(path)
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors["head.weight"] = tensors["head.weight"][:-1].clone()
    save_file(tensors, path, metadata)
    with pytest.raises(InputError, match="takes 23 bytes, the payload has 22"):
        PackedCheckpoint.load(path)
