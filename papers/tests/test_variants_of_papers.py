"""The papers' routes, depth mixes and norms: plain definitions, and what every variant owes."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

import helpers
import wakeful_papers.depth
import wakeful_papers.norms
import wakeful_papers.routes
from depth.test_depth import transformers_class
from helpers import some_tokens, tiny_config, tiny_decoder
from routes.reference import ROUTES as OF_CORE
from routes.reference import Model, differential, opening, own, sigmoid
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.variants import Variant, build

PLACES = {
    "routes": wakeful_papers.routes, "depth": wakeful_papers.depth, "norms": wakeful_papers.norms
}  # fmt: skip
KINDS = [
    (folder, kind)
    for folder, module in PLACES.items()
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Variant) and kind.__module__ == module.__name__
    and "examples" in vars(kind)
]  # fmt: skip
EXAMPLES = [(folder, expression) for folder, kind in KINDS for expression in kind.examples]
NEUTRALS = [(folder, kind.neutral) for folder, kind in KINDS if kind.neutral is not None]
WITHOUT_MASKS = "CrossLayer"
"""Takes whole texts without padding."""


def contract(name: str) -> ModuleType:
    """Return a module of the core's contract tests with these variants in place of the core's."""
    path = Path(helpers.__file__).parent / "contracts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"papers_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    of_core = helpers.EXAMPLES, helpers.NEUTRALS
    helpers.EXAMPLES, helpers.NEUTRALS = EXAMPLES, NEUTRALS
    try:
        spec.loader.exec_module(module)
    finally:
        helpers.EXAMPLES, helpers.NEUTRALS = of_core
    return module


CONTRACT = contract("test_variants_contract")
OUTSIDE = contract("test_variants_outside")
OWED = {
    test.__name__: test
    for test in (
        CONTRACT.test_a_token_changes_no_earlier_logits,
        CONTRACT.test_cached_decoding_is_the_full_forward,
        CONTRACT.test_every_parameter_learns_and_gradients_match_finite_differences,
        CONTRACT.test_saving_and_loading_keeps_the_logits,
        CONTRACT.test_the_neutral_form_is_the_vanilla_transformer,
        CONTRACT.test_an_example_is_not_the_vanilla_transformer,
        CONTRACT.test_activation_checkpointing_changes_no_bit,
        CONTRACT.test_an_expression_survives_being_written,
        CONTRACT.test_left_padding_changes_no_real_token,
        CONTRACT.test_bfloat16_runs_near_float64,
        CONTRACT.test_autocast_runs_near_float32,
        OUTSIDE.test_orthoadam_turns_what_lies_along_the_stream_and_goes_on_to_the_bit,
        OUTSIDE.test_quantization_reaches_every_weight_and_costs_what_rounding_costs,
    )
}
globals().update(OWED)
pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def _padded(request: pytest.FixtureRequest) -> None:
    """Expect of a route for whole texts that padded batches fail."""
    if "left_padding" in request.node.name and WITHOUT_MASKS in request.node.name:
        request.applymarker(pytest.mark.xfail(raises=RuntimeError, strict=True))


# ------------------------------------------------------------------------------ routes


def resformer_differential_xsa(m: Model, n: int) -> Tensor:
    mixed = 0.5 * m.V[n] + 0.5 * m.V[1]
    u = differential("route.parts.1", lambda m, n: mixed)(m, n)
    return u - (u * mixed).sum(-1, keepdim=True) / (mixed * mixed).sum(-1, keepdim=True) * mixed


def divided(heads: Tensor) -> Tensor:
    return heads / torch.sqrt((heads * heads).mean(-1, keepdim=True) + 1e-6)


def head_norm(m: Model, n: int) -> Tensor:
    return divided(own(m, n)) * m.w.get(f"route.scales.{n - 1}", 1.0)


def gated_head_norm(m: Model, n: int) -> Tensor:
    """Muse Spark's: the norm first, then the gate."""
    g = sigmoid(opening(m, n, "route.parts.1")).unflatten(-1, (m.H, -1))
    return divided(own(m, n)) * g.transpose(1, 2)


def value_norm(m: Model, n: int) -> Tensor:
    return m.A(n) @ divided(m.V[n])


