"""`quantize --rotation`: the rotation before the formats, how it is chosen and what is written."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import wakeful
from evaluation.models import save_llama
from helpers import some_tokens, tiny_decoder
from quantization.test_experts import TOKENS, model_of
from quantization.test_smallest import llama
from wakeful.errors import WakefulError
from wakeful.hf.weights_in import convert_hf_model
from wakeful.loading.model import Model
from wakeful.model.decoder import Decoder
from wakeful.probes.running import logits_of
from wakeful.quantization import quantize_module, quantized_layers
from wakeful.quantization.compressed import file_bytes, state_bytes
from wakeful.quantization.convert import linear_layers
from wakeful.quantization.damage import Damage, layer_errors
from wakeful.quantization.engines import VLLM
from wakeful.quantization.format_search import Budget, FormatSearch, split_text
from wakeful.quantization.measure import kl_per_sequence, measure_damage
from wakeful.quantization.result import Quantization
from wakeful.quantization.rotated import (
    SearchedModel,
    candidate_rotations,
    choose_rotation,
    rotate_model,
    skip_in_decoder,
)
from wakeful.quantization.rotation_choice import RotationChoice
from wakeful.quantization.schemes import Scheme, parse_scheme
from wakeful.surgery import rotate

TEXT = [some_tokens(1, 24, seed=n) for n in range(8)]
EASY = "W4A16 in groups of 32"
CANDIDATES = candidate_rotations(VLLM.schemes[EASY])


def wide_decoder(**over: object) -> Decoder:
    """Return a decoder whose layers have whole groups of 32 channels."""
    return tiny_decoder(dtype=torch.float32, width=64, head_width=16, mlp_width=128, **over).eval()


def search(model: Decoder, **budget: float) -> FormatSearch:
    return FormatSearch(
        model, linear_layers(model, ["head"]), Budget(**budget), *split_text(TEXT),
        model_bytes=state_bytes(model), stored_dtype=torch.float32,
    )  # fmt: skip


def loaded_model(module: torch.nn.Module, stored: torch.dtype | None = None) -> Model:
    return Model(
        name="tiny", module=module, architecture="wakeful decoder", stored=stored, context=24,
        read_tokenizer=lambda: None,
    )  # fmt: skip


class MadeUpSearch(FormatSearch):
    """A search that measures the given KL."""

    nearest_uniform_format = EASY

    def __init__(self, kl: list[float], model_bytes: int = 100) -> None:
        vars(self).update(kl=kl, model_bytes=model_bytes, model=torch.nn.Identity(), engine=VLLM)

    def uniform_kl(self, format_name: str) -> list[float]:
        assert format_name == EASY
        return vars(self)["kl"]


def rotated_model(search: FormatSearch) -> SearchedModel:
    return SearchedModel(loaded_model(search.model), search)


def test_blocks_are_as_wide_as_the_groups_of_the_format() -> None:
    assert CANDIDATES == ("values", "hadamard", "block_diagonal(size=32)")
    assert candidate_rotations(VLLM.schemes["W8A16"]) == ("values", "hadamard")
    nvfp4 = parse_scheme("nvfp4")
    assert candidate_rotations(nvfp4)[-1] == "block_diagonal(size=16)"


@pytest.mark.parametrize(
    ("hadamard", "chosen"),
    [
        ([0.8, 1.8, 2.8, 3.8], "hadamard"),  # less on every sequence
        ([0.5, 2.2, 2.2, 3.9], ""),  # less on average: it may be chance
        ([1.1, 2.1, 3.1, 4.1], ""),
    ],
)
def test_the_rotation_that_surely_helps_most_is_chosen(hadamard: list[float], chosen: str) -> None:
    blocks = [1.3, 2.3, 3.3, 4.3]
    kl = {"values": [1.2, 2.1, 3.2, 4.0], "hadamard": hadamard, "block_diagonal(size=32)": blocks}
    models = {name: rotated_model(MadeUpSearch(values)) for name, values in kl.items()}
    choice, rotated = choose_rotation(MadeUpSearch([1.0, 2.0, 3.0, 4.0]), models.__getitem__)
    assert rotated is models.get(chosen)
    assert choice.name == chosen
    assert list(choice.kl) == ["", *CANDIDATES]
    assert choice.difference("hadamard")[0] == pytest.approx(sum(hadamard) / 4 - 2.5)
    assert choice.description.startswith(f"{chosen or 'none'}. KL in {EASY} without a rotation 2.5")


def test_a_trial_that_is_not_finite_or_has_no_interval_chooses_nothing() -> None:
    models = {name: rotated_model(MadeUpSearch([float("nan")])) for name in CANDIDATES}
    choice, _ = choose_rotation(MadeUpSearch([1.0]), models.__getitem__)
    assert choice.name == ""
    assert choice.summary["kl"] == {"none": [1.0], **{name: [None] for name in CANDIDATES}}
    models = {name: rotated_model(MadeUpSearch([0.5])) for name in CANDIDATES}
    choice, _ = choose_rotation(MadeUpSearch([1.0]), models.__getitem__)
    assert choice.name == ""
    assert "one sequence has no interval" in choice.description


def test_rotations_that_add_bytes_or_are_impossible_are_not_tried() -> None:
    def rotate(rotation: str) -> SearchedModel:
        if rotation == "values":
            raise WakefulError("its values have gates: use --rotate_keys")
        return rotated_model(MadeUpSearch([0.0, 0.0], model_bytes=2_000_100))

    choice, rotated = choose_rotation(MadeUpSearch([1.0, 2.0]), rotate)
    assert (choice.name, rotated) == ("", None)
    assert choice.refused == {
        "values": "its values have gates: use --rotate_keys",
        "hadamard": "it adds 2.0 MB to the file",
        "block_diagonal(size=32)": "it adds 2.0 MB to the file",
    }
    assert "values not tried: its values have gates: use --rotate_keys" in choice.description
    assert RotationChoice("haar").description == "haar, as asked for"


@pytest.mark.slow
def test_trials_are_of_the_quantized_rotated_model() -> None:
    plain = wide_decoder(tied=False)
    rotated = rotate(plain)
    (expected,) = kl_per_sequence(
        plain,
        [
            quantize_module(
                rotated, VLLM.schemes[EASY], calibration=split_text(TEXT)[0], skip=["head"]
            )
        ],
        split_text(TEXT)[1],
    )
    tried = replace(search(rotated, bits=4.6), unrotated=search(plain, bits=4.6))
    assert tried.uniform_kl(EASY) == pytest.approx(expected, rel=1e-5)


def test_the_format_of_the_trials_is_the_largest_within_the_budget() -> None:
    model = wide_decoder()
    groups_of = {group: f"W4A16 in groups of {group}" for group in (32, 64)}
    assert search(model, bits=4.3).nearest_uniform_format == groups_of[64]
    assert search(model, bits=4.6).nearest_uniform_format == groups_of[32]
    assert search(model, bits=9.0).nearest_uniform_format == "W8A16"
    assert search(model, bits=4.1).nearest_uniform_format == groups_of[64]  # the smallest of all
    assert search(model, loss=0.1).nearest_uniform_format == groups_of[64]


def test_a_trial_needs_a_format_that_fits_a_layer() -> None:
    model = tiny_decoder(dtype=torch.float32)
    eight_bits = Scheme(weights=VLLM.schemes["W8A16"].weights)
    wide = {"wide": VLLM.schemes["W4A16 in groups of 128"], "eight": eight_bits}
    tried = replace(search(model, loss=0.1), engine=replace(VLLM, schemes=wide))
    assert tried.nearest_uniform_format == "eight"
    tried = replace(tried, engine=replace(VLLM, schemes={"wide": wide["wide"]}))
    with pytest.raises(WakefulError, match="none of the formats fits a layer"):
        _ = tried.nearest_uniform_format


@pytest.mark.slow
def test_a_loss_that_is_allowed_counts_from_the_model_that_was_given() -> None:
    plain = search(wide_decoder(tied=False), loss=0.02)
    rounded = rotate_model(loaded_model(plain.model, torch.bfloat16), "hadamard").module
    found = replace(search(cast(Decoder, rounded), loss=0.02), unrotated=plain)
    mixed = found.find_formats()
    assert found._mean_loss(mixed.module) - found._mean_loss(plain.model) <= 0.02
    assert mixed.uniform_models


@pytest.mark.slow
def test_uniform_models_to_compare_with_are_not_rotated() -> None:
    plain = search(wide_decoder(tied=False), bits=4.6)
    alone = plain.find_formats()
    rotated = search(rotate(cast(Decoder, plain.model)), bits=4.6)
    found = replace(rotated, unrotated=plain).find_formats()
    assert found.uniform_bytes == alone.uniform_bytes
    for name, module in found.uniform_models.items():
        torch.testing.assert_close(
            logits_of(module, TEXT[0]), logits_of(alone.uniform_models[name], TEXT[0])
        )
    assert not torch.equal(logits_of(found.module, TEXT[0]), logits_of(alone.module, TEXT[0]))


def test_layers_are_compared_with_those_of_the_rotated_model() -> None:
    plain = wide_decoder(tied=False)
    rotated = rotate(plain)
    scheme = Scheme(weights=VLLM.schemes["W8A16"].weights)
    modules = {"plain": quantize_module(plain, scheme), "turned": quantize_module(rotated, scheme)}
    found = measure_damage("tiny", plain, modules, TEXT[:3], rotated={"turned": rotated})
    alone = measure_damage("tiny", rotated, {"turned": modules["turned"]}, TEXT[:3])
    sizes = dict.fromkeys(modules, 1)
    errors = layer_errors(Damage(found, dict.fromkeys(modules, scheme), 1, sizes), "turned")
    expected = layer_errors(Damage(alone, {"turned": scheme}, 1, {"turned": 1}), "turned")
    assert errors.select("module", "value", "kurtosis").equals(
        expected.select("module", "value", "kurtosis")
    )
    assert cast(float, errors["value"].max()) < 0.02  # not the difference of the two bases
    assert found.schemes["turned"].divergence == pytest.approx(
        alone.schemes["turned"].divergence, rel=1e-3
    )
    of_plain = layer_errors(Damage(found, dict.fromkeys(modules, scheme), 1, sizes), "plain")
    assert not of_plain["kurtosis"].equals(errors["kurtosis"])
    assert set(found.layers.filter(pl.col("metric") == "input_kurtosis")["scheme"]) == {
        "",
        "turned",
    }


@torch.inference_mode()
def test_a_rotated_model_computes_the_same_in_numbers_of_its_files() -> None:
    plain = wide_decoder(tied=False)
    for rotation in CANDIDATES:
        rotated = rotate_model(loaded_model(plain), rotation)
        torch.testing.assert_close(
            logits_of(rotated.module, TEXT[0]), logits_of(plain, TEXT[0]), rtol=1e-3, atol=1e-4
        )
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.bfloat16())
    rotated = rotate_model(loaded_model(plain, torch.bfloat16), "hadamard").module
    table = cast(Decoder, rotated).embed.weight
    assert not torch.equal(table, plain.embed.weight)
    assert torch.equal(table, table.bfloat16().float())


@torch.inference_mode()
def test_a_mixture_of_experts_is_rotated_as_it_is() -> None:
    plain = model_of("Mixtral")
    rotated = rotate_model(loaded_model(plain), "hadamard").module
    assert type(rotated) is type(plain)
    torch.testing.assert_close(
        logits_of(rotated, TOKENS), logits_of(plain, TOKENS), rtol=1e-3, atol=1e-4
    )
    assert not torch.equal(
        rotated.get_input_embeddings().weight, plain.get_input_embeddings().weight
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("def return value layer for in range and the river went down " * 80)
    return str(path)


def quantize_llama(tmp_path: Path, text: str, *, tied: bool, **options: Any) -> Quantization:
    folder = save_llama(tmp_path / "llama")
    llama(vocab_size=258, tie_word_embeddings=tied).save_pretrained(folder)
    return wakeful.quantize(
        str(folder), text=text, length=16, num_sequences=3, calibration_sequences=8, device="cpu",
        **options,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_the_file_of_a_rotated_model_is_a_stock_one(tmp_path: Path, text: str, tied: bool) -> None:
    small, out = tmp_path / "small", tmp_path / "out"
    result = quantize_llama(
        tmp_path, text, tied=tied, bits=4.6, rotation="hadamard", save=str(small), out=str(out)
    )
    theirs = AutoModelForCausalLM.from_pretrained(small).eval()
    assert theirs.config.model_type == "llama"
    tokens = some_tokens(2, 12, vocab_size=258)
    with torch.inference_mode():
        torch.testing.assert_close(
            logits_of(theirs, tokens), logits_of(result.model.module, tokens), rtol=1e-4, atol=1e-4
        )
    stored = load_file(small / "model.safetensors")
    assert (stored["model.norm.weight"] == 1).all()  # its scale is in the head
    assert "lm_head.weight" in stored
    assert len(quantized_layers(result.model.module)) == 14
    assert "Rotation: hadamard, as asked" in (small / "README.md").read_text()
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    assert summary["smallest"]["rotation"]["chosen"] == "hadamard"
    assert summary["method"]["Rotation"] == "hadamard, as asked for"
    assert file_bytes(small) == pytest.approx(summary["smallest"]["bytes"], rel=0.1)


@pytest.mark.slow
def test_auto_says_what_it_measured(tmp_path: Path, text: str) -> None:
    result = quantize_llama(tmp_path, text, tied=True, bits=4.6, rotation="auto")
    assert result.mixed_model is not None
    choice = result.mixed_model.rotation
    assert choice is not None
    assert list(choice.kl) == ["", "values"]
    assert "MB to the file" in choice.refused["hadamard"]
    assert "hadamard not tried: it adds" in result.method["Rotation"]


@pytest.mark.slow
def test_auto_writes_the_model_that_it_chose(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FormatSearch, "uniform_kl",
        lambda search, *_: [2.0, 3.0] if search.unrotated is None else [1.0, 2.1],
    )  # fmt: skip
    small = tmp_path / "small"
    result = quantize_llama(
        tmp_path, text, tied=True, bytes=180_000, rotation="auto", save=str(small), tune=2,
        cache="fp8", skip=["*.up_proj"],
    )  # fmt: skip
    assert result.mixed_model is not None
    assert result.mixed_model.rotation_name == "values"
    assert result.layers == tuple(
        name for name in linear_layers(result.mixed_model.full_model) if not name.endswith("up")
    )
    first = result.report.headlines[0]
    assert "the chosen formats after the rotation values raise the loss" in first
    tokens = some_tokens(2, 12, vocab_size=258)
    expected = result.model.logits(tokens)
    read = wakeful.load(small, device="cpu").logits(tokens)
    torch.testing.assert_close(read, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_an_untied_head_is_one_of_the_layers(tmp_path: Path, text: str) -> None:
    result = quantize_llama(tmp_path, text, tied=True, bytes=130_000, rotation="hadamard")
    assert "head" in result.layers
    assert result.head
    assert result.damage is not None
    assert result.damage.bytes["mixed"] <= 130_000


def test_patterns_of_transformers_names_become_names_of_the_decoder() -> None:
    decoder = convert_hf_model(llama())
    assert skip_in_decoder(decoder, ["*.1.mlp.down_proj", "blocks.0.*", "lm_head"]) == (
        "blocks.1.mlp.down", "blocks.0.*", "lm_head"
    )  # fmt: skip
    untied = convert_hf_model(llama(tie_word_embeddings=False))
    assert skip_in_decoder(untied, ["lm_head"]) == ("head",)


@pytest.mark.slow
def test_a_gguf_file_holds_a_rotated_model(tmp_path: Path, text: str) -> None:
    path = tmp_path / "small.gguf"
    result = quantize_llama(
        tmp_path, text, tied=False, bits=7.0, for_="llama.cpp", rotation="hadamard", save=str(path)
    )
    tokens = some_tokens(2, 12, vocab_size=258)
    read = wakeful.load(path, device="cpu").logits(tokens)
    torch.testing.assert_close(
        read, result.model.logits(tokens), rtol=1e-2, atol=1e-2 * float(read.std())
    )


@pytest.mark.slow
def test_wrong_rotations_are_refused(tmp_path: Path, text: str) -> None:
    for options, words in (
        ({"bits": 4.6, "rotation": "sideways"}, "sideways"),
        ({"bits": 4.6, "rotation": "eigenbasis"}, "learned by training"),
        ({"scheme": "w4", "rotation": "values"}, "rotate the model by wakeful cure"),
    ):
        with pytest.raises(WakefulError, match=words):
            quantize_llama(tmp_path / words[:5], text, tied=False, **options)
