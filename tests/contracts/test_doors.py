"""Random small models of every family through every door, beside what Transformers runs.

Each is saved as a folder, some after surgery in memory that leaves the configuration stale. What
every door gives is the model as Transformers runs that folder, to 1e-4 of its largest logit, or a
refusal in one line.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

import wakeful
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.loading.load import read_decoder
from wakeful.probes.running import logits_of

MODELS, AT_ONCE = 300, 10
"""Models, and those of one test."""
VOCABULARY, CONTEXT = 270, 48


def grouped(draw: random.Random) -> dict[str, Any]:
    """Return the sizes of a model with grouped heads, which need not make up its width."""
    groups, each = draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
    return {
        "vocab_size": VOCABULARY + draw.choice([0, 0, 2, 50]),  # padded beyond the tokenizer
        "hidden_size": 2 * groups * each * draw.choice([4, 8, 9]),
        "intermediate_size": draw.choice([24, 33, 64]),
        "num_hidden_layers": draw.choice([2, 3, 4]),
        "num_attention_heads": groups * each,
        "num_key_value_heads": groups,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": draw.random() < 0.5,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": 0,
        "head_dim": draw.choice([6, 8, 10]),
    }  # fmt: skip


def without(table: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name not in names}


def rope(draw: random.Random) -> dict[str, Any]:
    theta = draw.choice([100.0, 10_000.0, 500_000.0])
    scaled = {"rope_type": "linear", "factor": 2.5}
    llama3 = {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    }  # fmt: skip
    kind = draw.choice([{"rope_type": "default"}, {"rope_type": "default"}, scaled, llama3])
    return {"rope_parameters": kind | {"rope_theta": theta}}


def llama(draw: random.Random) -> PreTrainedConfig:
    biases = {name: draw.random() < 0.15 for name in ("attention_bias", "mlp_bias")}
    return LlamaConfig(**grouped(draw), **rope(draw), **biases)


def mistral(draw: random.Random) -> PreTrainedConfig:
    return MistralConfig(**grouped(draw), sliding_window=draw.choice([None, 5, 9, 64]))


def qwen2(draw: random.Random) -> PreTrainedConfig:
    table = without(grouped(draw), "head_dim")
    table["hidden_size"] = 2 * table["num_attention_heads"] * draw.choice([3, 4])
    return Qwen2Config(**table, **windowed(draw))


def windowed(draw: random.Random) -> dict[str, Any]:
    return {
        "use_sliding_window": draw.random() < 0.5, "sliding_window": draw.choice([4, 7]),
        "max_window_layers": draw.choice([0, 1, 2]),
    }  # fmt: skip


def qwen3(draw: random.Random) -> PreTrainedConfig:
    return Qwen3Config(**grouped(draw), **windowed(draw), attention_bias=draw.random() < 0.15)


def smollm3(draw: random.Random) -> PreTrainedConfig:
    table = grouped(draw)
    turned = [draw.randint(0, 1) for _ in range(table["num_hidden_layers"])]
    return SmolLM3Config(**table, no_rope_layers=turned, mlp_bias=draw.random() < 0.3)


def olmo2(draw: random.Random) -> PreTrainedConfig:
    table = without(grouped(draw), "head_dim")
    table["hidden_size"] = 2 * table["num_attention_heads"] * draw.choice([3, 4])
    return Olmo2Config(**table, attention_bias=draw.random() < 0.15)


def gemma(draw: random.Random) -> dict[str, Any]:
    return grouped(draw) | {
        "sliding_window": draw.choice([4, 7, CONTEXT]),
        "query_pre_attn_scalar": draw.choice([5, 8, 16]),
        "final_logit_softcapping": draw.choice([None, 3.0, 30.0]),
    }  # fmt: skip


def gemma2(draw: random.Random) -> PreTrainedConfig:
    cap = draw.choice([None, 2.0, 50.0])  # up to 5.19 Transformers chooses SDPA, which knows none
    return Gemma2Config(**gemma(draw), attn_logit_softcapping=cap, attn_implementation="eager")


def gemma3(draw: random.Random) -> PreTrainedConfig:
    table = gemma(draw)
    kinds = draw.choices(["sliding_attention", "full_attention"], k=table["num_hidden_layers"])
    return Gemma3TextConfig(**table, layer_types=kinds)


def phi3(draw: random.Random) -> PreTrainedConfig:
    table = without(grouped(draw), "head_dim")
    table["hidden_size"] = 8 * table["num_attention_heads"]
    share = draw.choice([0.25, 0.5, 1.0])
    positions = {"rope_theta": 1e4, "partial_rotary_factor": share, "rope_type": "default"}
    return Phi3Config(**table, rope_parameters=positions, sliding_window=draw.choice([None, 6]))


def gpt2(draw: random.Random) -> PreTrainedConfig:
    return GPT2Config(
        vocab_size=VOCABULARY + draw.choice([0, 50]), n_embd=24, n_head=draw.choice([1, 2, 3]),
        n_layer=draw.choice([2, 3]), n_positions=CONTEXT, n_inner=draw.choice([None, 50]),
        activation_function=draw.choice(["gelu_new", "gelu"]), bos_token_id=0, eos_token_id=0,
        scale_attn_by_inverse_layer_idx=draw.random() < 0.3,
        tie_word_embeddings=draw.random() < 0.7,
    )  # fmt: skip


def gpt_neox(draw: random.Random) -> PreTrainedConfig:
    return GPTNeoXConfig(
        vocab_size=VOCABULARY + draw.choice([0, 2]), hidden_size=32, intermediate_size=40,
        num_hidden_layers=draw.choice([2, 3]), num_attention_heads=draw.choice([2, 4]),
        max_position_embeddings=CONTEXT, rotary_pct=draw.choice([0.25, 0.5, 1.0]),
        use_parallel_residual=draw.random() < 0.6, attention_bias=draw.random() < 0.6,
        tie_word_embeddings=draw.random() < 0.4, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


FAMILIES: tuple[Callable[[random.Random], PreTrainedConfig], ...] = (
    llama, mistral, qwen2, qwen3, smollm3, olmo2, gemma2, gemma3, phi3, gpt2, gpt_neox,
)  # fmt: skip


def blocks_in(model: Any) -> tuple[Any, str]:
    inner = model.base_model
    return inner, "h" if hasattr(inner, "h") else "layers"


def cut(model: Any, draw: random.Random) -> None:
    """Drop a layer; half of the time the lists of the configuration stay as they are."""
    inner, name = blocks_in(model)
    gone, total = draw.randrange(len(getattr(inner, name))), len(getattr(inner, name))
    kept = [layer for layer in range(total) if layer != gone]
    setattr(inner, name, nn.ModuleList(getattr(inner, name)[layer] for layer in kept))
    lists = {
        key: list(value)
        for key in ("layer_types", "no_rope_layers")
        if isinstance(value := getattr(model.config, key, None), list)
    }
    model.config.num_hidden_layers = len(kept)
    if draw.random() < 0.5:
        for key, values in lists.items():
            setattr(model.config, key, [values[layer] for layer in kept])


def split_head(model: Any, draw: random.Random) -> None:
    """Give a tied model a head of its own, and leave the configuration as it is."""
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(torch.randn_like(head.weight))


def other_activation(model: Any, draw: random.Random) -> None:
    for part in model.modules():
        for name in ("act_fn", "act", "activation_fn"):
            if hasattr(part, name):
                setattr(part, name, nn.SiLU() if draw.random() < 0.3 else nn.ReLU())


CHANGES = (None, None, None, cut, cut, split_head, other_activation)


def drawn(draw: random.Random) -> tuple[PreTrainedModel, str]:
    """Return a model with random weights, and what was changed about it in memory."""
    config = draw.choice(FAMILIES)(draw)
    torch.manual_seed(draw.randrange(2**31))
    model = AutoModelForCausalLM.from_config(config).eval()
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=draw.choice([0.1, 0.3]))
            parameter.data = parameter.data.to(dtype)
    change = draw.choice(CHANGES)
    if change is not None:
        change(model, draw)
    return model, f"{config.model_type}, {dtype}, {change.__name__ if change else 'as made'}"


@torch.no_grad()
def as_transformers(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=True
    ).eval()


class Ledger:
    """What became of each model at each door."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, int]] = {}
        self.wrong: list[str] = []

    def at(self, door: str, model: str, wanted: Tensor, pass_through: Callable[[], Tensor]) -> None:
        try:
            found = pass_through()
        except WakefulError as error:
            said = str(error)
            outcome = "refused" if said and "\n" not in said else "wrong"
        except Exception as error:
            outcome, said = "wrong", f"{type(error).__name__}: {error}"
        else:
            apart = float((found.float() - wanted).abs().max() / wanted.abs().max())
            outcome, said = ("equal" if apart <= 1e-4 else "wrong"), f"{apart:.2g}"
        counts = self.counts.setdefault(door, {"equal": 0, "refused": 0, "wrong": 0})
        counts[outcome] += 1
        if outcome == "wrong":
            self.wrong.append(f"{door}: {model}: {said}")


