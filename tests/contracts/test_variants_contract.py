"""What every route, depth mix and normalizer owes, run over whatever the folders hold."""

import copy
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import wakeful
from helpers import (
    EXAMPLES,
    FIELD,
    NEUTRALS,
    exact_loss,
    gradients,
    some_tokens,
    tiny_config,
    tiny_decoder,
)
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.variants import Variant, build, variant_name, variants_by_name
from wakeful.variants.discovery import package_classes

pytestmark = pytest.mark.filterwarnings("error")
HEADS = {"gqa": 2, "mha": 0}
"""Key/value heads; only routes see them."""

every_example = pytest.mark.parametrize(
    ("folder", "expression"), EXAMPLES, ids=[e for _, e in EXAMPLES]
)


def with_heads(variants: list[tuple[str, str]]) -> pytest.MarkDecorator:
    cases = [
        pytest.param(folder, expression, kv_heads, id=f"{expression}-{name}")
        for folder, expression in variants
        for name, kv_heads in HEADS.items()
        if kv_heads or folder == "routes"
    ]
    return pytest.mark.parametrize(("folder", "expression", "kv_heads"), cases)


def decoder_of(folder: str, expression: str, kv_heads: int = 2, **overrides) -> Decoder:
    return tiny_decoder(**{FIELD[folder]: expression, "num_kv_heads": kv_heads} | overrides)


def is_own(folder: str, name: str) -> bool:
    places = (".normalizer.",) if folder not in ("norms", "placements") else ("norm.",)
    return name.startswith(f"{FIELD[folder]}.") or any(place in name for place in places)


@pytest.mark.slow
@every_example
def test_a_token_changes_no_earlier_logits(folder, expression):
    decoder = decoder_of(folder, expression)
    tokens = some_tokens(2, 11)
    before = decoder(tokens)
    for place in (0, 4, 7, 10):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 29
        after = decoder(changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.equal(after[:, place:], before[:, place:])


@pytest.mark.slow
@with_heads(EXAMPLES)
def test_cached_decoding_is_the_full_forward(folder, expression, kv_heads):
    decoder = decoder_of(folder, expression, kv_heads)
    tokens = some_tokens(3, 11)
    full = decoder(tokens)
    cache = decoder.new_cache(3, 16)
    pieces = [decoder(piece, cache=cache) for piece in tokens.split([3, 5, 1, 1, 1], dim=1)]
    assert cache.length == 11
    torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=0, atol=1e-10)

    # And the cache can go back: forget the last tokens, take other sequences, read on.
    cache.crop(-3)
    rows = torch.tensor([2, 0, 0])
    cache.reorder(rows)
    again = decoder(tokens[rows, 8:], cache=cache)
    torch.testing.assert_close(again, full[rows, 8:], rtol=0, atol=1e-10)


