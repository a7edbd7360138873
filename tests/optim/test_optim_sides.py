"""The rules that say which side of which weight is rotated."""

from typing import Any

import pytest
import torch
from torch import nn

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.optim.sides import (
    GPT2_RULES,
    WAKEFUL_RULES,
    Rule,
    choose_table,
    find_sides,
    plain_name,
)
from wakeful.variants import variants

D, F, V, L = 8, 20, 50, 16


def ours(positions: bool = False, head: bool = True) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (V, D)}
    if positions:
        shapes["positions.weight"] = (L, D)
    for n in range(2):
        for part in ("query", "key", "value"):
            shapes[f"blocks.{n}.attention.{part}.weight"] = (D if part == "query" else 4, D)
        shapes[f"blocks.{n}.attention.out.weight"] = (D, D)
        shapes[f"blocks.{n}.mlp.gate.weight"] = shapes[f"blocks.{n}.mlp.up.weight"] = (F, D)
        shapes[f"blocks.{n}.mlp.down.weight"] = (D, F)
        shapes[f"blocks.{n}.attention_norm.weight"] = ()
        shapes[f"blocks.{n}.mlp_norm.weight"] = (D,)
    shapes["norm.weight"] = (D,)
    if head:
        shapes["head.weight"] = (V, D)
    return shapes


def test_our_names() -> None:
    sides = find_sides(ours(positions=True), WAKEFUL_RULES)
    assert sides["embed.weight"] == sides["positions.weight"] == sides["head.weight"] == (1,)
    assert sides["blocks.1.attention.key.weight"] == (1,)
    assert sides["blocks.1.attention.out.weight"] == (0,)
    assert sides["blocks.0.mlp.up.weight"] == (1,)
    assert sides["blocks.0.mlp.down.weight"] == (0,)
    assert sides["norm.weight"] == sides["blocks.0.attention_norm.weight"] == ()


EXAMPLES = [
    {folder[:-1] if folder != "depth" else folder: example}
    for folder in ("routes", "normalizers", "depth")
    for variant in variants(folder).values()
    for example in variant.examples
]


@pytest.mark.parametrize(
    "parts",
    [*EXAMPLES, {"positions": "learned", "mlp": "gelu", "bias": True, "tied": True}],
    ids=str,
)
def test_our_models_whatever_their_parts(parts: dict[str, Any]) -> None:
    width = 32
    config = ModelConfig(
        vocab_size=50, width=width, mlp_width=40, num_layers=4, num_kv_heads=2, **parts
    )
    shapes = {n: tuple(p.shape) for n, p in Decoder(config).named_parameters()}
    assert choose_table(shapes) is WAKEFUL_RULES
    for name, axes in find_sides(shapes, WAKEFUL_RULES).items():
        rotated = name.endswith(".weight") and len(shapes[name]) == 2
        assert [shapes[name][axis] for axis in axes] == ([width] if rotated else []), name


def test_both_sides_leave_vocabularies_alone() -> None:
    sides = find_sides(ours(positions=True), WAKEFUL_RULES, both=True)
    assert sides["embed.weight"] == sides["positions.weight"] == sides["head.weight"] == (1,)
    assert sides["blocks.1.attention.query.weight"] == (1, 0)
    assert sides["blocks.0.mlp.down.weight"] == (0, 1)


@pytest.mark.parametrize("prefix", ["", "decoder.", "module.model."])
def test_prefixes_and_optional_rules(prefix: str) -> None:
    shapes = {prefix + name: shape for name, shape in ours(head=False).items()}
    assert choose_table(shapes) is WAKEFUL_RULES


def test_hugging_face_models() -> None:
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=D, n_head=2, vocab_size=V, n_positions=L)
    )
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=2,
            hidden_size=D,
            intermediate_size=F,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=V,
        )
    )
    for model in (gpt2, llama):
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        sides = find_sides(shapes, choose_table(shapes))
        for name, axes in sides.items():
            assert (len(axes) == 1) == (len(shapes[name]) == 2)
            assert all(shapes[name][axis] == D for axis in axes)
    sides = find_sides({n: tuple(p.shape) for n, p in gpt2.named_parameters()}, GPT2_RULES)
    assert sides["transformer.h.0.attn.c_proj.weight"] == (1,)  # Conv1D: (in, out)
    assert sides["transformer.h.0.attn.c_attn.weight"] == (0,)


def test_linear_weights_under_gpt2_names_are_caught_by_their_width() -> None:
    shapes = {
        "wte.weight": (V, D),
        "wpe.weight": (L, D),
        "h.0.attn.c_attn.weight": (3 * D, D),  # nn.Linear where Conv1D is (D, 3D)
        "h.0.attn.c_proj.weight": (D, D),
        "h.0.mlp.c_fc.weight": (4 * D, D),
        "h.0.mlp.c_proj.weight": (D, 4 * D),
    }
    with pytest.raises(WakefulError, match=r"c_attn.weight is 24 wide .* residual width 8"):
        find_sides(shapes, GPT2_RULES)


def test_strictness() -> None:
    with pytest.raises(WakefulError, match=r"match no parameter: 'blocks.*down"):
        find_sides({n: s for n, s in ours().items() if "down" not in n}, WAKEFUL_RULES)
    with pytest.raises(WakefulError, match=r"no rotation rule matches extra of shape \(3, 4\)"):
        find_sides({**ours(), "extra": (3, 4)}, WAKEFUL_RULES)
    with pytest.raises(WakefulError, match="only matrices"):
        find_sides({"w": (2, 3, 4)}, [Rule("w", 1)])
    with pytest.raises(WakefulError, match="only matrices"):
        find_sides({"w": (2, 3)}, [Rule("w", 2)])
    with pytest.raises(WakefulError, match="the nearest, wakeful, says: no rotation rule matches"):
        choose_table({**ours(), "extra": (3, 4)})


def test_order_and_leaving_alone() -> None:
    rules = [Rule("special", None), Rule(".*", 1)]
    assert find_sides({"special": (3, 4), "w": (5, 2)}, rules) == {"special": (), "w": (1,)}
    assert not Rule("head.weight", 1).matches("lm_head.weight")


def test_wrappers_leave_names_alone() -> None:
    assert plain_name("module._orig_mod.blocks.0.mlp.up.weight") == "blocks.0.mlp.up.weight"
    wrapped = nn.Sequential(nn.Linear(2, 2))
    assert [plain_name(n) for n, _ in wrapped.named_parameters()] == ["0.weight", "0.bias"]
    assert torch.get_default_dtype() == torch.float32
