"""Parameters know their roles, whoever enumerates them."""

import copy
import io
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from helpers import EXAMPLES, FIELD, some_tokens, tiny_config, tiny_decoder
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.modeling import WakefulForCausalLM
from wakeful.model.decoder import Decoder
from wakeful.variants.roles import (
    BIAS,
    HEAD,
    READS,
    TABLE,
    WRITES,
    HasRoles,
    Role,
    mark_roles,
    role_of,
    roles_of,
)

GPT2 = {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "tied": True}


def test_roles_of_a_gpt2() -> None:
    roles = roles_of(Decoder(tiny_config(**GPT2)))
    assert roles["embed.weight"] == roles["positions.weight"] == TABLE
    assert "head.weight" not in roles  # it is the embedding
    for name in ("attention.query", "attention.key", "attention.value", "mlp.up"):
        assert roles[f"blocks.2.{name}.weight"] == READS
        assert roles[f"blocks.2.{name}.bias"] == BIAS
    for name in ("attention.out", "mlp.down"):
        assert roles[f"blocks.2.{name}.weight"] == WRITES
        assert roles[f"blocks.2.{name}.bias"] == BIAS


@pytest.mark.parametrize(("folder", "expression"), EXAMPLES)
def test_every_matrix_has_a_role_and_rotates_along_the_stream(folder, expression) -> None:
    decoder = Decoder(tiny_config(**{FIELD[folder]: expression}))
    roles = roles_of(decoder)
    assert roles["head.weight"] == HEAD
    for name, parameter in decoder.named_parameters():
        if parameter.ndim >= 2:
            axis = roles[name].residual
            assert axis is None or parameter.shape[axis] == decoder.config.width, name
        if parameter.ndim >= 2 and not name.startswith(("route.", "depth.")):
            assert roles[name].residual is not None, name
        if name.startswith(("route.", "depth.")) or ".normalizer." in name:
            assert roles[name].start == ("normal" if roles[name].embedding else "defined"), name


def test_gates_read_the_stream_and_coefficients_do_not() -> None:
    gated = roles_of(Decoder(tiny_config(route="on_layers([2], gated)")))
    assert gated["route.route.gates.2.weight"] == Role(residual=1, decays=True, quantized=True)
    assert gated["route.route.gates.2.bias"] == Role()
    learnable = roles_of(Decoder(tiny_config(route='resformer(mode="learnable")')))
    assert learnable["route.weights"] == Role()


def found(module: nn.Module) -> list[Role | None]:
    return [role_of(parameter) for parameter in module.parameters() if parameter.ndim >= 2]


@pytest.mark.slow
def test_marks_are_found_through_any_door() -> None:
    decoder = tiny_decoder(route="gated")
    vectors = (".bias", "norm.weight")
    expected = [role for name, role in roles_of(decoder).items() if not name.endswith(vectors)]
    assert found(decoder) == expected
    assert found(copy.deepcopy(decoder)) == expected
    assert found(nn.Sequential(copy.deepcopy(decoder))) == expected
    assert next(role_of(p) for _, p in copy.deepcopy(decoder).named_parameters()) == TABLE
    compiled = torch.compile(copy.deepcopy(decoder), backend="eager")
    assert isinstance(compiled, nn.Module)
    assert found(compiled) == expected
    decoder.checkpoint_activations = True
    decoder(some_tokens(2, 5)).sum().backward()
    assert found(decoder) == expected


def test_marks_leave_what_is_saved_alone() -> None:
    decoder = tiny_decoder(dtype=torch.float32)
    list(decoder.parameters())
    buffer = io.BytesIO()
    torch.save(decoder.state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True).keys() == decoder.state_dict().keys()


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformers_model_knows_the_same_roles(tied: bool) -> None:
    config = tiny_config(route="gated", tied=tied)
    model = WakefulForCausalLM(WakefulConfig.of(config))
    assert found(model) == found(Decoder(config))
    assert found(nn.ModuleDict({"wrapped": copy.deepcopy(model)})) == found(Decoder(config))


class Inner(HasRoles, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    def roles(self) -> Mapping[str, Role]:
        return {"one.weight": READS}


class Outer(HasRoles, nn.Module):
    default_role = Role()

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def roles(self) -> Mapping[str, Role]:
        return {"inner.one.weight": WRITES, "inner.two.weight": HEAD, "absent": TABLE}


def test_the_innermost_declaration_decides() -> None:
    roles = roles_of(Outer())
    assert roles == {
        "inner.one.weight": READS,
        "inner.one.bias": Role(),
        "inner.two.weight": HEAD,
        "inner.two.bias": Role(),
    }


def test_a_model_without_declarations_has_no_marks_until_somebody_declares_some() -> None:
    plain = nn.Linear(2, 2)
    mark_roles(plain)
    assert roles_of(plain) == {}
    assert role_of(plain.weight) is None


def test_the_first_parameter_alone_comes_marked_and_leaves_the_others_alone() -> None:
    decoder = tiny_decoder()
    names = [name for name, _ in decoder.named_parameters()]
    for parameter in (held := dict(decoder.named_parameters())).values():
        del parameter._wakeful_role  # as a copy has none
    first = next(decoder.parameters())
    assert first is held[names[0]]
    assert role_of(first) == TABLE
    assert {role_of(held[name]) for name in names[1:]} == {None}