def value_scale(m: Model, n: int) -> Tensor:
    theta = m.w[f"route.exponents.{n - 1}"]
    C = m.c.width * m.d * 0.02**2 * torch.exp(theta)
    C = torch.stack([C[head * m.G // m.H] for head in range(m.H)])[:, None, None]
    r = (m.V[n] * m.V[n]).sum(-1, keepdim=True)
    return m.A(n) @ (r / (r + C) * m.V[n])


def xsa(m: Model, n: int) -> Tensor:
    u, v = own(m, n), m.V[n]
    a = m.w["route.strengths"][n - 1] if "route.strengths" in m.w else torch.tensor([torch.inf])
    inner = (u * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True)
    return u - torch.tanh(a)[:, None, None] * inner * v


def resformer_xsa(m: Model, n: int) -> Tensor:
    """What is taken out is the value in use, which ResFormer has mixed."""
    v = 0.5 * m.V[n] + 0.5 * m.V[1]
    u = m.A(n) @ v
    return u - (u * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True) * v


def residual_on(what: str) -> Callable:
    def U(m: Model, n: int) -> Tensor:
        half = 0.5 * getattr(m, what)[n] + 0.5 * getattr(m, what)[1]
        return m.A(n, **{what: half}) @ m.V[n]

    return U


def weighted_previous(m: Model, n: int) -> Tensor:
    return m.A(n) @ (0.5 * m.V[n] + 0.5 * m.V[n - 1]) if n > 1 else own(m, n)


def attention_residual(m: Model, n: int) -> Tensor:
    return (0.5 * m.A(n) + 0.5 * m.A(1)) @ m.V[n]


def crosslayer(other: Callable[[int], int]) -> Callable:
    def U(m: Model, n: int) -> Tensor:
        if n == 1:
            return own(m, n)
        o = other(n)
        scores = torch.cat([m.scores(m.Q[n], m.K[n], n), m.scores(m.Q[n], m.K[o], n)], dim=-1)
        return m.softmax(scores, n) @ torch.cat([m.V[n], m.V[o]], dim=2)

    return U


def identity_mapping(m: Model, n: int) -> Tensor:
    earlier = [m.V[i] for i in range(1, n)]
    return own(m, n) + (sum(earlier) / len(earlier) if earlier else 0.0)


ROUTES: dict[str, Callable] = {
    "then(resformer, differential, wakeful_papers.routes:XSA(learned=False))": (
        resformer_differential_xsa
    ),
    "wakeful_papers.routes:HeadNorm": head_norm,
    "wakeful_papers.routes:HeadNorm(scale=False)": head_norm,
    'then(wakeful_papers.routes:HeadNorm(scale=False), output_gate(per="channel"))': (
        gated_head_norm
    ),
    "wakeful_papers.routes:ValueNorm": value_norm,
    "wakeful_papers.routes:ValueScale": value_scale,
    "wakeful_papers.routes:XSA": xsa,
    "wakeful_papers.routes:XSA(learned=False)": xsa,
    "then(resformer, wakeful_papers.routes:XSA(learned=False))": resformer_xsa,
    "wakeful_papers.routes:PreviousValue": weighted_previous,
    "wakeful_papers.routes:QueryResidual": residual_on("Q"),
    "wakeful_papers.routes:KeyResidual": residual_on("K"),
    "wakeful_papers.routes:AttentionResidual": attention_residual,
    "wakeful_papers.routes:CrossLayer": crosslayer(lambda n: n - 1),
    'wakeful_papers.routes:CrossLayer(other="first")': crosslayer(lambda n: 1),
    "wakeful_papers.routes:IdentityMapping": identity_mapping,
}


@pytest.mark.parametrize("kv_heads", [1, 2, 4], ids=["mqa", "gqa", "mha"])
@pytest.mark.parametrize("expression", ROUTES)
def test_a_route_is_its_definition(expression: str, kv_heads: int) -> None:
    if "differential" in expression and kv_heads == 1:
        pytest.skip("takes heads in pairs")
    decoder = tiny_decoder(route=expression, num_kv_heads=kv_heads)
    tokens = some_tokens(2, 9)
    expected = Model(decoder, tokens).logits(ROUTES[expression])
    torch.testing.assert_close(decoder(tokens), expected, rtol=0, atol=1e-12)


def test_what_is_exclusive_says_nothing_of_the_own_value() -> None:
    """The paper's α = 1; the first token attends to itself alone and gets nothing."""
    route = build("routes", "wakeful_papers.routes:XSA(learned=False)")
    decoder = Decoder(tiny_config(), route=route).double()
    kept: list[Tensor] = []
    for block in decoder.blocks:
        block.attention.out.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    decoder(some_tokens(2, 7))
    for block, u in zip(decoder.blocks, kept, strict=True):
        assert u[:, 1:].norm() > 1e-3 * block.attention.out.weight.norm()
        assert u[:, 0].abs().max() < 1e-15
    # Half precision, where ‖v‖² overflows or vanishes.
    for size in (1e4, 6e-5, 0.0):
        v = torch.full((1, 1, 2, 8), size, dtype=torch.float16)
        u = torch.ones(1, 1, 4, 8, dtype=torch.float16)
        left = decoder.route.correct(0, u, u, v, {})
        torch.testing.assert_close(left, u if not size else torch.zeros_like(u), rtol=0, atol=2e-3)


# ------------------------------------------------------------------------- depth mixes


def embedding_residual(m: Model, n: int) -> Tensor:
    return 0.5 * m.X[n] + 0.5 * m.X[0] if n < m.N else m.X[n]


def x0_lambdas(m: Model, s: int) -> Tensor:
    a, b = m.w["depth.stream"], m.w["depth.embedded"]
    x = m.f[0]
    for sublayer in range(1, s + 1):
        n = (sublayer + 1) // 2
        x = x + m.f[sublayer - 1] if sublayer > 1 else x
        if sublayer % 2 == 1 and n <= m.N:
            x = a[n - 1] * x + b[n - 1] * m.f[0]
    return x


def residual_gate(T: float) -> Callable:
    def reads(m: Model, s: int) -> Tensor:
        x = m.f[0]
        for sublayer in range(1, s):
            beta = 1 / (1 + torch.exp(-m.w[f"depth.gates.{sublayer - 1}"] / T))
            alpha = torch.sqrt(torch.clamp(1 - beta**2, min=1e-3))
            x = alpha * x + beta * m.f[sublayer]
        return x

    return reads


DEPTHS: dict[str, Callable] = {"wakeful_papers.depth:EmbeddingResidual": embedding_residual}
READS: dict[str, Callable] = {
    "wakeful_papers.depth:X0Lambdas": x0_lambdas,
    "wakeful_papers.depth:ResidualGate": residual_gate(0.3),
    "wakeful_papers.depth:ResidualGate(temperature=1.0)": residual_gate(1.0),
}


@pytest.mark.parametrize("layers", [1, 4, 5])
@pytest.mark.parametrize("expression", [*DEPTHS, *READS])
def test_a_depth_mix_is_its_definition(expression: str, layers: int) -> None:
    decoder = tiny_decoder(depth=expression, num_layers=layers)
    tokens = some_tokens(2, 9)
    model = Model(decoder, tokens)
    after, reads = DEPTHS.get(expression), READS.get(expression)
    expected = model.logits(OF_CORE["own"], after, reads)
    torch.testing.assert_close(decoder(tokens), expected, rtol=1e-12, atol=1e-12)


def test_residual_gates_are_those_of_a_released_model() -> None:
    theirs = transformers_class("muse_spark", "MuseSparkResidualGate")
    decoder = tiny_decoder(
        depth="wakeful_papers.depth:ResidualGate", dtype=torch.float32, noise=1.0
    )
    config = SimpleNamespace(hidden_size=16, residual_gate_temperature=0.3)
    x, out = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    for sublayer, gate in enumerate(decoder.depth.gates):
        module = theirs(config)
        module.load_state_dict({"gate": gate})
        found, _ = decoder.depth.step(sublayer + 1, x, out, ())
        torch.testing.assert_close(found, module(x, out))


def test_every_variant_has_a_definition() -> None:
    defined = " ".join([*ROUTES, *DEPTHS, *READS])
    missing = {kind.__name__ for folder, kind in KINDS if folder != "norms"}
    assert not {name for name in missing if f":{name}" not in defined}


@pytest.mark.parametrize(
    ("field", "expression", "message"),
    [
        ("depth", "wakeful_papers.depth:ResidualGate(temperature=0.0)", "temperature must be"),
        ("depth", "wakeful_papers.depth:EmbeddingResidual(weight='x')", "weight must be float"),
        ("route", "wakeful_papers.routes:ValueScale(std=-1.0)", "std must not be negative"),
        ("route", 'wakeful_papers.routes:CrossLayer(other="last")', "other must be 'previous' or"),
        ("route", "then(svformer, wakeful_papers.routes:IdentityMapping)", "has no value"),
        ("route", "then(shared_keys, wakeful_papers.routes:KeyResidual)", "mixes the key of layer"),
        ("norm", "wakeful_papers.norms:GatedNorm(rank=0)", "rank must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(field: str, expression: str, message: str) -> None:
    with pytest.raises(WakefulError, match=message):
        Decoder(tiny_config(**{field: expression}))
