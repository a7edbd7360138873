"""Layers of any decoder's state dict, and RMSNorm with one scale."""

import copy

import pytest
import torch
from torch import nn

from helpers import some_tokens
from hf.softmax1_models import build
from optim.test_optim_axes import FRAMEWORKS
from wakeful.norms import NormSpec
from wakeful.norms import RMSNormSingle as LibraryNorm
from wakeful.parts.inherit_layers import inherit_layers
from wakeful.parts.rmsnorm_single import RMSNormSingle


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("layers", [1, [1], [1, 0], [0, 0, 1]])
def test_the_weights_are_those_of_the_model_with_these_layers(
    kind: str, layers: int | list[int]
) -> None:
    reference = build(kind, "eager")
    kept = list(range(layers)) if isinstance(layers, int) else layers
    key = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    model = build(kind, "eager", **{key: len(kept)})
    model.load_state_dict(inherit_layers(reference.state_dict(), layers))
    expected = copy.deepcopy(reference)
    inner = expected.base_model
    name = "h" if kind == "gpt2" else "layers"
    setattr(inner, name, nn.ModuleList(getattr(inner, name)[layer] for layer in kept))
    inner.config.num_hidden_layers = len(kept)
    tokens = some_tokens(2, 9)
    found = model(tokens, use_cache=False).logits
    wanted = expected(tokens, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_other_frameworks_names_have_one_stack(framework: str) -> None:
    _, shapes = FRAMEWORKS[framework]
    weights = {name: torch.empty(shape) for name, shape in shapes.items()}
    numbers = sorted({int(part) for name in weights for part in name.split(".") if part.isdigit()})
    kept = inherit_layers(weights, [numbers[0]] if numbers[0] == 0 else [0])
    assert len(kept) < len(weights) or len(numbers) == 1
    assert all(kept[name] is weights[name] for name in kept)


def test_experts_are_no_layers() -> None:
    names = ("experts.3.w", "norm")
    weights = {f"layers.{n}.{name}": torch.zeros(n) for n in (0, 1) for name in names}
    kept = inherit_layers(weights | {"head": torch.ones(1)}, [1])
    assert list(kept) == ["layers.0.experts.3.w", "layers.0.norm", "head"]
    assert kept["layers.0.norm"].shape == (1,)


def test_two_stacks_are_named_and_absent_layers_refused() -> None:
    weights = {f"{stack}.{n}.w": torch.zeros(1) for stack in ("encoder", "decoder") for n in (0, 1)}
    with pytest.raises(ValueError, match=r"'encoder\.' \(2\), 'decoder\.' \(2\)"):
        inherit_layers(weights, 1)
    kept = inherit_layers(weights, 1, stack="decoder.")
    assert list(kept) == ["encoder.0.w", "encoder.1.w", "decoder.0.w"]
    with pytest.raises(ValueError, match=r"has 2 layers, and none of \[2\]"):
        inherit_layers(weights, 3, stack="decoder.")
    with pytest.raises(ValueError, match="there is none"):
        inherit_layers({"head": torch.zeros(1)}, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_is_the_librarys(dtype: torch.dtype) -> None:
    part, library = RMSNormSingle(6).to(dtype), LibraryNorm()
    library.attach(NormSpec(part="mlp", layer=0, num_layers=1, width=6, eps=1e-6, bias=False))
    library.to(dtype)
    for norm in (part, library):
        nn.init.constant_(norm.weight, 1.7)
    x = torch.randn(3, 5, 6, dtype=torch.float64).to(dtype).requires_grad_()
    outputs = part(x), library(x)
    assert outputs[0].dtype == dtype
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(*outputs, rtol=tolerance, atol=tolerance)
    upstream = torch.randn_like(x)
    for got, want in zip(
        torch.autograd.grad(outputs[0], [x, part.weight], upstream),
        torch.autograd.grad(outputs[1], [x, library.weight], upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=10 * tolerance)
