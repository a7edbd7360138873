"""Architectures that are ours: the same greedy text, and heirs that are of the architecture too."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import some_tokens
from hf.test_export import of_qwen
from hf.test_weights_in import MODELS, random_model
from wakeful.data.tokenizer import Tokenizer
from wakeful.hf.weights_in import convert_hf_model
from wakeful.hf.weights_out import export_decoder
from wakeful.inheritance.blocks import inherit_blocks
from wakeful.inheritance.bridge import bridge
from wakeful.inheritance.layers import named_layers
from wakeful.model.decoder import Decoder
from wakeful.model.generate import generate_tokens
from wakeful.probes import Outliers, Sinks
from wakeful.probes.watch import watch

KEPT = {
    "gemma2": (1, 2), "gemma3_text": (1, 2), "mistral": (0, 2), "olmo2": (0, 2), "phi3": (0, 2),
    "qwen2": (1, 2), "qwen3": (0, 2), "smollm3": (1, 2),
}  # fmt: skip
"""Layers that heirs have, of the three."""
_PLAIN = ("mistral", "qwen2", "qwen3", "qwen3, biases, tied")  # heirs of a Llama's kind
NAMES = [name for name in MODELS if name.split(",")[0] in KEPT and name not in _PLAIN]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a b c"], 257)


def stored(folder: Path) -> torch.nn.Module:
    """Load a folder; up to 5.19 Transformers chooses SDPA for a Gemma 2, which knows no cap."""
    gemma2 = '"gemma2"' in (folder / "config.json").read_text()
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager" if gemma2 else None
    )


def same_text(ours: Decoder, theirs: torch.nn.Module) -> None:
    prompt = some_tokens(1, 7)
    expected = theirs.generate(
        prompt, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0
    )  # pyright: ignore[reportCallIssue]
    found = list(generate_tokens(ours, prompt[0].tolist(), num_tokens=9, temperature=0))
    assert found == expected[0, 7:].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_text_and_heirs_of_a_family(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    kind = name.split(",", maxsplit=1)[0]
    theirs = random_model(copy.deepcopy(MODELS[name]))  # its configuration is changed below
    ours = convert_hf_model(theirs)
    same_text(ours, theirs)
    seen = []
    for model in (ours, theirs):
        with watch(model, Sinks(), Outliers()) as watched:
            model(some_tokens(2, 21))
        order = [name for name in watched.frame.columns if name not in ("value", "standard_error")]
        seen.append(watched.frame.sort(order)["value"])
    assert seen[0].to_list() == pytest.approx(seen[1].to_list(), rel=1e-3, abs=1e-4, nan_ok=True)
    heir = inherit_blocks(ours, named_layers(KEPT[kind], of=3)).eval()
    known = of_qwen(tokenizer) if kind == "qwen2" else tokenizer
    assert export_decoder(heir, tmp_path / "out", tokenizer=known) == kind
    again = stored(tmp_path / "out")
    tokens = some_tokens(2, 9)
    torch.testing.assert_close(again(tokens).logits, heir(tokens), rtol=0, atol=1e-4)
    # Their own layers, put one behind another, are the heir.
    theirs.model.layers = torch.nn.ModuleList(theirs.model.layers[layer] for layer in KEPT[kind])
    for layer, block in enumerate(theirs.model.layers):
        block.self_attn.layer_idx = layer
    theirs.config.num_hidden_layers = len(KEPT[kind])
    kinds = getattr(theirs.config, "layer_types", None)
    if kinds:
        theirs.config.layer_types = [kinds[n] for n in KEPT[kind]]
    if kinds and (kind == "gemma3_text" or "window" in name):
        assert again.config.layer_types == theirs.config.layer_types
    if kind == "smollm3":
        assert again.config.no_rope_layers == [theirs.config.no_rope_layers[n] for n in KEPT[kind]]
    torch.testing.assert_close(theirs(tokens).logits, heir(tokens), rtol=0, atol=1e-4)
    same_text(heir, again)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in _PLAIN])
@torch.no_grad()
def test_an_heir_with_a_bridge_is_read_back_by_its_family(
    name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Bridges change matrices, and norms behind them, which families store in their own ways."""
    ours, kept = convert_hf_model(random_model(MODELS[name])), named_layers((0, 2), of=3)
    plain, heir = (inherit_blocks(ours, kept).eval() for _ in range(2))
    (found,) = bridge(heir, ours, kept, some_tokens(40, 31))
    assert found.error < found.plain
    tokens = some_tokens(2, 21)
    assert (heir(tokens) - plain(tokens)).abs().max() > 1e-2
    export_decoder(heir, tmp_path / "out", tokenizer=tokenizer)
    again = stored(tmp_path / "out")
    torch.testing.assert_close(again(tokens).logits, heir(tokens), rtol=0, atol=1e-4)
    same_text(heir, again)