@with_heads(EXAMPLES)
def test_every_parameter_learns_and_gradients_match_finite_differences(
    folder, expression, kv_heads
):
    decoder = decoder_of(folder, expression, kv_heads)
    tokens = some_tokens(2, 8)
    _, grads = gradients(decoder, tokens)
    parameters = dict(decoder.named_parameters())
    for name, grad in grads.items():
        assert grad is not None, f"no gradient reaches {name}"
        assert grad.abs().max() > 0, f"the gradient of {name} is zero"

    # All together, and by themselves the variant's own, those of all layers in one direction.
    own: dict[str, list[str]] = {}
    for name in parameters:
        if is_own(folder, name):
            own.setdefault(re.sub(r"\d+", "", name), []).append(name)
    generator = torch.Generator().manual_seed(5)
    for moved in [list(parameters), *own.values()]:
        directions = {
            name: torch.randn(parameters[name].shape, generator=generator, dtype=torch.float64)
            for name in moved
        }
        slope = sum((grads[name] * direction).sum() for name, direction in directions.items())
        size = 1e-5 / len(moved) ** 0.5
        losses = []
        for step in (size, -size, size / 2, -size / 2):
            with torch.no_grad():
                for name, direction in directions.items():
                    parameters[name].add_(direction, alpha=step)
                losses.append(exact_loss(decoder, tokens))
                for name, direction in directions.items():
                    parameters[name].add_(direction, alpha=-step)
        wide, narrow = (losses[0] - losses[1]) / (2 * size), (losses[2] - losses[3]) / size
        # Two central differences, so that the third derivative, which a norm of something small
        # makes large, drops out (Richardson); rounding gives 1e-16 / 1e-5.
        measured = narrow + (narrow - wide) / 3
        torch.testing.assert_close(measured, slope, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@every_example
def test_saving_and_loading_keeps_the_logits(folder, expression, tmp_path):
    decoder = decoder_of(folder, expression)
    save_file(decoder.state_dict(), tmp_path / "model.safetensors")
    other = Decoder(decoder.config).double()
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(other(some_tokens(2, 9)), decoder(some_tokens(2, 9)))


@with_heads(NEUTRALS)
def test_the_neutral_form_is_the_vanilla_transformer(folder, expression, kv_heads):
    vanilla = tiny_decoder(noise=0, num_kv_heads=kv_heads)
    neutral = decoder_of(folder, expression, kv_heads, noise=0)
    tokens = some_tokens(2, 11)
    torch.testing.assert_close(neutral(tokens), vanilla(tokens), rtol=0, atol=1e-12)
    _, expected = gradients(vanilla, tokens)
    _, found = gradients(neutral, tokens)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=0, atol=1e-12)


@every_example
def test_an_example_is_not_the_vanilla_transformer(folder, expression):
    kind = type(build(folder, expression))
    tokens = some_tokens(2, 11)
    vanilla = tiny_decoder(noise=0)
    example = decoder_of(folder, expression, noise=0)
    own = [p for name, p in example.named_parameters() if is_own(folder, name)]
    with torch.no_grad():
        for parameter in own:
            parameter.add_(torch.randn_like(parameter))
    same = torch.allclose(example(tokens), vanilla(tokens), rtol=0, atol=1e-9)
    assert same == (expression == kind.neutral and not own)


@every_example
def test_activation_checkpointing_changes_no_bit(folder, expression):
    decoder = decoder_of(folder, expression)
    tokens = some_tokens(2, 9)
    loss, grads = gradients(decoder, tokens)
    decoder.checkpoint_activations = True
    again, recomputed = gradients(decoder, tokens)
    assert torch.equal(again, loss)
    for name, grad in grads.items():
        assert torch.equal(recomputed[name], grad), name


@pytest.mark.parametrize(("folder", "expression"), EXAMPLES + NEUTRALS)
def test_an_expression_survives_being_written(folder, expression):
    first = build(folder, expression)
    written = str(first)
    second = build(folder, written)
    assert str(second) == written
    assert options_of(second) == options_of(first)
    assert build(folder, f"  {written}\n") is not second
    tokens = some_tokens(1, 7)
    one, two = (decoder_of(folder, text) for text in (expression, written))
    assert one.state_dict().keys() == two.state_dict().keys()
    assert torch.equal(one(tokens), two(tokens))


def options_of(variant: Variant) -> tuple:
    """Return the variant's class and options, nested variants by their own options."""
    found = [type(variant)]
    for name in inspect.signature(type(variant)).parameters:
        value = getattr(variant, name)
        items = list(value) if type(value).__name__ in ("ModuleList", "list", "tuple") else [value]
        found += [options_of(item) if isinstance(item, Variant) else item for item in items]
    return tuple(found)


