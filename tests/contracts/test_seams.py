"""The places where new variants attach, each proved by a rival that stands outside the package.

`tests/rivals` holds a folder for each of the package's: a file there is a variant while these tests
run. Every rival owes what every variant owes.
"""

import inspect
import json
from collections.abc import Iterator

import polars as pl
import pytest
import torch
import torch.nn.functional as F

from contracts import test_variants_contract as contract
from helpers import gradients, rivals, some_tokens, tiny_config, tiny_decoder
from hf.models import padded, pair
from wakeful.errors import WakefulError
from wakeful.hf.modeling import WakefulForCausalLM
from wakeful.model.attention import DotProduct, Flow
from wakeful.model.block import Block, ParallelBlock
from wakeful.model.decoder import Decoder
from wakeful.norms import Norm
from wakeful.probes import streaming
from wakeful.probes.attention import Entropy, Sinks, Values
from wakeful.probes.base import SCHEMA, AttentionEvent, Probe
from wakeful.probes.hidden import Outliers
from wakeful.probes.rank import Ranks
from wakeful.probes.streaming import head_weights
from wakeful.probes.watch import check_one_matrix, watch
from wakeful.quantization import quantize_module, quantized_layers
from wakeful.routes import ValueRoute
from wakeful.surgery import store_prefix
from wakeful.variants import build
from wakeful.variants.roles import Role

pytestmark = pytest.mark.filterwarnings("error")
RIVALS = [("routes", "preview"), ("normalizers", "clipped")]
EXPORTED = [
    {"route": "preview", "normalizer": "clipped"},
    {
        "route": "resformer", "normalizer": "sigmoid(length=16)",
        "norm": "layernorm_scaling", "depth": "denseformer",
    },
    {
        "route": "value_embedding", "normalizer": "softpick",
        "norm": "rmsnorm_single", "depth": "mudd",
    },
    {
        "route": "differential", "normalizer": "relu",
        "depth": "hyper_connections(streams=3, dynamic=False)",
    },
    {"route": 'gated(gate="relu", channels=5)', "depth": "hyper_connections"},
]  # fmt: skip
every_rival = pytest.mark.parametrize(("folder", "expression"), RIVALS, ids=[e for _, e in RIVALS])


@pytest.fixture(scope="module", autouse=True)
def _rivals() -> Iterator[None]:
    with rivals():
        yield


CONTRACTS = [
    contract.test_a_token_changes_no_earlier_logits,
    contract.test_cached_decoding_is_the_full_forward,
    contract.test_every_parameter_learns_and_gradients_match_finite_differences,
    contract.test_saving_and_loading_keeps_the_logits,
    contract.test_an_example_is_not_the_vanilla_transformer,
    contract.test_activation_checkpointing_changes_no_bit,
    contract.test_an_expression_survives_being_written,
    contract.test_left_padding_changes_no_real_token,
    contract.test_bfloat16_runs_near_float64,
    contract.test_autocast_runs_near_float32,
    contract.test_a_deep_copy_is_a_model_of_its_own,
    contract.test_twins_share_every_weight_of_the_same_name,
]


@pytest.mark.slow
@pytest.mark.parametrize("owed", CONTRACTS, ids=lambda test: test.__name__)
@every_rival
def test_a_rival_owes_what_every_variant_owes(owed, folder, expression, tmp_path):
    given = {"folder": folder, "expression": expression, "kv_heads": 2, "tmp_path": tmp_path}
    owed(**{name: given[name] for name in inspect.signature(owed).parameters})


