"""The places where new variants attach, each proved by a rival that stands outside the package.

`tests/rivals` holds a folder for each of the package's: a file there is a variant while these tests
run. Every rival owes what every variant owes.
"""

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from contracts import test_variants_contract as contract
from helpers import FIELD, gradients, some_tokens, tiny_config, tiny_decoder
from hf.models import padded, pair
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.variants import variants

pytestmark = pytest.mark.filterwarnings("error")
PLACE = Path(__file__).parents[1] / "rivals"
RIVALS = [
    ("routes", "gated_attention"),
    ("routes", "xsa"),
    ("routes", "value_embeddings"),
    ("routes", "value_embeddings(stream=True)"),
    ("routes", "then(resformer, xsa)"),
]
every_rival = pytest.mark.parametrize(("folder", "expression"), RIVALS, ids=[e for _, e in RIVALS])


@pytest.fixture(scope="module", autouse=True)
def rivals() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for folder in FIELD:
            package = importlib.import_module(f"wakeful.{folder}")
            patch.setattr(package, "__path__", [*package.__path__, str(PLACE / folder)])
        variants.cache_clear()
        yield
    for name, module in list(sys.modules.items()):
        if str(PLACE) in str(getattr(module, "__file__", "")):
            del sys.modules[name]
    variants.cache_clear()


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


@pytest.mark.parametrize("owed", CONTRACTS, ids=lambda test: test.__name__)
@every_rival
def test_a_rival_owes_what_every_variant_owes(owed, folder, expression, tmp_path):
    given = {"folder": folder, "expression": expression, "kv_heads": 2, "tmp_path": tmp_path}
    owed(**{name: given[name] for name in inspect.signature(owed).parameters})


@every_rival
@torch.no_grad()
def test_a_rival_runs_in_transformers(folder, expression):
    decoder, model = pair(**{FIELD[folder]: expression})
    tokens, mask = padded(some_tokens(3, 11), 11, 7, 2)
    logits = model(tokens, attention_mask=mask).logits
    for row, length in enumerate((11, 7, 2)):
        alone = decoder(tokens[row : row + 1, 11 - length :])[0]
        torch.testing.assert_close(logits[row, 11 - length :], alone, rtol=0, atol=1e-12)
    written = model.generate(tokens[:1], max_new_tokens=4, do_sample=False)
    again = model.generate(tokens[:1], max_new_tokens=4, do_sample=False, use_cache=False)
    assert torch.equal(written, again)


# -------------------------------------------------------------------------------- documents


OWN_ATTENTION = ["own", "svformer", "gated", "crosslayer", "xsa", "value_embeddings(stream=True)"]


@pytest.mark.parametrize("normalizer", ["softmax", "softmax1(learned=True)"])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("route", OWN_ATTENTION)
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
    with pytest.raises(WakefulError, match="neither padded batches nor documents"):
        tiny_decoder(relaxed_prefix=3)(tokens, documents=documents)


# ------------------------------------------------------------- what routes read before the layers


def test_a_route_gets_what_it_states_and_nothing_else():
    assert Decoder(tiny_config()).plan.before == frozenset()
    names = {read.kind for read in Decoder(tiny_config(route="value_embeddings")).plan.before}
    assert names == {"tokens"}


def test_a_route_that_reads_tokens_refuses_embeddings_alone():
    decoder, model = pair(route="value_embeddings")
    tokens = some_tokens(2, 5)
    for run in (
        lambda: decoder.stream(decoder.embed(tokens)),
        lambda: model(inputs_embeds=decoder.embed(tokens)),
    ):
        with pytest.raises(WakefulError, match=r"model.route = value_embeddings reads token ids"):
            run()


def test_the_layer_input_opens_the_gate():
    """W = 0 opens every gate by half: the output projection of half the heads' output."""
    gated = tiny_decoder(route="gated_attention", noise=0)
    plain = tiny_decoder(noise=0)
    with torch.no_grad():
        for gate in gated.route.gates.values():
            gate.weight.zero_()
        for block in plain.blocks:
            block.attention.out.weight.mul_(0.5)
    tokens = some_tokens(2, 9)
    torch.testing.assert_close(gated(tokens), plain(tokens), rtol=0, atol=1e-12)
    _, grads = gradients(gated, tokens)
    assert all(grads[f"route.gates.{n}.weight"].abs().max() > 0 for n in range(4))
