"""Which axis is rotated, of any model, given with names or without."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from helpers import assert_rotated_along
from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError, WakefulWarning
from wakeful.model.decoder import Decoder
from wakeful.optim import OrthoAdam
from wakeful.optim.axes import plain_name
from wakeful.variants.families import FAMILIES
from wakeful.variants.roles import Role

D, F, V, L = 24, 40, 50, 31
IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
HIDDEN: dict[str, Any] = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 2, **IDS,
    "num_attention_heads": 2, "intermediate_size": F, "max_position_embeddings": L}  # fmt: skip
GPT2: dict[str, Any] = {"vocab_size": V, "n_embd": D, "n_inner": F, "n_layer": 2, "n_head": 2,
    "n_positions": L, **IDS}  # fmt: skip

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gemma": lambda: hf.GemmaForCausalLM(
        hf.GemmaConfig(**HIDDEN, num_key_value_heads=1, head_dim=16)
    ),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**HIDDEN)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**HIDDEN, num_key_value_heads=1)),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**HIDDEN, num_key_value_heads=1)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**HIDDEN)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(vocab_size=V, hidden_size=D, num_hidden_layers=2, num_attention_heads=2,
            ffn_dim=F, word_embed_proj_dim=D, max_position_embeddings=L, **IDS)
    ),
    "bloom": lambda: hf.BloomForCausalLM(
        hf.BloomConfig(vocab_size=V, hidden_size=D, n_layer=2, n_head=2, **IDS)
    ),
    "gptj": lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**GPT2, rotary_dim=4)),
    "starcoder2": lambda: hf.Starcoder2ForCausalLM(hf.Starcoder2Config(**HIDDEN)),
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:OrthoAdam does not know")
ALIASES = {"gemma": "llama", "phi3": "llama", "starcoder2": "llama"}


def tokens(step: int) -> Tensor:
    return torch.randint(1, V, (4, 16), generator=torch.Generator().manual_seed(step % 3))


def loss_of(model: nn.Module, step: int) -> Tensor:
    if isinstance(model, Decoder):
        ids = tokens(step)
        return nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return model(input_ids=tokens(step), labels=tokens(step)).loss


def learns(model: nn.Module, optimizer: OrthoAdam, loss: Callable[[int], Tensor]) -> None:
    before = loss(0).item()
    for step in range(12):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
    assert loss(0).item() < before - 0.1


# Any model


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_transformers_models(kind: str, named: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    model.eval()  # no dropout
    optimizer = OrthoAdam(model.named_parameters() if named else model.parameters(), lr=1e-2)
    for line in optimizer.plan():
        assert (len(line.axes) == 1) == (len(line.shape) == 2), line
        if named and line.axes:
            assert line.shape[line.axes[0]] == D, line
        if not named:
            assert (line.axes, line.why) in (((1,), "input axis"), ((), "scalar or vector")), line
    learns(model, optimizer, lambda step: loss_of(model, step))


@pytest.mark.parametrize("kind", [*MODELS, *OTHERS])
def test_the_table_knows_every_layer_of_its_families(kind: str) -> None:
    with torch.device("meta"):
        model = (MODELS | OTHERS)[kind]()
    plan = OrthoAdam(model.named_parameters()).plan()
    layers = [line for line in plan if len(line.shape) == 2 and ".0." in line.name]
    assert layers
    for line in layers:
        assert line.why == f"family {ALIASES.get(kind, kind)}", line
        assert line.shape[line.axes[0]] == D, line
    for line in plan:
        assert not line.axes or line.shape[line.axes[0]] == D, line
    by_name = {line.name: line for line in plan}
    both = OrthoAdam(model.named_parameters(), sides="both").plan()
    for line in both:
        counts = V in line.shape or L in line.shape
        assert line.axes[:1] == by_name[line.name].axes
        assert len(line.axes) < 2 or not counts, line


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_our_own_decoder(named: bool) -> None:
    config = ModelConfig(vocab_size=V, width=D, mlp_width=F, num_layers=2, num_heads=2)
    torch.manual_seed(0)
    model = Decoder(config)
    optimizer = OrthoAdam(model.named_parameters() if named else model.parameters(), lr=1e-2)
    learns(model, optimizer, lambda step: loss_of(model, step))


def test_our_decoder_with_the_parts_of_a_gpt2() -> None:
    config = ModelConfig(
        vocab_size=V, width=32, mlp_width=F, num_layers=4, num_kv_heads=2, positions="learned",
        mlp="gelu", bias=True, tied=True,
    )  # fmt: skip
    optimizer = OrthoAdam(Decoder(config).named_parameters())
    for line, entry in zip(optimizer.plan(), optimizer.param_groups[0]["rotations"], strict=True):
        assert_rotated_along(32, line, entry)


@pytest.mark.parametrize("named", [True, False])
def test_a_plain_network(named: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3))
    optimizer = OrthoAdam(net.named_parameters() if named else net.parameters(), lr=3e-2)
    x = torch.randn(20, 5)
    learns(net, optimizer, lambda step: (net(x) - x[:, :3].sin()).square().mean() * 2)
    assert str(optimizer.plan()) == (
        "name      number  shape  axis  rotation  why\n"
        "0.weight  1       12×5   1     hadamard  input axis\n"
        "0.bias    1       12     -     identity  scalar or vector\n"
        "2.weight  1       3×12   1     hadamard  input axis\n"
        "2.bias    1       3      -     identity  scalar or vector"
        if named else
        "name         number  shape  axis  rotation  why\n"
        "parameter 0  1       12×5   1     hadamard  input axis\n"
        "parameter 1  1       12     -     identity  scalar or vector\n"
        "parameter 2  1       3×12   1     hadamard  input axis\n"
        "parameter 3  1       3      -     identity  scalar or vector"
    )  # fmt: skip


def test_convolutions_keep_the_identity() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    optimizer = OrthoAdam(net.parameters(), lr=1e-2)
    plan = optimizer.plan()
    assert (plan[0].axes, plan[0].why) == ((), "more than two axes")
    x = torch.randn(6, 3, 4, 4)
    theirs = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    theirs.load_state_dict(net.state_dict())
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.0)
    for model, one in ((net, optimizer), (theirs, adamw)):
        model(x).square().mean().backward()
        one.step()
    torch.testing.assert_close(net[0].weight, theirs[0].weight)
    assert not torch.allclose(net[2].weight, theirs[2].weight, atol=1e-5)


@pytest.mark.slow
def test_it_needs_neither_transformers_nor_the_rest_of_the_house() -> None:
    program = "import sys; from wakeful.optim import OrthoAdam; print(*sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()
    rooms = {name.split(".")[1] for name in loaded if name.startswith("wakeful.")}
    below = {"variants", "discovery", "roles", "families", "errors", "version"}
    below |= {"device", "digests", "plugins", "parts"}
    assert rooms <= {"optim", *below}
    assert "transformers" not in loaded


# Other frameworks: the names and shapes of their parameters, (out, in)

KV = 8
FRAMEWORKS: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "torchtitan": ("torchtitan", {
        "tok_embeddings.weight": (V, D),
        "layers.0.attention.qkv_linear.wq.weight": (D, D),
        "layers.0.attention.qkv_linear.wk.weight": (KV, D),
        "layers.0.attention.qkv_linear.wv.weight": (KV, D),
        "layers.0.attention.wo.weight": (D, D),
        "layers.0.feed_forward.w1.weight": (F, D),
        "layers.0.feed_forward.w2.weight": (D, F),
        "layers.0.feed_forward.w3.weight": (F, D),
        "layers.1.attention.qkv_linear.wqkv.weight": (D + 2 * KV, D),
        "layers.1.attention.wkv_a.weight": (KV, D),
        "layers.1.attention.wq_a.weight": (KV, D),
        "layers.1.moe.router.gate.weight": (4, D),
        "layers.1.moe.shared_experts.w1.weight": (F, D),
        "layers.1.moe.shared_experts.w2.weight": (D, F),
        "layers.1.moe.shared_experts.w3.weight": (F, D),
        "lm_head.weight": (V, D),
    }),
    "Llama's own code, torchtitan before": ("torchtitan", {
        "tok_embeddings.weight": (V, D),
        "layers.0.attention.wq.weight": (D, D),
        "layers.0.attention.wk.weight": (KV, D),
        "layers.0.attention.wv.weight": (KV, D),
        "layers.0.attention.wo.weight": (D, D),
        "layers.0.feed_forward.w1.weight": (F, D),
        "layers.0.feed_forward.w2.weight": (D, F),
        "layers.0.feed_forward.w3.weight": (F, D),
        "output.weight": (V, D),
    }),
    "litgpt": ("litgpt", {
        "lm_head.weight": (V, D),
        "transformer.wte.weight": (V, D),
        "transformer.h.0.attn.qkv.weight": (D + 2 * KV, D),
        "transformer.h.0.attn.proj.weight": (D, D),
        "transformer.h.0.mlp.fc_1.weight": (F, D),
        "transformer.h.0.mlp.fc_2.weight": (F, D),
        "transformer.h.0.mlp.proj.weight": (D, F),
        "transformer.h.1.attn.attn.weight": (D + 2 * KV, D),
        "transformer.h.1.attn.proj.weight": (D, D),
        "transformer.h.1.mlp.fc.weight": (F, D),
        "transformer.h.1.mlp.proj.weight": (D, F),
        "transformer.h.2.attn.q_a_proj.weight": (KV, D),
        "transformer.h.2.attn.kv_a_proj_with_mqa.weight": (KV, D),
        "transformer.h.2.attn.proj.weight": (D, D),
        "transformer.h.2.mlp.gate.weight": (4, D),
        "transformer.h.2.mlp.experts.3.fc_1.weight": (F, D),
        "transformer.h.2.mlp.experts.3.proj.weight": (D, F),
        "transformer.h.2.mlp.shared_experts.fc_2.weight": (F, D),
        "transformer.h.2.mlp.shared_experts.proj.weight": (D, F),
    }),
    "Megatron": ("megatron", {
        "module.module.embedding.word_embeddings.weight": (V, D),
        "module.module.embedding.position_embeddings.weight": (L, D),
        "module.module.decoder.layers.0.self_attention.linear_qkv.weight": (D + 2 * KV, D),
        "module.module.decoder.layers.0.self_attention.linear_proj.weight": (D, D // 2),
        "module.module.decoder.layers.0.cross_attention.linear_q.weight": (D, D),
        "module.module.decoder.layers.0.cross_attention.linear_kv.weight": (2 * KV, D),
        "module.module.decoder.layers.0.cross_attention.linear_proj.weight": (D, D),
        "module.module.decoder.layers.0.mlp.linear_fc1.weight": (F, D),
        "module.module.decoder.layers.0.mlp.linear_fc2.weight": (D, F),
        "module.module.decoder.layers.1.self_attention.linear_q_down_proj.weight": (KV, D),
        "module.module.decoder.layers.1.self_attention.linear_kv_down_proj.weight": (KV, D),
        "module.module.decoder.layers.1.mlp.router.weight": (4, D),
        "module.module.decoder.layers.1.mlp.experts.linear_fc1.weight0": (F, D),
        "module.module.decoder.layers.1.mlp.experts.linear_fc2.weight3": (D, F),
        "module.module.decoder.layers.2.mlp.experts.local_experts.0.linear_fc1.weight": (F, D),
        "module.module.decoder.layers.2.mlp.experts.local_experts.0.linear_fc2.weight": (D, F),
        "module.module.decoder.layers.2.mlp.shared_experts.linear_fc1.weight": (F, D),
        "module.module.decoder.layers.2.mlp.shared_experts.linear_fc2.weight": (D, F),
        "module.module.output_layer.weight": (V, D),
    }),
    "OLMo-core": ("olmo_core", {
        "embeddings.weight": (V, D),
        "blocks.0.attention.w_q.weight": (D, D),
        "blocks.0.attention.w_k.weight": (KV, D),
        "blocks.0.attention.w_v.weight": (KV, D),
        "blocks.0.attention.w_g.weight": (4, D),
        "blocks.0.attention.w_out.weight": (D, D),
        "blocks.0.feed_forward.w1.weight": (F, D),
        "blocks.0.feed_forward.w2.weight": (D, F),
        "blocks.0.feed_forward.w3.weight": (F, D),
        "blocks.1.attention.w_qkv.weight": (3 * D, D),
        "blocks.1.attention.w_out.weight": (D, D),
        "blocks.1.feed_forward_moe.shared_mlp.w1.weight": (F, D),
        "blocks.1.feed_forward_moe.shared_mlp.w2.weight": (D, F),
        "lm_head.w_out.weight": (V, D),
    }),
    "nanoGPT": ("nanogpt", {
        "transformer.wte.weight": (V, D),
        "transformer.wpe.weight": (L, D),
        "transformer.h.0.attn.c_attn.weight": (3 * D, D),
        "transformer.h.0.attn.c_proj.weight": (D, D),
        "transformer.h.0.mlp.c_fc.weight": (F, D),
        "transformer.h.0.mlp.c_proj.weight": (D, F),
    }),
}  # fmt: skip


def silent(*args: Any, **options: Any) -> OrthoAdam:
    """Return an optimizer that was made without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return OrthoAdam(*args, **options)