@pytest.mark.slow
@pytest.mark.parametrize("options", EXPORTED, ids=lambda options: options["route"])
@torch.no_grad()
def test_models_run_in_transformers(options):
    decoder, model = pair(**options)
    tokens, mask = padded(some_tokens(3, 11), 11, 7, 2)
    logits = model(tokens, attention_mask=mask).logits
    for row, length in enumerate((11, 7, 2)):
        alone = decoder(tokens[row : row + 1, 11 - length :])[0]
        torch.testing.assert_close(logits[row, 11 - length :], alone, rtol=0, atol=1e-12)
    written = model.generate(tokens[:1], max_new_tokens=4, do_sample=False)
    again = model.generate(tokens[:1], max_new_tokens=4, do_sample=False, use_cache=False)
    assert torch.equal(written, again)


# ------------------------------------------------------------------- all of them in one model


ALL = {
    "route": "then(preview, output_gate)",
    "depth": "mudd",
    "normalizer": "clipped",
    "norm": "layernorm_scaling",
    "placement": "peri",
}


@pytest.mark.slow
@torch.no_grad()
def test_a_model_of_rivals_is_quantized():
    decoder = tiny_decoder(dtype=torch.float32, noise=0.05, **ALL).eval()
    small = quantize_module(decoder, "fine")
    assert {f"blocks.3.attention.{part}" for part in ("query", "key", "value", "out")} < set(
        quantized_layers(small)
    )
    tokens = some_tokens(2, 9)
    wanted, found = decoder(tokens), small(tokens)
    assert (found - wanted).norm() / wanted.norm() < 0.1


@pytest.mark.slow
def test_ours_and_models_of_rivals_compile_whole():
    """All in one process, whose start takes as long as a compilation."""
    route = 'then(value_embedding, gated(gate="relu", channels=5), differential)'
    options = [
        {"route": contract.COMPILED, "norm": "layernorm"},
        ALL,
        {"depth": "hyper_connections", "norm": "rmsnorm_single"},
        {
            "route": route, "normalizer": "relu",
            "depth": "mudd", "norm": "layernorm_scaling",
        },
    ]  # fmt: skip
    contract.check_compiled([json.dumps(each) for each in options])


# -------------------------------------------------------------------------------- documents


