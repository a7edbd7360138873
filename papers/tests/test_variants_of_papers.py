"""The papers' own variants: their plain definitions, and what every variant owes."""

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

import helpers
import wakeful_papers.depth
import wakeful_papers.normalizers
import wakeful_papers.norms
import wakeful_papers.routes
from helpers import some_tokens, tiny_config, tiny_decoder
from routes.reference import ROUTES as OF_CORE
from routes.reference import Model, differential, opening, own, sigmoid
from wakeful.errors import WakefulError
from wakeful.inheritance.blocks import inherit_blocks
from wakeful.inheritance.layers import LayerMap, named_layers
from wakeful.model.attend import attend
from wakeful.model.decoder import Decoder
from wakeful.variants import Variant, build
from wakeful_papers.depth import ManifoldHyperConnections, sinkhorn
from wakeful_papers.normalizers import ClippedSoftmax

PLACES = {
    "routes": wakeful_papers.routes, "depth": wakeful_papers.depth,
    "normalizers": wakeful_papers.normalizers, "norms": wakeful_papers.norms,
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


def shared(what: str, c: int = 0) -> Callable:
    def U(m: Model, n: int) -> Tensor:
        leader = (n - 1) // c * c + 1 if c else 1
        return m.A(n, **{what: getattr(m, what)[leader]}) @ m.V[n]

    return U


def dense(weights: Callable[[Model, int], list]) -> Callable:
    def U(m: Model, n: int) -> Tensor:
        if n == 1:
            return own(m, n)
        mixed = sum(weights(m, n)[i - 1] * m.V[i] for i in range(1, n + 1))
        return m.A(n) @ mixed

    return U


ROUTES: dict[str, Callable] = {
    "wakeful_papers.routes:Dense": dense(lambda m, n: m.w[f"route.weights.{n - 1}"]),
    "wakeful_papers.routes:Dense(learned=False)": dense(lambda m, n: [1 / n] * n),
    "wakeful_papers.routes:SharedKeys": shared("K"),
    "wakeful_papers.routes:SharedQueries": shared("Q"),
    "wakeful_papers.routes:SharedKeys(group=2)": shared("K", 2),
    "wakeful_papers.routes:SharedQueries(group=2)": shared("Q", 2),
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


def attention_residuals(layers: int) -> Callable:
    """Sums of the outputs of `layers` layers; 0: each output by itself."""

    def reads(m: Model, s: int) -> Tensor:
        if s == 1:
            return m.f[0]
        size = 2 * layers or 1
        starts = range(1, s, size)
        blocks = [m.f[0], *(sum(m.f[start : min(start + size, s)]) for start in starts)]
        w = m.w[f"depth.queries.{s}"]
        scores = [
            ((v / torch.sqrt((v * v).mean(-1, keepdim=True) + 1e-6)) * w).sum(-1) for v in blocks
        ]
        total = sum(torch.exp(score) for score in scores)
        return sum(
            (torch.exp(score) / total)[..., None] * v
            for score, v in zip(scores, blocks, strict=True)
        )

    return reads


def manifold(m: Model, s: int) -> Tensor:
    """mHC, or iHC where there are no logits for mixing, over n streams written out."""
    weights, biases = ([m.w[f"depth.{kind}.{i}"] for i in range(s)] for kind in ("maps", "biases"))
    n, D = len(m.w[f"depth.biases.{2 * m.N}"]), m.f[0].shape[-1]
    streams = [m.f[0]] * n
    for sublayer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        alpha = m.w[f"depth.scales.{sublayer}"]
        size = torch.sqrt(sum((H * H).sum(-1, keepdim=True) for H in streams) / (n * D) + 1e-6)
        count = len(bias)
        logits = sum(
            H / size @ weight[i * count : (i + 1) * count].T for i, H in enumerate(streams)
        )

        def moved(k: int, logits=logits, alpha=alpha, bias=bias) -> Tensor:
            """Return the k-th logit of every token, (B, L, 1)."""
            return alpha[min(k // n, 2)] * logits[..., k : k + 1] + bias[k]

        a = [1 / (1 + torch.exp(-moved(i))) for i in range(n)]
        read = sum(a[i] * streams[i] for i in range(n))
        if sublayer == s - 1:
            return read
        b = [2 / (1 + torch.exp(-moved(n + j))) for j in range(n)]
        M = [[1.0 * (i == j) for j in range(n)] for i in range(n)]
        if count > 2 * n:
            e = [[torch.exp(moved(2 * n + i * n + j)) for j in range(n)] for i in range(n)]
            M = [[e[i][j] / sum(e[i]) + 1e-6 for j in range(n)] for i in range(n)]
            for turn in range(20):
                if turn:
                    M = [[M[i][j] / (sum(M[i]) + 1e-6) for j in range(n)] for i in range(n)]
                columns = [sum(M[i][j] for i in range(n)) + 1e-6 for j in range(n)]
                M = [[M[i][j] / columns[j] for j in range(n)] for i in range(n)]
        streams = [
            sum(M[i][j] * streams[i] for i in range(n)) + b[j] * m.f[sublayer + 1] for j in range(n)
        ]
    raise AssertionError


DEPTHS: dict[str, Callable] = {"wakeful_papers.depth:EmbeddingResidual": embedding_residual}
READS: dict[str, Callable] = {
    "wakeful_papers.depth:X0Lambdas": x0_lambdas,
    "wakeful_papers.depth:ResidualGate": residual_gate(0.3),
    "wakeful_papers.depth:ResidualGate(temperature=1.0)": residual_gate(1.0),
    "wakeful_papers.depth:AttentionResiduals": attention_residuals(0),
    "wakeful_papers.depth:AttentionResiduals(layers=1)": attention_residuals(1),
    "wakeful_papers.depth:AttentionResiduals(layers=3)": attention_residuals(3),
    "wakeful_papers.depth:ManifoldHyperConnections": manifold,
    "wakeful_papers.depth:ManifoldHyperConnections(streams=1)": manifold,
    'wakeful_papers.depth:ManifoldHyperConnections(streams=3, mixing="identity")': manifold,
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


def transformers_class(model: str, name: str) -> type[torch.nn.Module]:
    """Return a module of Transformers' implementation of a model; skip where it has none yet."""
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    return getattr(module, name)


@pytest.mark.parametrize(
    ("model", "name", "mixing"),
    [
        ("deepseek_v4", "DeepseekV4", "sinkhorn"),
        ("hy_v4", "HYV4", "identity"),
    ],
)
def test_manifold_hyper_connections_are_those_of_released_models(
    model: str, name: str, mixing: str
) -> None:
    depth = f'wakeful_papers.depth:ManifoldHyperConnections(mixing="{mixing}")'
    decoder = tiny_decoder(depth=depth, dtype=torch.float32, noise=0.5)
    mix = decoder.depth
    assert isinstance(mix, ManifoldHyperConnections)
    config = SimpleNamespace(
        hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6, hidden_size=16,
        hc_magnitude=2.0,
    )  # fmt: skip
    streams, out = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 16)

    def loaded(kind: str, sublayer: int, prefix: str = "") -> torch.nn.Module:
        theirs = transformers_class(model, name + kind)(config)
        weight = mix.maps[sublayer].unflatten(0, (4, -1)).transpose(0, 1).flatten(1)
        ours = {"fn": weight, "base": mix.biases[sublayer], "scale": mix.scales[sublayer]}
        theirs.load_state_dict({prefix + key: value for key, value in ours.items()})
        return theirs

    read, state = mix._read(3, streams)
    post, *comb, collapsed = loaded("HyperConnection", 3)(streams)
    torch.testing.assert_close(read, collapsed, rtol=1e-4, atol=1e-5)
    kept = comb[0].transpose(-1, -2) @ streams if comb else streams
    torch.testing.assert_close(state[0], kept, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state[1], post, rtol=1e-4, atol=1e-5)
    last, _ = mix.step(8, read, out, state)
    after = post.unsqueeze(-1) * out.unsqueeze(-2) + kept
    torch.testing.assert_close(last, loaded("HyperHead", 8, "hc_")(after), rtol=1e-4, atol=1e-5)


def test_mixing_is_doubly_stochastic_and_starts_with_streams_alike() -> None:
    shares = sinkhorn(torch.randn(7, 4, 4).double() * 3, 200)
    for axis in (-1, -2):
        total = shares.sum(axis)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-4)
    mix = tiny_decoder(depth="wakeful_papers.depth:ManifoldHyperConnections", noise=0).depth
    assert torch.equal(mix.biases[0][:4], torch.full((4,), -math.log(3)).double().float().double())
    assert all((scales == 0.01).all() for scales in (s.float() for s in mix.scales))


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


# ------------------------------------------------------------------------ normalizers


def clipped(gamma: float, eta: float) -> Callable:
    def weigh(x: Tensor) -> Tensor:
        p = torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)
        return torch.minimum(torch.relu((eta - gamma) * p + gamma), torch.ones_like(p))

    return weigh


WEIGHTS: dict[str, Callable] = {
    "wakeful_papers.normalizers:ClippedSoftmax": clipped(-0.03, 1.0),
    "wakeful_papers.normalizers:ClippedSoftmax(gamma=-0.2, eta=1.4)": clipped(-0.2, 1.4),
}


@pytest.mark.parametrize("expression", [*WEIGHTS, "wakeful_papers.normalizers:QuerySink"])
def test_a_normalizer_is_its_definition(expression: str) -> None:
    decoder = tiny_decoder(normalizer=expression)
    tokens = some_tokens(2, 11)
    model = Model(decoder, tokens)
    model.weigh = WEIGHTS.get(expression)
    if model.weigh is None:

        def log_sink(n: int) -> Tensor:
            weight = model.w[f"blocks.{n - 1}.attention.dot.normalizer.sinks.weight"]
            return (model.h[n] @ weight.T).transpose(1, 2)

        model.log_sink = log_sink
    torch.testing.assert_close(decoder(tokens), model.logits(OF_CORE["own"]), rtol=0, atol=1e-12)


def test_a_query_s_sink_is_a_released_model_s() -> None:
    inkling = pytest.importorskip("transformers.models.inkling2.modeling_inkling2")
    q, k, v = (torch.randn(2, 7, heads, 8) for heads in (4, 2, 2))
    sinks = torch.randn(2, 7, 4)
    mask = torch.zeros(7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    theirs, _ = inkling.eager_attention_forward(
        module, *(heads.transpose(1, 2) for heads in (q, k, v)), mask, 0.3,
        sinks=sinks.transpose(1, 2).unsqueeze(-1),
    )  # fmt: skip
    ours = attend(q, k, v, scale=0.3, sink=sinks)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_clipped_weights_reach_zero_and_one() -> None:
    logits = torch.tensor([0.5, 0.3, 0.17, 0.03], dtype=torch.float64).log().expand(1, 4, 1, 4)
    weights = ClippedSoftmax(gamma=-0.05, eta=2.1).weights(logits)[0, 0, 0]
    expected = torch.tensor([1.0, 0.595, 0.3155, 0.0145], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)
    assert ClippedSoftmax(gamma=-0.07).weights(logits)[0, 0, 0, 3] == 0


def test_every_variant_has_a_definition() -> None:
    defined = " ".join([*ROUTES, *DEPTHS, *READS, *WEIGHTS, "normalizers:QuerySink"])
    missing = {kind.__name__ for folder, kind in KINDS if folder != "norms"}
    assert not {name for name in missing if f":{name}" not in defined}


@pytest.mark.parametrize(
    ("field", "expression", "message"),
    [
        ("depth", "wakeful_papers.depth:ResidualGate(temperature=0.0)", "temperature must be"),
        ("depth", "wakeful_papers.depth:EmbeddingResidual(weight='x')", "weight must be float"),
        ("depth", "wakeful_papers.depth:ManifoldHyperConnections(streams=0)", "streams and"),
        ("depth", "wakeful_papers.depth:ManifoldHyperConnections(mixing='none')", "mixing must"),
        ("route", "wakeful_papers.routes:SharedKeys(group=-1)", "group must not be negative"),
        ("route", "wakeful_papers.routes:ValueScale(std=-1.0)", "std must not be negative"),
        ("route", 'wakeful_papers.routes:CrossLayer(other="last")', "other must be 'previous' or"),
        ("route", "then(svformer, wakeful_papers.routes:IdentityMapping)", "has no value"),
        (
            "route",
            "then(wakeful_papers.routes:SharedKeys, wakeful_papers.routes:KeyResidual)",
            "mixes the key of lay",
        ),
        ("route", "wakeful_papers.routes:Dense(learned=False, vanilla_start=True)", "vanilla_st"),
        ("normalizer", "wakeful_papers.normalizers:ClippedSoftmax(gamma=0.1)", "gamma must be at"),
        ("normalizer", "wakeful_papers.normalizers:ClippedSoftmax(eta=0.9)", "eta at least 1"),
        ("norm", "wakeful_papers.norms:GatedNorm(rank=0)", "rank must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(field: str, expression: str, message: str) -> None:
    with pytest.raises(WakefulError, match=message):
        Decoder(tiny_config(**{field: expression}))


def test_dense_weights_follow_their_layers() -> None:
    dense = tiny_decoder(route="wakeful_papers.routes:Dense")
    heir = inherit_blocks(dense, named_layers([0, 2, 3], of=4))
    expected = dense.route.get_parameter("weights.3")
    assert torch.equal(heir.route.get_parameter("weights.2"), expected[[0, 2, 3]])
    with pytest.raises(WakefulError, match="in their order and once each"):
        inherit_blocks(dense, LayerMap((0, 1, 0, 1), "named"))