@with_heads(EXAMPLES)
def test_counted_parameters_and_cache_bytes_are_those_allocated(folder, expression, kv_heads):
    decoder = decoder_of(folder, expression, kv_heads, dtype=torch.float32)
    counts = decoder.num_parameters()
    unique = {id(p): p.numel() for p in decoder.parameters()}
    assert counts["total"] == sum(unique.values())
    assert counts["total"] == counts["embedding"] + counts["non_embedding"]
    tables = {id(p): p.numel() for p in decoder.parameters() if p.shape[:1] == (29,)}
    assert counts["embedding"] == sum(tables.values()) >= 2 * 29 * 16
    for batch, capacity in ((1, 5), (3, 24)):
        cache = decoder.new_cache(batch, capacity)
        assert cache.num_bytes == batch * capacity * decoder.cache_bytes_per_token


@pytest.mark.slow
@every_example
def test_left_padding_changes_no_real_token(folder, expression):
    decoder = decoder_of(folder, expression)
    lengths = (9, 5, 1)
    singles = [some_tokens(1, length, seed=length) for length in lengths]
    batch = torch.cat([F.pad(single, (9 - single.shape[1], 0)) for single in singles])
    valid = torch.stack([torch.arange(9) >= 9 - length for length in lengths])

    together = decoder(batch, valid=valid)
    for row, single in enumerate(singles):
        alone = decoder(single)[0]
        torch.testing.assert_close(together[row, -len(alone) :], alone, rtol=0, atol=1e-10)

    # The padding learns nothing and spoils nothing: the batch's gradient is the singles' sum.
    assert_equal_gradients(
        decoder,
        together.square()[valid].sum(),
        sum(decoder(single).square().sum() for single in singles),
    )

    # The same through the cache, the padding coming first and two more tokens following.
    cache = decoder.new_cache(3, 11)
    more = some_tokens(3, 2, seed=8)
    decoder(batch[:, :4], cache=cache, valid=valid[:, :4])
    decoder(batch[:, 4:], cache=cache, valid=valid)
    for step in range(2):
        valid = F.pad(valid, (0, 1), value=True)
        last = decoder(more[:, step : step + 1], cache=cache, valid=valid)
    for row, single in enumerate(singles):
        alone = decoder(torch.cat([single, more[row : row + 1]], 1))[0, -1]
        torch.testing.assert_close(last[row, -1], alone, rtol=0, atol=1e-10)


def assert_equal_gradients(decoder: Decoder, one: Tensor, two: Tensor) -> None:
    parameters = list(decoder.parameters())
    found = torch.autograd.grad(one, parameters)
    for grad, expected in zip(found, torch.autograd.grad(two, parameters), strict=True):
        # Sums over a whole batch of gradients of size up to 1e4.
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@every_example
def test_bfloat16_runs_near_float64(folder, expression):
    tokens = some_tokens(2, 9)
    overrides = {"noise": 0.05, "init_std": 0.1}
    exact = decoder_of(folder, expression, **overrides)
    rough = decoder_of(folder, expression, dtype=torch.bfloat16, **overrides)
    expected, found = exact(tokens), rough(tokens)
    assert found.dtype == torch.bfloat16
    # bfloat16 keeps 8 bits: 0.4 % a rounding, and some forty of them follow one another here.
    assert (found.double() - expected).norm() / expected.norm() < 0.05
    _, grads = gradients(rough, tokens)
    for name, grad in grads.items():
        assert grad is not None, name
        assert grad.isfinite().all(), name
    cache = rough.new_cache(2, 9)
    pieces = [rough(piece, cache=cache) for piece in tokens.split([4, 3, 1, 1], 1)]
    assert (torch.cat(pieces, 1).double() - expected).norm() / expected.norm() < 0.05