OTHERS = ["svformer", "gated", "differential", "preview"]
DOCUMENTS = [
    ("own", "rotary", "softmax"),
    ("own", "learned", "softmax1(learned=True)"),
    *((route, "rotary", "softmax1(learned=True)") for route in OTHERS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("route", "positions", "normalizer"), DOCUMENTS)
def test_a_document_is_computed_as_if_it_stood_alone(route, positions, normalizer):
    decoder = tiny_decoder(route=route, positions=positions, normalizer=normalizer)
    tokens = some_tokens(2, 13)
    # The same number again, after another, is another document.
    documents = torch.tensor([[4] * 5 + [7] * 1 + [4] * 7, [0] * 13])
    targets = some_tokens(2, 13, seed=4)
    for decoder.checkpoint_activations in (False, True):
        pieces = [decoder(piece) for piece in tokens[:1].split([5, 1, 7], 1)]
        expected = torch.cat([torch.cat(pieces, 1), decoder(tokens[1:])])
        found = decoder(tokens, documents=documents)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        loss = decoder.loss(tokens, targets, documents=documents)
        wanted = F.cross_entropy(expected.flatten(0, 1), targets.flatten())
        contract.assert_equal_gradients(decoder, loss, wanted)


def test_documents_do_not_go_with_what_contradicts_them():
    decoder = tiny_decoder()
    tokens, documents = some_tokens(2, 6), torch.zeros(2, 6, dtype=torch.long)
    with pytest.raises(WakefulError, match="documents are for whole rows"):
        decoder(tokens, documents=documents, valid=torch.ones(2, 6, dtype=torch.bool))
    cache = decoder.new_cache(2, 12)
    decoder(tokens, cache=cache)
    with pytest.raises(WakefulError, match="documents are for whole rows"):
        decoder(tokens, cache=cache, documents=documents)


# ------------------------------------------------------------- what routes read before the layers


@pytest.mark.slow
def test_a_route_gets_what_it_states_and_nothing_else():
    assert Decoder(tiny_config()).plan.before == frozenset()
    for route, stated in (("value_embedding", {"tokens"}), ("preview", {"tokens", "embedded"})):
        before = Decoder(tiny_config(route=route)).plan.before
        assert {read.kind for read in before} == stated


def test_a_route_that_reads_tokens_refuses_embeddings_alone():
    decoder, model = pair(route="value_embedding")
    tokens = some_tokens(2, 5)
    for run in (
        lambda: decoder.stream(decoder.embed(tokens)),
        lambda: model(inputs_embeds=decoder.embed(tokens)),
    ):
        with pytest.raises(WakefulError, match=r"model.route = value_embedding reads token ids"):
            run()


class Counted(ValueRoute):
    """A route with a parameter that counts tokens and is no table of `nn.Embedding`."""

    examples = ("counted",)

    def attach(self, shape, layers):
        super().attach(shape, layers)
        self.table = torch.nn.Parameter(torch.zeros(shape.vocab_size, shape.width))

    def roles(self):
        return {"table": Role(vocabulary=True)}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_tables_of_a_route_grow_and_shrink_with_the_vocabulary(tied, tmp_path):
    _, model = pair(torch.float32, route="then(value_embedding, output_gate)", tied=tied)
    tokens = some_tokens(1, 5)
    before = model(tokens).logits
    model.model.decoder.route.parts[0].tables["1"].requires_grad_(False)
    model.resize_token_embeddings(37, pad_to_multiple_of=8, mean_resizing=False)
    tables = model.model.decoder.route.parts[0].tables
    assert {table.weight.shape for table in tables.values()} == {(40, 16)}
    assert [table.weight.requires_grad for table in tables.values()] == [False, True]
    torch.testing.assert_close(model(tokens).logits[..., :29], before)
    new = torch.tensor([[3, 39, 29]])
    assert model(new).logits.isfinite().all()

    model.save_pretrained(tmp_path)
    again = WakefulForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(new).logits, model(new).logits)
    again.resize_token_embeddings(29)
    torch.testing.assert_close(again(tokens).logits, before)


def test_a_vocabulary_that_cannot_be_resized_is_refused_before_anything_changes():
    _, model = pair(route=f"{__name__}:Counted")
    with pytest.raises(WakefulError, match=r"a row per token in its parameter table, which"):
        model.resize_token_embeddings(40)
    assert model.get_input_embeddings().num_embeddings == model.config.vocab_size == 29
    assert model.resize_token_embeddings() is model.get_input_embeddings()


def test_the_layer_input_opens_the_gate():
    """W = 0 opens every gate by half: the output projection of half the heads' output."""
    gated = tiny_decoder(route="output_gate", noise=0)
    plain = tiny_decoder(noise=0)
    with torch.no_grad():
        for block in plain.blocks:
            block.attention.out.weight.mul_(0.5)
    tokens = some_tokens(2, 9)
    torch.testing.assert_close(gated(tokens), plain(tokens), rtol=0, atol=1e-12)
    _, grads = gradients(gated, tokens)
    assert all(grads[f"route.gates.{n}.weight"].abs().max() > 0 for n in range(4))


# ----------------------------------------------------------------------------------- norms


def test_a_norm_knows_its_layer_and_place():
    decoder = Decoder(tiny_config(norm="layernorm", placement="peri", qk_norm=True, bias=True))
    places = {
        name: (module.spec.part, module.spec.layer, module.spec.num_layers, module.spec.width)
        for name, module in decoder.named_modules()
        if isinstance(module, Norm)
    }
    expected = {"norm": ("final", 4, 4, 16)}
    for n in range(4):
        block = f"blocks.{n}"
        for part in ("attention", "attention_output", "mlp", "mlp_output"):
            expected[f"{block}.{part}_norm"] = (part, n, 4, 16)
        for part in ("query", "key"):
            expected[f"{block}.attention.{part}.norm"] = (part, n, 4, 8)
    assert places == expected