WRITERS = ("wo", "w2", "proj", "linear_proj", "linear_fc2", "w_out", "c_proj")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_other_frameworks_names_are_known(framework: str) -> None:
    family, shapes = FRAMEWORKS[framework]
    named = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    plan = silent(named).plan()
    for line in plan:
        writes = line.name.split(".")[-2] in WRITERS and V not in line.shape
        assert (line.axes, line.why) == ((0 if writes else 1,), f"family {family}"), line
        assert line.shape[line.axes[0]] == D
    for line in silent(named, sides="both").plan():
        assert len(line.axes) == (1 if {V, L} & set(line.shape) else 2), line


# What is not known


class Plain(nn.Module):
    """A block whose names no family knows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(V, D)
        self.wide, self.narrow = nn.Linear(D, F), nn.Linear(F, D)


def warned(*args: Any, **options: Any) -> str:
    """Return what the one warning says."""
    with pytest.warns(WakefulWarning, match="OrthoAdam does not know") as caught:
        OrthoAdam(*args, **options)
    assert len(caught) == 1
    return str(caught[0].message)


def test_one_warning_names_what_is_not_known_and_the_choice() -> None:
    named = [(f"stem.{n}.mix.weight", nn.Parameter(torch.zeros(3, 3))) for n in range(3)]
    message = warned(named)
    assert "rotates their input axis (1): stem.*.mix.weight (3)." in message
    message = warned([parameter for _, parameter in named])
    assert "parameter 0, parameter 1, parameter 2" in message
    message = warned([(str(n), nn.Parameter(torch.zeros(3, 3))) for n in range(20)])
    assert "7 and 12 more" in message


def test_what_is_given_or_not_rotated_needs_no_warning() -> None:
    named = [("w", nn.Parameter(torch.zeros(3, 3))), ("b", nn.Parameter(torch.zeros(3)))]
    assert [line.axes for line in silent(named, axes={"w": 0}).plan()] == [(0,), ()]
    assert [line.axes for line in silent(named, axes={"w": ()}).plan()] == [(), ()]
    assert [line.axes for line in silent(named, rotation="identity").plan()] == [(), ()]
    assert [line.axes for line in silent(named[1:]).plan()] == [()]


def test_a_module_names_parameters_and_refuses_those_of_others() -> None:
    model = Plain()
    whole = OrthoAdam(model).state_dict()["param_groups"]
    assert OrthoAdam(model.parameters(), module=model).state_dict()["param_groups"] == whole
    assert whole[0]["param_names"] == [name for name, _ in model.named_parameters()]
    with pytest.raises(WakefulError, match="not one of the Plain"):
        OrthoAdam([nn.Parameter(torch.zeros(2, 5))], module=model)
    optimizer = OrthoAdam([model.wide.weight], module=model)
    optimizer.add_param_group({"params": model.narrow.weight})
    assert [(line.name, line.axes) for line in optimizer.plan()] == [
        ("wide.weight", (1,)), ("narrow.weight", (1,))
    ]  # fmt: skip


# What decides


def axes_of(parameters: dict[str, tuple[int, ...]], **options: Any) -> dict[str, tuple[int, ...]]:
    named = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in parameters.items()]
    return {line.name: line.axes for line in OrthoAdam(named, **options).plan()}


GPT2_SHAPES = {
    "wte.weight": (V, D), "h.0.attn.c_attn.weight": (D, 3 * D), "h.0.attn.c_proj.weight": (D, D),
    "h.0.mlp.c_fc.weight": (D, F), "h.0.mlp.c_proj.weight": (F, D),
}  # fmt: skip


def test_linear_weights_under_gpt2s_names_are_known_by_their_widths() -> None:
    found = axes_of(GPT2_SHAPES)
    assert list(found.values()) == [(1,), (0,), (1,), (0,), (1,)]
    linear = {n: s if n == "wte.weight" else s[::-1] for n, s in GPT2_SHAPES.items()}
    assert list(axes_of(linear).values()) == [(1,), (1,), (0,), (1,), (0,)]


def test_stacks_of_other_widths_are_each_known() -> None:
    def stack(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{prefix}.layers.0.self_attn.q_proj.weight": (16, width),
            f"{prefix}.layers.0.self_attn.o_proj.weight": (width, 16),
            f"{prefix}.layers.0.mlp.down_proj.weight": (width, F),
        }

    found = axes_of({**stack("vision", 8), **stack("language", 12)})
    assert list(found.values()) == [(1,), (0,), (0,)] * 2
    broken = {**stack("vision", 8), "vision.layers.0.mlp.up_proj.weight": (8, F)}
    assert set(axes_of({**broken, **stack("language", 12)}).values()) == {(1,), (0,)}
    assert axes_of(broken)["vision.layers.0.self_attn.o_proj.weight"] == (1,)


def test_a_role_goes_before_a_name_and_a_choice_before_a_role() -> None:
    parameter = nn.Parameter(torch.zeros(6, 6))
    parameter._wakeful_role = Role(residual=0)  # pyright: ignore[reportAttributeAccessIssue]
    named = [("model.layers.0.self_attn.q_proj.weight", parameter)]

    def line(**options: Any) -> tuple[tuple[int, ...], str]:
        (one,) = OrthoAdam(named, **options).plan()
        return one.axes, one.why

    assert line() == ((0,), "role")
    assert line(sides="both") == ((0, 1), "role")
    assert line(axes={named[0][0]: 1}) == ((1,), "given")
    assert line(axes={parameter: (1, 0)}) == ((1, 0), "given")
    assert line(axes={parameter: ()}) == ((), "given")
    assert line(axes={parameter: None}) == ((0,), "role")
    assert line(axes=lambda name, p: 1 if "q_proj" in name and p.ndim == 2 else None)[1] == "given"
    assert line(axes=lambda name, p: None) == ((0,), "role")
    assert line(rotation="identity") == ((), "no rotation")
    parameter._wakeful_role = Role(residual=1, vocabulary=True)  # pyright: ignore[reportAttributeAccessIssue]
    assert line(sides="both") == ((1,), "role")
    parameter._wakeful_role = Role()  # pyright: ignore[reportAttributeAccessIssue]
    assert line() == ((), "role")
    del parameter._wakeful_role
    assert line() == ((1,), "family llama")
    (one,) = OrthoAdam([parameter], sides="both").plan()
    assert (one.axes, one.why) == ((1,), "input axis")  # nobody says what axis 0 counts


def test_wrappers_leave_names_alone() -> None:
    assert plain_name("module._orig_mod.blocks.0.mlp.up.weight") == "blocks.0.mlp.up.weight"
    shapes = {f"module._orig_mod.{name}": shape for name, shape in GPT2_SHAPES.items()}
    assert list(axes_of(shapes).values()) == [(1,), (0,), (1,), (0,), (1,)]
    named = [(name, nn.Parameter(torch.zeros(2, 2))) for name in ("module.a", "a")]
    first, second = (OrthoAdam([one]).param_groups[0]["rotations"] for one in named)
    assert first == second


def test_names_end_at_dots() -> None:
    found = axes_of({"mylayers.0.self_attn.o_proj.weight": (4, 6), "x": (3, 3)})
    assert set(found.values()) == {(1,)}
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