@every_example
def test_autocast_runs_near_float32(folder, expression):
    tokens = some_tokens(2, 9)
    decoder = decoder_of(folder, expression, dtype=torch.float32, noise=0.05, init_std=0.1)
    exact_loss, exact = gradients(decoder, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        loss = decoder.loss(tokens[:, :-1], tokens[:, 1:])
    decoder.zero_grad()
    loss.backward()
    # The roundings of bfloat16, as above; the loss averages over them.
    torch.testing.assert_close(loss, exact_loss, rtol=0.01, atol=0)
    found = torch.cat([p.grad.flatten() for p in decoder.parameters()])
    wanted = torch.cat([grad.flatten() for grad in exact.values()])
    assert (found - wanted).norm() / wanted.norm() < 0.1


@every_example
def test_a_deep_copy_is_a_model_of_its_own(folder, expression):
    decoder = decoder_of(folder, expression)
    tokens = some_tokens(2, 9)
    before = decoder(tokens)
    other = copy.deepcopy(decoder)
    assert torch.equal(other(tokens), before)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    assert torch.equal(decoder(tokens), before)
    # Each parameter of the copy is the one its own forward reads.
    _, grads = gradients(other, tokens)
    assert all(grad is not None for grad in grads.values())


@every_example
def test_twins_share_every_weight_of_the_same_name(folder, expression):
    vanilla = dict(tiny_decoder(noise=0).named_parameters())
    for name, parameter in decoder_of(folder, expression, noise=0).named_parameters():
        if not is_own(folder, name):
            assert torch.equal(parameter, vanilla[name]), name


COMPILED = "then(resformer, gated, neutreno(lam=0.2))"
COMPILED_SLOWLY = [
    "own",
    "gated",
    'resformer(mode="plus")',
    "svformer",
    "cla",
]


def compiled(expressions: list[str]) -> dict[str, list[float]]:
    """Return errors of compiled models, measured in a process of its own.

    Dynamo cannot trace the shape checks that `conftest` puts on every function of this one.
    """
    tests = Path(__file__).parents[1]
    paths = [str(tests), str(Path(wakeful.__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(Path(__file__).with_name("compiled.py")), *expressions],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_compiled(models: list[str]) -> None:
    found = compiled(models)
    assert list(found) == models
    for model, (logits, gradient) in found.items():
        assert logits < 1e-12, model
        assert gradient < 1e-10, model


@pytest.mark.long
def test_compiling_the_whole_graph_changes_nothing():
    check_compiled(COMPILED_SLOWLY)


BASES = {
    "routes": ["ValueRoute", "Gates"],
    "depth": ["DepthMix", "SublayerMix"],
    "normalizers": ["Normalizer", "_Separate"],
    "norms": ["Norm"],
    "placements": ["Placement"],
    "ropes": ["RopeScaling"],
    "embeddings": ["Embedding"],
}


@pytest.mark.parametrize("folder", BASES)
def test_every_class_of_a_folder_is_a_variant_that_says_what_it_is(folder):
    ours = [kind for kind in package_classes(folder) if issubclass(kind, Variant)]
    bases = [kind.__name__ for kind in ours if "examples" not in vars(kind)]
    assert bases == BASES[folder]
    kinds = [kind for kind in ours if kind.__name__ not in bases]
    assert {variant_name(kind): kind for kind in kinds} == variants_by_name(folder)
    for kind in kinds:
        assert variant_name(kind) in (kind.examples[0].split("(")[0], kind.name)
        assert kind.examples
        assert kind.__doc__ is not None
        if folder == "ropes" or variant_name(kind) in ("then", "on_layers"):
            continue  # what these take has no default
        for parameter in inspect.signature(kind).parameters.values():
            assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, parameter
            assert parameter.default is not inspect.Parameter.empty, parameter
            assert parameter.default is not None, f"{parameter} means something unsaid"


@pytest.mark.parametrize("folder", FIELD)
def test_every_variant_says_what_it_is(folder):
    assert all(kind.__doc__ for kind in variants_by_name(folder).values())


@every_example
def test_an_unknown_option_is_refused_by_name(folder, expression):
    kind = type(build(folder, expression))
    name = variant_name(kind)
    if name in ("then", "on_layers"):
        pytest.skip("takes routes, not options")
    with pytest.raises(WakefulError, match=f"{name} has no option 'surely_not'"):
        build(folder, f"{name}(surely_not=1)")


def test_the_tiny_model_has_an_odd_layer_to_spare():
    """The examples are only worth something on a model deep enough for all of them."""
    assert tiny_config().num_layers == 4