class Drawn(Norm):
    """A norm with random numbers in its definition."""

    examples = ("drawn",)

    def attach(self, place):
        super().attach(place)
        self.turn = torch.nn.Linear(place.width, place.width, bias=False)

    def forward(self, x):
        return self.turn(torch.nn.functional.rms_norm(x, x.shape[-1:]))


@pytest.mark.slow
def test_what_a_norm_draws_is_the_same_in_every_model():
    norm = f"{__name__}:Drawn"
    one, two = (tiny_decoder(norm=norm, noise=0) for _ in range(2))
    for (name, parameter), other in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(parameter, other), name
    _, model = pair(norm=norm, noise=0)
    fresh = WakefulForCausalLM(model.config)
    theirs = fresh.model.decoder.norm.turn.weight
    torch.testing.assert_close(theirs, one.norm.turn.weight.float())


def test_an_unknown_norm_or_placement_is_refused_by_name():
    with pytest.raises(WakefulError, match=r"unknown norm 'batchnorm'.*layernorm"):
        Decoder(tiny_config(norm="batchnorm"))
    with pytest.raises(WakefulError, match=r"unknown placement 'per'.*mean 'peri'"):
        Decoder(tiny_config(placement="per"))
    with pytest.raises(WakefulError, match="share must be between 0 and 1"):
        Decoder(tiny_config(placement="mixed(share=1.5)"))


# ------------------------------------------------------------------------------- placements


def by_hand(decoder: Decoder, tokens: torch.Tensor, where: list[str]) -> torch.Tensor:
    """Run a decoder's parts one by one with the norms of each layer where they should stand."""
    x = decoder.embed(tokens)
    flow = Flow(
        memory={}, cache=None, rotations={"rotary": decoder.rotary(slice(0, x.shape[1]))}, keep=None
    )
    for place, block in zip(where, decoder.blocks, strict=True):
        halves = (
            (block.attention_norm, lambda x, b=block: b.attention(x, flow)[0], "attention"),
            (block.mlp_norm, block.mlp, "mlp"),
        )
        for norm, half, part in halves:
            if place == "before":
                x = x + half(norm(x))
            elif place == "over":
                x = norm(x + half(x))
            elif place == "after":
                x = x + block.get_submodule(f"{part}_output_norm")(half(x))
            else:
                x = x + block.get_submodule(f"{part}_output_norm")(half(norm(x)))
    return decoder.head(decoder.norm(x))


@pytest.mark.parametrize(
    ("placement", "where"),
    [
        ("pre", ["before"] * 4),
        ("post", ["over"] * 4),
        ("peri", ["both"] * 4),
        ("reordered", ["after"] * 4),
        ("mixed", ["over"] + ["before"] * 3),
        ("mixed(share=0.5)", ["over"] * 2 + ["before"] * 2),
        ("mixed(share=0.0)", ["before"] * 4),
        ("mixed(share=1.0)", ["over"] * 4),
    ],
)
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_norms_stand_where_the_placement_says(placement, where, norm):
    decoder = tiny_decoder(placement=placement, norm=norm)
    tokens = some_tokens(2, 9)
    torch.testing.assert_close(decoder(tokens), by_hand(decoder, tokens, where), rtol=0, atol=1e-12)


def test_three_tenths_of_ten_layers_are_three():
    counts = [
        sum(build("placements", f"mixed(share={share})").at(n, 100) == "over" for n in range(100))
        for share in (0.29, 0.3, 0.57)
    ]
    assert counts == [29, 30, 57]


