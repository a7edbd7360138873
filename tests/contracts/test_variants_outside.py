"""What every variant owes outside its own model: exported, under OrthoAdam, quantized."""

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from helpers import EXAMPLES, FIELD, assert_rotated_along, gradients, some_tokens, tiny_decoder
from wakeful.data.tokenizer import Tokenizer
from wakeful.hf import code
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.families.base import canonical_config
from wakeful.hf.modeling import WakefulForCausalLM
from wakeful.hf.projections import projection_name
from wakeful.hf.weights_out import export_decoder
from wakeful.loading.load import read_decoder
from wakeful.model.decoder import Decoder
from wakeful.model.fold import folded
from wakeful.model.generate import generate_tokens
from wakeful.optim import OrthoAdam
from wakeful.quantization import quantize_module, quantized_layers
from wakeful.runs import checkpoint
from wakeful.variants.roles import roles_of

every_example = pytest.mark.parametrize(
    ("folder", "expression"), EXAMPLES, ids=[e for _, e in EXAMPLES]
)
TOKENIZER = Tokenizer.train(["def f(x):\n    return x + 1\n"] * 5, 270)


def decoder_of(folder: str, expression: str, **overrides: object) -> Decoder:
    options = {"dtype": torch.float32} | overrides
    return tiny_decoder(**options, **{FIELD[folder]: expression}).eval()


pytestmark = pytest.mark.usefixtures("as_users_run_it")  # shapes are checked in each room's tests


@pytest.fixture(scope="module", autouse=True)
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Read each source once, and keep the code that Transformers copies out of the home folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code, "_rewrite_imports", cache(code._rewrite_imports))
        modules = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
        yield


@pytest.mark.slow
@every_example
@torch.no_grad()
def test_an_export_comes_back_to_us_and_to_transformers(
    folder: str, expression: str, tmp_path: Path
) -> None:
    decoder = decoder_of(folder, expression, vocab_size=270)
    kind = export_decoder(decoder, tmp_path / "out", tokenizer=TOKENIZER)
    ours = read_decoder(tmp_path / "out").decoder()
    # Where wakeful is imported, AutoModelForCausalLM takes it instead of the code that went along.
    own = kind == "wakeful"
    door = (
        get_class_from_dynamic_module("modeling_wakeful.WakefulForCausalLM", tmp_path / "out")
        if own
        else AutoModelForCausalLM
    )
    theirs, report = door.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    place = "transformers_modules." if own else "transformers.models."
    assert type(theirs).__module__.startswith(place)

    tokens = some_tokens(2, 9)
    wanted = decoder(tokens)
    assert canonical_config(ours.config) == canonical_config(
        folded(decoder).config if not own else decoder.config
    )
    # What folds is rounded once more; float32 keeps 1e-7, and logits are near 10.
    largest = float(wanted.abs().max())
    for found in (ours(tokens), theirs(tokens).logits):
        assert torch.equal(found, wanted) if own else (found - wanted).abs().max() < 1e-5 * largest

    prompt = tokens[0].tolist()
    text = list(
        generate_tokens(decoder, prompt, num_tokens=3, temperature=0, stop={TOKENIZER.end_of_text})
    )
    assert list(generate_tokens(ours, prompt, num_tokens=3, temperature=0)) == text
    said = theirs.generate(
        tokens[:1], attention_mask=torch.ones_like(tokens[:1]), max_new_tokens=3, do_sample=False
    )
    assert said[0, 9:].tolist() == text