@torch.no_grad()
def through_all(model: PreTrainedModel, name: str, place: Path, ledger: Ledger) -> None:
    tokenizer = Tokenizer.train(["a quick brown fox"], VOCABULARY)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer.inner, eos_token="<|endoftext|>")
    tokens = torch.randint(VOCABULARY, (2, 20))
    text = place / "text.txt"
    text.write_text("a quick brown fox jumps over a lazy dog " * 60)

    def run(made: Any) -> Tensor:
        return logits_of(made, tokens)

    # As it stands in memory, in the arithmetic that the comparison has.
    exact = next(model.parameters()).dtype == torch.float32
    if exact:
        truth = run(model)
        ledger.at("decoder, in memory", name, truth, lambda: run(wakeful.load(model).decoder()))
        loaded = wakeful.load(model, tokenizer=fast)
        ledger.at("export, in memory", name, truth, lambda: (
            wakeful.export(loaded, place / "memory"), run(as_transformers(place / "memory")))[1]
        )  # fmt: skip
    folder = place / "folder"
    try:
        model.save_pretrained(folder)
        fast.save_pretrained(folder)
        wanted = run(as_transformers(folder))
    except Exception:  # Transformers refuses some stale configurations itself
        return
    ledger.at("load", name, wanted, lambda: run(wakeful.load(folder).module))
    ledger.at("decoder", name, wanted, lambda: run(read_decoder(folder).module))
    ledger.at("export", name, wanted, lambda: (
        wakeful.export(folder, place / "export"), run(as_transformers(place / "export")))[1]
    )  # fmt: skip
    options = {"text": str(text), "length": 16, "num_sequences": 2}
    # In float32: rotated weights rounded to the 16 bits of a folder are not exact.
    ledger.at("cure", name, wanted, lambda: (
        wakeful.cure(folder, rotate="hadamard", out=place / "cured", stored="float32", **options),
        run(as_transformers(place / "cured")))[1]
    )  # fmt: skip
    ledger.at("GGUF", name, wanted, lambda: (
        wakeful.export(folder, place / "it.gguf", gguf="f32"),
        run(wakeful.load(place / "it.gguf").module))[1]
    )  # fmt: skip
    # A quantized copy is its scheme's model: the folder gives what was in memory.
    # Inputs on a grid jump by a whole step where rounding differs, so weights alone are quantized.
    scheme = "scheme(weights=absmax(bits=8, per='channel'))"

    def saved() -> Tensor:
        small = wakeful.quantize(folder, scheme, save=str(place / "small")).model
        return wanted + (run(as_transformers(place / "small")).float() - run(small.module).float())

    ledger.at("quantize", name, wanted, saved)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, MODELS, AT_ONCE))
def test_random_models_are_theirs_at_every_door(first: int, tmp_path: Path) -> None:
    ledger = Ledger()
    for seed in range(first, first + AT_ONCE):
        model, name = drawn(random.Random(seed))
        place = tmp_path / str(seed)
        place.mkdir()
        through_all(model, f"seed {seed}: {name}", place, ledger)
    print(*(f"{door}: {counts}" for door, counts in ledger.counts.items()), sep="\n")
    assert not ledger.wrong, "\n".join(ledger.wrong)