@pytest.mark.parametrize("placement", ["post", "peri", "mixed"])
def test_parallel_halves_and_mixed_streams_know_no_norm_over_a_sum(placement):
    with pytest.raises(WakefulError, match=r"model.parallel knows model.placement = pre alone"):
        Decoder(tiny_config(parallel=True, placement=placement))
    if placement == "peri":
        Decoder(tiny_config(depth="mudd", placement=placement))
    else:
        with pytest.raises(WakefulError, match=r"mudd decides .* model.placement"):
            Decoder(tiny_config(depth="mudd", placement=placement))
    with pytest.raises(WakefulError, match=r"mudd decides .* model.parallel"):
        Decoder(tiny_config(depth="mudd", parallel=True))


# -------------------------------------------------------------- depth mixes before sublayers


@torch.no_grad()
def test_a_block_s_first_argument_is_what_it_received():
    """Hooks see one (B, L, D) tensor in and one out, whatever the mix carries beside them."""
    decoder = tiny_decoder(depth="mudd")
    seen: list[torch.Tensor] = []
    for block in decoder.blocks:
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        block.register_forward_hook(lambda _, inputs, output: seen.append(output[0]))
    x = decoder.embed(some_tokens(2, 5))
    decoder.stream(x)
    assert torch.equal(seen[0], x)
    assert all(torch.equal(seen[n], seen[n + 1]) for n in (1, 3, 5))
    assert {each.shape for each in seen} == {x.shape}


def test_a_plain_stream_knows_nothing_of_the_seams():
    """Blocks of the plain model are the plain block, and take and return what they always did."""
    for depth in ("residual", "denseformer"):
        decoder = Decoder(tiny_config(depth=depth))
        assert {type(block) for block in decoder.blocks} == {Block}
    assert {type(b) for b in Decoder(tiny_config(parallel=True)).blocks} == {ParallelBlock}


# ------------------------------------------------------- normalizers at reference speed


def sigmoid(x):
    return 1 / (1 + x.shape[-1] * torch.exp(-x))


def relu(x):
    return torch.where(x > 0, x, 0) / x.shape[-1]


def relu_of_length(x):
    return torch.where(x > 0, x, 0) / 16


def softpick(x):
    e = torch.exp(x) - 1
    return torch.where(e > 0, e, 0) / (e.abs().sum(-1, keepdim=True) + 1e-6)


def clipped(x):
    return (1.06 * torch.exp(x) / torch.exp(x).sum(-1, keepdim=True) - 0.03).clamp(0, 1)


WEIGHTS = {
    "sigmoid": sigmoid,
    "relu": relu,
    "relu(length=16)": relu_of_length,
    "softpick": softpick,
    "clipped": clipped,
}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_normalizer_of_its_own_form_is_its_definition(name, kv_heads):
    normalizer = build("normalizers", name)
    normalizer.attach(tiny_config().shape)
    normalizer.double()
    q, k, v = (torch.randn(2, 7, heads, 8).double() for heads in (4, kv_heads, kv_heads))
    out = DotProduct(normalizer, scale=0.3)(q, k, v, keep=None)
    for head in range(4):
        group = head * kv_heads // 4
        for row in range(7):
            seen = range(row + 1)
            x = 0.3 * torch.einsum("bd,bsd->bs", q[:, row, head], k[:, seen, group])
            expected = torch.einsum("bs,bsd->bd", WEIGHTS[name](x), v[:, seen, group])
            # softpick's ε is added to a sum that is divided by e^max here.
            torch.testing.assert_close(out[:, row, head], expected, rtol=1e-5, atol=1e-5)


