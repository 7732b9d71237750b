"""Real architectures with random weights: smoothing changes no output, and what folds is counted."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ptq
from ptq.batches import as_call
from ptq.smoothing.modules import InputScaling
from ptq.tasks.networks.cifar_resnet import CifarResNet
from ptq.tasks.networks.digits import DigitsNet
from ptq.vision import torchvision


def vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: torchvision("models").get_model(name, weights=None, num_classes=10, **options)


def wide_resnet() -> nn.Module:
    """The widths of wide_resnet50_2, one bottleneck in each stage."""
    resnet = torchvision("models.resnet")
    return resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=10, width_per_group=128)


def vgg(batch_norm: bool) -> nn.Module:
    """The features of vgg11; 64 units where torchvision's classifier has 4096."""
    layers = torchvision("models.vgg")
    model = layers.VGG(nn.Identity(), num_classes=10, init_weights=False)
    model.features = layers.make_layers(layers.cfgs["A"], batch_norm=batch_norm)
    model.avgpool = nn.AdaptiveAvgPool2d(2)
    model.classifier = nn.Sequential(
        *(nn.Linear(512 * 4, 64), nn.ReLU(True), nn.Dropout()),
        *(nn.Linear(64, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, 10)),
    )
    return model


def vit() -> nn.Module:
    model = torchvision("models").VisionTransformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=10
    )
    nn.init.normal_(model.heads.head.weight)  # torchvision's is zero
    return model


def swin() -> nn.Module:
    return torchvision("models").SwinTransformer(
        patch_size=[2, 2], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=10
    )


def text_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=20,
        num_labels=3,
        pad_token_id=1,
    )
    return getattr(transformers, f"{name}ForSequenceClassification")(config)


def images(size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(2, 3, size, size, generator=generator)


def digits(generator: torch.Generator) -> Tensor:
    return torch.randn(2, 1, 8, 8, generator=generator)


def tokens(generator: torch.Generator) -> dict[str, Tensor]:
    """Two sentences, the second of them padded."""
    ids = torch.randint(2, 50, (2, 10), generator=generator)
    mask = torch.ones(2, 10, dtype=torch.int64)
    ids[1, 6:], mask[1, 6:] = 1, 0
    return {"input_ids": ids, "attention_mask": mask}


# name → model, batch, (folded, explicit, skipped). The first layer reads the input of the model, and can't fold.
# With SiLU, GELU or Hardswish (efficientnet, mobilenet_v3, convnext, vit, swin) what reads the activation is explicit.
# In BERT the LayerNorm in front of q, k and v is read by the residual, too, which the next LayerNorm reads: only the
# attention's output (into v) and the head (into the last LayerNorm) fold.
ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Any], tuple[int, int, int]]] = {
    "resnet18": (vision("resnet18"), partial(images, 32), (20, 1, 0)),
    "resnext50_32x4d": (vision("resnext50_32x4d"), partial(images, 32), (53, 1, 0)),
    "wide resnet": (wide_resnet, partial(images, 32), (17, 1, 0)),
    "vgg11": (partial(vgg, batch_norm=False), partial(images, 32), (10, 1, 0)),
    "vgg11_bn": (partial(vgg, batch_norm=True), partial(images, 32), (10, 1, 0)),
    "mobilenet_v2": (vision("mobilenet_v2"), partial(images, 32), (52, 1, 0)),
    "mobilenet_v3_small": (vision("mobilenet_v3_small"), partial(images, 32), (26, 28, 0)),
    "efficientnet_b0": (vision("efficientnet_b0"), partial(images, 32), (16, 66, 0)),
    "mnasnet0_5": (vision("mnasnet0_5"), partial(images, 32), (52, 1, 0)),
    "shufflenet_v2_x0_5": (vision("shufflenet_v2_x0_5"), partial(images, 32), (56, 1, 0)),
    "densenet121": (vision("densenet121"), partial(images, 32), (120, 1, 0)),
    "googlenet": (vision("googlenet", aux_logits=False, init_weights=False), partial(images, 32), (57, 1, 0)),
    "inception_v3": (vision("inception_v3", aux_logits=False, init_weights=False), partial(images, 75), (94, 1, 0)),
    "squeezenet1_1": (vision("squeezenet1_1"), partial(images, 32), (25, 1, 0)),
    "regnet_y_400mf": (vision("regnet_y_400mf"), partial(images, 32), (85, 1, 0)),
    "convnext_tiny": (vision("convnext_tiny"), partial(images, 32), (22, 37, 0)),
    "vit": (vit, partial(images, 16), (11, 3, 0)),
    "swin": (swin, partial(images, 16), (14, 5, 0)),
    "cifar resnet20": (partial(CifarResNet, 3), partial(images, 32), (19, 1, 0)),
    "cifar resnet56": (partial(CifarResNet, 9), partial(images, 32), (55, 1, 0)),
    "digits": (DigitsNet, digits, (23, 1, 0)),
    "bert": (partial(text_model, "Bert"), tokens, (3, 11, 0)),
    "roberta": (partial(text_model, "Roberta"), tokens, (3, 11, 0)),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name: str, random_batchnorms: Callable[[nn.Module], nn.Module]) -> None:
    factory, batch, expected = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = with_random_norms(random_batchnorms(factory()))
    generator = torch.Generator().manual_seed(1)
    batches = [batch(generator)]
    calibration = ptq.calibrate(model, batches)
    smoothed = ptq.smooth(model, calibration, 0.5, batches=batches, proof_batches=1)
    assert smoothed.proof is not None and smoothed.proof.output < 1e-5
    assert largest_difference(model, smoothed.model, [*batches, batch(generator)]) < 1e-5
    actions = Counter(entry.action for entry in smoothed.ledger)
    assert (actions["folded"], actions["explicit"], actions["skipped"]) == expected
    assert sum(isinstance(module, InputScaling) for module in smoothed.model.modules()) == actions["explicit"]
    assert all(bool((smoothed.factors[e.layer] != 1).any()) for e in smoothed.ledger if e.action != "skipped")


