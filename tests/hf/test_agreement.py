"""Our decoder is compared with the model that Transformers runs, and refused where it differs."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, MistralConfig

import wakeful
from evaluation.models import save_llama
from evaluation.test_evaluation_costs import Doubled
from helpers import some_tokens
from hf.test_weights_in import COMMON, MODELS, random_model
from wakeful.cli import main
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf import agreement as module
from wakeful.hf.agreement import InFloat32, compare_logits
from wakeful.hf.checkpoint_reader import required_attention
from wakeful.hf.weights_in import convert_hf_model
from wakeful.loading.load import read_decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_both_agree_in_float32_and_keep_their_weights(name: str, dtype: torch.dtype) -> None:
    theirs = random_model(copy.deepcopy(MODELS[name]))
    for parameter in theirs.parameters():  # as from_pretrained does it: buffers stay as they are
        parameter.data = parameter.data.to(dtype)
    theirs.train()
    weights = {key: p.data_ptr() for key, p in theirs.named_parameters()}
    ours = convert_hf_model(theirs)
    found = compare_logits(theirs, ours)
    assert found.architecture == type(theirs).__name__
    assert found.largest < 1e-5
    assert found.relative < 1e-5
    assert found.tokens >= ours.config.window + 9
    assert str(found) == (
        f"logits at most {found.largest:.1e} from those of Transformers' {found.architecture} "
        f"({found.tokens} tokens, float32)"
    )
    assert theirs.training
    assert weights == {key: p.data_ptr() for key, p in theirs.named_parameters()}
    assert {p.dtype for p in theirs.parameters()} == {dtype}


@torch.no_grad()
def test_sixteen_bits_are_widened_one_weight_at_a_time() -> None:
    theirs = random_model(copy.deepcopy(MODELS["qwen3"])).bfloat16()
    tokens = some_tokens(2, 9)
    with InFloat32():
        found = theirs(tokens, use_cache=False).logits
    assert found.dtype == torch.float32
    assert next(theirs.parameters()).dtype == torch.bfloat16
    torch.testing.assert_close(found, theirs.float()(tokens).logits, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if "tied" in name or name == "gpt2"])
def test_a_head_of_its_own_beside_a_tied_embedding_is_kept(name: str, tmp_path: Path) -> None:
    """Transformers does not tie what a checkpoint has twice with different values."""
    config = copy.deepcopy(MODELS[name])
    config.tie_word_embeddings = True
    theirs = random_model(config)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    head = "embed_out.weight" if config.model_type == "gpt_neox" else "lm_head.weight"
    embedding = theirs.get_input_embeddings().weight
    stored[head] = torch.randn_like(embedding)
    save_file(stored, file, {"format": "pt"})
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = some_tokens(2, 9)
    with torch.no_grad():
        expected = wanted(tokens).logits
        assert (expected - theirs(tokens).logits).abs().max() > 0.1
        read = read_decoder(tmp_path)
        in_memory = wakeful.load(wanted).decoder()
        for ours in (read.decoder(), in_memory):
            assert not ours.config.tied
            torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-5)
    # An equal one is the embedding.
    stored[head] = embedding.detach().clone()
    save_file(stored, file, {"format": "pt"})
    assert read_decoder(tmp_path).decoder().config.tied


class Broken(LlamaForCausalLM):
    def forward(self, *rest: Any, **named: Any) -> Any:
        raise RuntimeError("no kernel\nfor this")


def only_last(theirs: Any) -> None:
    """Drop a layer as many recipes do, which leaves the lists of the configuration as they are."""
    theirs.model.layers = theirs.model.layers[1:]
    theirs.config.num_hidden_layers = len(theirs.model.layers)


def other_activation(theirs: Any) -> None:
    theirs.model.layers[1].mlp.act_fn = nn.ReLU()


def other_eps(theirs: Any) -> None:
    for part in theirs.modules():
        if hasattr(part, "variance_epsilon"):
            part.variance_epsilon = 1e-2


def unscaled(theirs: Any) -> None:
    theirs.model.layers[0].self_attn.scaling = 1.0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2, window", only_last),
        ("gemma3_text, window", only_last),
        ("smollm3", only_last),
        ("llama", other_activation),
        ("olmo2", other_eps),
        ("qwen3", unscaled),
    ],
)
def test_what_was_replaced_in_memory_is_refused(name: str, change: Any, tmp_path: Path) -> None:
    theirs = random_model(copy.deepcopy(MODELS[name]))
    change(theirs)
    model = wakeful.load(theirs, tokenizer=Tokenizer.train(["a b c"], 257))
    (tmp_path / "text.txt").write_text("a b c " * 999)
    text = str(tmp_path / "text.txt")
    for door in (
        model.decoder,
        lambda: wakeful.export(model, tmp_path / "out"),
        lambda: wakeful.cure(model, rotate="hadamard", text=text, out=tmp_path / "out"),
        lambda: wakeful.inherit(model, text=text, out=tmp_path / "out"),
    ):
        with pytest.raises(WakefulError, match=r"gives other logits than Tr|model\.local_layers"):
            door()
        assert not (tmp_path / "out").exists()


def test_layers_that_are_cut_with_their_lists_are_taken() -> None:
    theirs: Any = random_model(copy.deepcopy(MODELS["gemma2, window"]))
    only_last(theirs)
    theirs.config.layer_types = theirs.config.layer_types[1:]
    assert wakeful.load(theirs).as_decoder_model().agreement.largest < 1e-5  # pyright: ignore


def test_a_class_that_computes_something_else_is_refused() -> None:
    other = Doubled(MODELS["llama"]).eval()  # pyright: ignore[reportArgumentType]
    with pytest.raises(WakefulError, match="of this Doubled gives other logits"):
        wakeful.load(other).decoder()


def test_what_transformers_cannot_run_is_said() -> None:
    model = wakeful.load(Broken(MODELS["llama"]).eval()).as_decoder_model()  # pyright: ignore
    assert str(model.agreement) == (
        "not compared with Broken: Transformers cannot run it here: no kernel"
    )


@pytest.mark.parametrize("name", ["llama 3", "qwen3", "gpt_neox", "phi3"])
def test_frequencies_that_a_cast_rounded_are_named(name: str) -> None:
    """What from_pretrained leaves in float32, `module.half()` rounds."""
    theirs = random_model(copy.deepcopy(MODELS[name])).half()
    buffers = {key: each.clone() for key, each in theirs.named_buffers()}
    found = wakeful.load(theirs).as_decoder_model().agreement
    assert found is not None
    assert found.largest < 1e-5
    assert "rotary frequencies as from_pretrained has them, before a cast" in str(found)
    for key, each in theirs.named_buffers():
        assert each.dtype == buffers[key].dtype
        assert torch.equal(each, buffers[key])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_outputs_that_are_no_numbers_are_said(value: float) -> None:
    theirs: Any = random_model(copy.deepcopy(MODELS["llama"]))
    theirs.model.layers[1].mlp.up_proj.weight.data[0, 0] = value
    with pytest.raises(WakefulError, match="the model's outputs are not finite"):
        wakeful.load(theirs).decoder()


def long_window(layers: int = 4) -> Any:
    config = MistralConfig(
        **COMMON | {"num_hidden_layers": layers, "max_position_embeddings": 2000},
        num_key_value_heads=2, sliding_window=600,
    )  # fmt: skip
    return random_model(config)


def test_past_a_long_window_the_first_layers_read_alone() -> None:
    theirs = long_window()
    found = compare_logits(theirs, convert_hf_model(theirs))
    assert found.note == "; past the window of 600 through 1 of the layers"
    assert found.tokens == 64 + 32
    assert theirs.config.num_hidden_layers == len(theirs.model.layers) == 4
    # What differs past it alone is found.
    ours = convert_hf_model(theirs)
    theirs.config.sliding_window = 500
    with pytest.raises(WakefulError, match="gives other logits"):
        compare_logits(theirs, ours)


def test_a_window_too_long_to_read_past_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_TOKENS", 100)
    theirs = long_window()
    found = compare_logits(theirs, convert_hf_model(theirs))
    assert str(found).endswith("(64 tokens, float32; not past the window of 600 tokens)")


FIELDS = (
    "head_dim", "num_key_value_heads", "sliding_window", "use_sliding_window", "max_window_layers",
    "layer_types", "rope_parameters", "rope_theta", "partial_rotary_factor", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "query_pre_attn_scalar", "attn_logit_softcapping",
    "final_logit_softcapping", "no_rope_layers", "n_inner", "scale_attn_by_inverse_layer_idx",
    "rotary_pct", "use_parallel_residual", "rms_norm_eps", "layer_norm_epsilon", "hidden_act",
    "scale_attn_weights", "max_position_embeddings", "original_max_position_embeddings",
)  # fmt: skip
"""Options that two readers may take for different things where they are zero, null or missing."""
KINDS = ("gemma2", "gemma3_text, window", "gpt2", "gpt_neox", "llama", "mistral, window", "olmo2",
         "phi3, window", "qwen2, window in some", "qwen3", "smollm3")  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("name", KINDS)
def test_zero_null_and_missing_are_read_as_transformers_reads_them(
    name: str, tmp_path: Path
) -> None:
    """Each option is taken out and set to null, 0 and false: the same logits, or one line."""
    random_model(copy.deepcopy(MODELS[name])).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    whole = json.loads(file.read_text())
    tokens = some_tokens(1, 13)
    same = 0
    for field in FIELDS:
        for value in ("missing", None, 0, False):
            if field not in whole and value == "missing":
                continue
            table = {key: each for key, each in whole.items() if key != field}
            table |= {} if value == "missing" else {field: value}
            file.write_text(json.dumps(table))
            try:
                config = AutoConfig.from_pretrained(tmp_path)
                theirs = AutoModelForCausalLM.from_pretrained(
                    tmp_path, config=config, attn_implementation=required_attention(config)
                ).eval()
                with torch.no_grad():
                    wanted = theirs(tokens, use_cache=False).logits
            except Exception:
                wanted = None
            try:
                read = read_decoder(tmp_path)
            except WakefulError:
                continue
            if wanted is None:
                assert str(read.agreement).startswith("not compared with"), (field, value)
                continue
            with torch.no_grad():
                torch.testing.assert_close(read.decoder()(tokens), wanted, rtol=0, atol=1e-4)
            same += 1
    assert same > len(FIELDS)


@pytest.mark.slow
def test_the_difference_is_said_and_stored_beside_what_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama = save_llama(tmp_path / "llama")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    assert main(["export", str(llama), str(tmp_path / "export")]) == 0
    said = capsys.readouterr()
    words = r"logits at most \d\.\de-\d\d from those of Transformers' LlamaForCausalLM \(64 tokens"
    assert re.search(f"llama: {words}", said.err + said.out)
    assert re.search(words, (tmp_path / "export" / "README.md").read_text())
    options = ["--rotate", "hadamard", "--text", str(text), "--length", "16"]
    assert main(["cure", str(llama), *options, "--out", str(tmp_path / "cure")]) == 0
    assert re.search(words, json.loads((tmp_path / "cure" / "cure.json").read_text())["done"][
        "Conversion"])  # fmt: skip