@every_example
def test_a_new_model_of_transformers_starts_as_ours_does(folder: str, expression: str) -> None:
    decoder = decoder_of(folder, expression, noise=0, width=32, init_std=0.02)
    model = WakefulForCausalLM(WakefulConfig.of(decoder.config))
    theirs = dict(model.model.decoder.named_parameters())
    roles = roles_of(decoder)
    for name, parameter in decoder.named_parameters():
        found = model.lm_head.weight if name == "head.weight" else theirs[projection_name(name)]
        start = roles[name].start
        if start == "orthogonal":
            torch.testing.assert_close(found @ found.T, torch.eye(32), rtol=0, atol=1e-5)
        elif start in ("normal", "residual"):
            # Of n numbers, the deviation is known to 1 / √(2n).
            wide = 5 / (2 * found.numel()) ** 0.5
            assert found.std().item() == pytest.approx(0.02, rel=wide), name
        else:
            assert torch.equal(found, parameter), name


@every_example
def test_orthoadam_turns_what_lies_along_the_stream_and_goes_on_to_the_bit(
    folder: str, expression: str, tmp_path: Path
) -> None:
    decoder = decoder_of(folder, expression, width=24)
    optimizer = OrthoAdam(decoder.named_parameters(), lr=1e-2)
    for line, entry in zip(optimizer.plan(), optimizer.param_groups[0]["rotations"], strict=True):
        assert_rotated_along(24, line, entry)
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    tokens = some_tokens(2, 9)
    gradients(decoder, tokens)
    optimizer.step()
    for name, parameter in decoder.named_parameters():
        moved = (parameter - before[name]).norm() / parameter.numel() ** 0.5
        # A first step of Adam's is lr in each rotated coordinate whose gradient is not zero, and
        # an embedding has gradients of the rows that were read alone.
        assert 1e-3 < moved < 1.01e-2, name

    saved = checkpoint.save_checkpoint(
        tmp_path, decoder, optimizer, checkpoint.RunProgress(step=1), keep=1
    )
    other = copy.deepcopy(decoder)
    again = OrthoAdam(other.named_parameters(), lr=1e-2)
    checkpoint.load_optimizer(saved, again)
    for model, one in ((decoder, optimizer), (other, again)):
        gradients(model, tokens)
        one.step()
    for (name, one), two in zip(decoder.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name


@every_example
@torch.inference_mode()
def test_quantization_reaches_every_weight_and_costs_what_rounding_costs(
    folder: str, expression: str
) -> None:
    # Weights small enough for rounding errors to add up and not to grow.
    decoder = decoder_of(folder, expression, noise=0.05, init_std=0.1)
    tokens = some_tokens(2, 11)
    before = {name: p.clone() for name, p in decoder.state_dict().items()}
    full = decoder(tokens)
    plain = folded(decoder)
    roles = roles_of(plain)
    wanted = {
        name.removesuffix(".weight")
        for name, parameter in plain.named_parameters()
        if parameter.ndim >= 2 and (name not in roles or roles[name].quantized)
    } - {"embed"}

    def error(model: torch.nn.Module) -> float:
        return float((model(tokens) - full).norm() / full.norm())

    # The largest of some twenty numbers is 2.2 times their root mean square. Rounding to 1/127 of
    # it is an error of 2.2 / 127 / √12 = 0.5 % of weights and as much of inputs, 0.7 % a product;
    # 29 independent ones, as if they all followed one another, make √29 × 0.7 % = 3.8 %.
    fine = quantize_module(decoder, "fine")
    assert set(quantized_layers(fine)) == wanted
    assert 0 < error(fine) < 0.05
    # From the least to the largest weight are 3.7 root mean squares in 15 steps of an error of
    # 1 / √12, so 7 % a product, of weights alone, and √29 × 7 % = 38 %.
    light = quantize_module(decoder, "w4")
    assert set(quantized_layers(light)) == wanted
    assert error(fine) < error(light) < 0.5
    # It is the same model with the dequantized matrices put into it.
    rounded = copy.deepcopy(plain)
    for name, layer in quantized_layers(light).items():
        rounded.get_parameter(f"{name}.weight").copy_(layer.dequantize())
    torch.testing.assert_close(light(tokens), rounded(tokens), rtol=1e-4, atol=1e-4)
    assert torch.equal(decoder(tokens), full)
    assert all(torch.equal(p, before[name]) for name, p in decoder.state_dict().items())