def test_the_projections_of_attention_share_one_factor() -> None:
    torch.manual_seed(0)
    model = with_random_norms(vit())
    calibration = ptq.calibrate(model, [torch.randn(2, 3, 16, 16)])
    smoothed = ptq.smooth(model, calibration, 0.5)
    prefix = "encoder.layers.encoder_layer_0"
    q, k, v = (f"{prefix}.self_attention.{name}_proj" for name in "qkv")
    ledger = {entry.layer: entry for entry in smoothed.ledger}
    assert ledger[q].shared_with == (k, v) and ledger[v].shared_with == (q, k)
    assert ledger[q].reason == ledger[k].reason == f"into {prefix}.ln_1"
    assert torch.equal(smoothed.factors[q], smoothed.factors[k]) and torch.equal(
        smoothed.factors[q], smoothed.factors[v]
    )
    assert ledger[f"{prefix}.self_attention.out_proj"].reason == f"into {v}"
    packed = model.get_submodule(f"{prefix}.self_attention").in_proj_weight.detach()  # [3 · E, E]
    expected = (calibration.layers[q].activation_absmax / packed.abs().amax(0)).sqrt()
    torch.testing.assert_close(smoothed.factors[q], expected)


@torch.no_grad()
def with_random_norms(model: nn.Module) -> nn.Module:
    """LayerNorms and biases that are far from the identity."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.weight.uniform_(0.3, 3)
            module.bias.uniform_(-1, 1)
        elif isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is not None:
            module.bias.uniform_(-0.5, 0.5)
    return model.eval()


@torch.no_grad()
def largest_difference(model: nn.Module, smoothed: nn.Module, batches: list[Any]) -> float:
    """Relative to the largest output, in float32."""
    pairs = [(as_call(batch).logits(model), as_call(copy.copy(batch)).logits(smoothed)) for batch in batches]
    return max(float((found - expected).abs().max() / expected.abs().max()) for expected, found in pairs)