def test_logits_of_a_normalizer_of_its_own_form_are_float32():
    normalizer = build("normalizers", "sigmoid")
    seen: list[torch.dtype] = []
    weights = normalizer.weights
    normalizer.weights = lambda logits: seen.append(logits.dtype) or weights(logits)
    dot = DotProduct(normalizer, scale=0.3)
    heads = [torch.randn(1, 5, 2, 8) for _ in range(3)]
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True), (torch.float64, False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = dot(*(each.to(dtype) for each in heads), keep=None)
        assert out.dtype == (torch.bfloat16 if autocast else dtype)
    assert seen == [torch.float32, torch.float32, torch.float64]


class Events(Probe):
    def __init__(self):
        self.events = []

    def see(self, event):
        if isinstance(event, AttentionEvent):
            self.events.append(event)

    def rows(self):
        return pl.DataFrame(schema=SCHEMA)


@torch.no_grad()
@pytest.mark.parametrize("name", WEIGHTS)
def test_probes_see_weights_of_any_form(name):
    """What a layer's attention puts out is the weights that probes see times its values."""
    decoder = tiny_decoder(normalizer=name).eval()
    outputs: list[torch.Tensor] = []
    recorder = Events()
    for block in decoder.blocks:
        block.attention.dot.register_forward_hook(lambda _m, _a, out: outputs.append(out))
    tokens = some_tokens(2, 9)
    valid = torch.arange(9) >= torch.tensor([[0], [4]])
    with watch(decoder, recorder, Sinks(), Entropy(), Ranks(), Values()) as seen:
        decoder(tokens, valid=valid)
    assert seen.frame["value"].is_finite().all()
    for event, out in zip(recorder.events, outputs, strict=True):
        for row, sequence, statistics in zip(
            (0, 1), event.sequences, event.statistics, strict=True
        ):
            A = torch.stack([head_weights(sequence, head) for head in range(4)])
            expected = (A @ sequence.v.repeat_interleave(2, 0)).transpose(0, 1)
            torch.testing.assert_close(out[row, 4 * row :], expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(statistics.column_sums, A.sum(1))
            torch.testing.assert_close(statistics.largest_row_sum, A.sum(2).amax(1))


@torch.no_grad()
def test_what_a_stored_prefix_takes_of_weights_of_any_form_is_seen():
    plain = tiny_decoder(normalizer="sigmoid").eval()
    tokens = some_tokens(1, 9)
    prefixed = store_prefix(plain, tokens[0, :3].tolist())
    whole, rest = Events(), Events()
    with watch(plain, whole):
        plain(tokens)
    with watch(prefixed, rest):
        prefixed(tokens[:, 3:])
    for one, other in zip(whole.events, rest.events, strict=True):
        A = torch.stack([head_weights(one.sequences[0], head) for head in range(4)])[:, 3:]
        torch.testing.assert_close(other.statistics[0].stored_mass, A[..., :3].sum((1, 2)))
        torch.testing.assert_close(other.statistics[0].column_sums, A[..., 3:].sum(1))


def test_weights_of_any_form_are_seen_in_short_sequences(monkeypatch):
    monkeypatch.setattr(streaming, "LONGEST_WHOLE", 5)
    decoder = tiny_decoder(normalizer="softpick").eval()
    check_one_matrix(decoder, 5)
    check_one_matrix(tiny_decoder(), 6)
    with pytest.raises(WakefulError, match="up to 5 tokens, and this one has 6"):
        check_one_matrix(decoder, 6)
    with watch(decoder, Sinks()), pytest.raises(WakefulError, match="this one has 6"):
        decoder(some_tokens(2, 6))
    with watch(decoder, Outliers()) as seen:
        decoder(some_tokens(2, 6))
    assert set(seen.frame["layer"]) == {-1, 0, 1, 2, 3}


@torch.no_grad()
def test_heads_that_attend_to_nothing_have_figures():
    decoder = tiny_decoder(normalizer="relu").eval()
    for block in decoder.blocks:
        for part in (block.attention.query, block.attention.key):
            part.weight.zero_()
    with watch(decoder, Sinks(), Entropy(), Ranks(), Values()) as seen:
        decoder(some_tokens(2, 5))
    assert seen.frame["value"].is_finite().all()
    mass = seen.frame.filter(seen.frame["metric"].is_in(["first_key_mass_with_row_0", "entropy"]))
    assert set(mass["value"]) == {0.0}
