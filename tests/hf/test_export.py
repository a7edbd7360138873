"""Exported folders: plain Transformers loads them, and they come back the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import some_tokens, tiny_decoder
from hf.models import VARIANTS
from wakeful.cli import main
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.families.base import canonical_config
from wakeful.hf.families.granite import SWA
from wakeful.hf.weights_out import export_decoder
from wakeful.loading.load import load, read_decoder
from wakeful.model.decoder import Decoder
from wakeful.model.fold import folded_config
from wakeful.model.generate import generate_tokens
from wakeful.terminal.plain_text import escape_controls

PLAIN = {"num_kv_heads": 0, "head_width": 0}
GPT2 = PLAIN | {"norm": "layernorm", "mlp": "gelu", "positions": "learned", "bias": True}
OLMO2 = PLAIN | {"placement": "reordered", "qk_norm": True, "qk_norm_whole": True}
GEMMA = {"placement": "peri", "mlp": "geglu", "embedding": "scaled"}
STOCK = {
    "llama": {},
    "llama, tied": {"tied": True, "bias": True, "rope": "linear(factor=2)"},
    "llama, no heads of grouped": PLAIN,
    "gpt2": GPT2 | {"tied": True},
    "gpt2, by layer": GPT2 | {"mlp": "gelu_exact", "scale_logits_by_layer": True},
    "qwen2": {"attention_bias": "qkv"},
    "qwen2, heads that do not divide": {"width": 18, "attention_bias": "qkv"},
    "qwen3": {"qk_norm": True, "rope": "llama3(factor=4.0, original_length=12)"},
    "smollm3": {"local_layers": (1, 3), "rope": "llama3(factor=4.0, original_length=12)"},
    "smollm3, tied": {"local_layers": (0,), "tied": True, "bias": True},
    "olmo2": OLMO2 | {"num_kv_heads": 2, "rope": "linear(factor=2)"},
    "olmo2, tied": OLMO2 | {"tied": True, "attention_bias": "all"},
    "gemma2": GEMMA | {"normalizer": "softcap(cap=2.0)", "logit_cap": 3.0, "query_scalar": 5},
    "gemma2, tied, no caps": GEMMA | {"tied": True, "attention_bias": "all"},
    "gemma3_text": GEMMA | {
        "qk_norm": True, "local_layers": (0, 1, 3), "local_theta": 50.0, "rope": "linear(factor=2)",
    },
    "gemma3_text, tied": GEMMA | {"qk_norm": True, "tied": True, "local_layers": (),},
    "mistral": {"local_layers": (0, 1, 2, 3), "local_theta": 10_000.0, "window": 5},
    "qwen3, window": {
        "qk_norm": True, "local_layers": (1, 2), "local_theta": 10_000.0, "window": 5,
    },
    "llama, local layers as all others": {"local_layers": (1, 2), "local_theta": 10_000.0},
    "phi3": {"rotary_width": 2, "head_width": 0},
    "phi3, tied": PLAIN | {"rotary_width": 2, "tied": True},
    "granite": {"embedding": "scaled", "query_scalar": 5},
    "granite_swa": {"normalizer": "softmax1", "tied": True, "norm": "layernorm_scaling"},
    "granite_swa, a constant": {"normalizer": "softmax1(start=-1.5)", "bias": True},
    "granite_swa, learned": {
        "normalizer": "softmax1(learned=True, start=0.5)", "attention_bias": "all",
        "local_layers": (1, 2), "local_theta": 100.0, "window": 5, "embedding": "scaled",
    },
    "gpt_neox": PLAIN | {
        "norm": "layernorm", "mlp": "gelu_exact", "bias": True, "rotary_width": 2,
        "parallel": True,
    },
}  # fmt: skip
if SWA is None:
    STOCK = {name: changes for name, changes in STOCK.items() if "granite_swa" not in name}
OWN = {name: VARIANTS[name] for name in ("learned sink", "no positions", "odd parts")} | {
    "norms of queries over all heads": {"qk_norm": True, "qk_norm_whole": True},
    "norms after": {"placement": "reordered", "depth": "denseformer"},
    "scaled embeddings and caps": {
        "embedding": "scaled",
        "logit_cap": 3.0,
        "normalizer": "softcap(cap=2.0)",
        "query_scalar": 5,
        "mlp": "geglu",
    },
    "a Llama with some windows": {
        "local_layers": (1, 2),
        "local_theta": 10_000.0,
        "window": 5,
    },
    "local positions": {"local_layers": (1, 2), "local_theta": 100.0},
    "a Llama scaled by layer": {"scale_logits_by_layer": True},
    "a GPT-2 with grouped heads": GPT2 | {"num_kv_heads": 2},
    "nested": {
        "route": 'then(svformer(anchors=[0, 2]), on_layers([2], resformer(mode="learnable")))',
        "normalizer": "softmax1(learned=True)",
    },
    "a part of every kind": {
        "route": "then(value_embedding, output_gate)",
        "depth": "mudd",
        "normalizer": "softpick",
        "norm": "layernorm_scaling",
        "placement": "peri",
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["def f(x):\n    return x + 1\n"] * 5, 270)


def of_qwen(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer as Transformers makes one of any vocabulary beside a Qwen2."""
    table = json.loads(tokenizer.inner.to_str())
    vocabulary, merges = table["model"]["vocab"], map(tuple, table["model"]["merges"])
    theirs = transformers.Qwen2Tokenizer(vocabulary, [*merges])
    return Tokenizer(theirs.backend_tokenizer, end_of_text="<|endoftext|>")


def decoder_of(**options: object) -> Decoder:
    return tiny_decoder(dtype=torch.float32, vocab_size=270, **options).eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", STOCK)
@torch.no_grad()
def test_what_is_stock_goes_out_as_stock(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    decoder = decoder_of(**STOCK[name])
    known = of_qwen(tokenizer) if name.startswith("qwen2") else tokenizer
    kind = export_decoder(decoder, tmp_path / "out", tokenizer=known)
    assert kind == name.split(",", maxsplit=1)[0]
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True,
        attn_implementation="eager" if kind == "gemma2" else None,  # SDPA once knew no cap
    )  # fmt: skip
    assert not any(report.values())
    assert type(theirs).__module__.startswith("transformers.models.")
    assert theirs.config.architectures == [type(theirs).__name__]
    tokens = some_tokens(2, 9)
    torch.testing.assert_close(theirs(tokens).logits, decoder(tokens), rtol=0, atol=3e-5)
    again = read_decoder(tmp_path / "out")
    # A Gemma's norms are stored less one: a weight below a half comes back rounded.
    rounded = 1e-5 if kind.startswith("gemma") else 0.0
    torch.testing.assert_close(again.decoder()(tokens), decoder(tokens), rtol=0, atol=rounded)
    assert canonical_config(again.decoder().config) == canonical_config(
        folded_config(decoder.config)
    )


def test_no_architecture_is_chosen_beside_which_transformers_reads_another_tokenizer(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Beside a Qwen2 it cuts text as Qwen2's tokenizer does, whatever the files say."""
    decoder = decoder_of(attention_bias="qkv")
    assert export_decoder(decoder, tmp_path / "out", tokenizer=tokenizer) == "wakeful"
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "e\u0301 12345  x\n\n\t y"
    assert theirs(text).input_ids == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
@torch.no_grad()
def test_the_rest_goes_out_as_our_own(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    decoder = decoder_of(**OWN[name])
    assert export_decoder(decoder, tmp_path / "out", tokenizer=tokenizer) == "wakeful"
    ours, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    tokens = some_tokens(2, 9)
    assert torch.equal(ours(tokens).logits, decoder(tokens))
    again = read_decoder(tmp_path / "out")
    assert torch.equal(again.decoder()(tokens), decoder(tokens))
    assert again.decoder().config == decoder.config
    loaded = load(str(tmp_path / "out"), device=torch.device("cpu"), dtype=torch.float32)
    assert isinstance(loaded.module, Decoder)


@pytest.mark.slow
def test_the_tokenizer_goes_along(tokenizer: Tokenizer, tmp_path: Path) -> None:
    decoder = decoder_of()
    export_decoder(decoder, tmp_path / "out", tokenizer=tokenizer, dtype=torch.bfloat16)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "def f(x): return <|endoftext|> é\n"
    assert theirs(text, split_special_tokens=True).input_ids == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.end_of_text
    assert theirs.model_max_length == 24
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == tokenizer.end_of_text
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    # From one folder to the next: files and ids go along.
    (tmp_path / "out" / "chat_template.jinja").write_text("{{ messages }}")
    first = read_decoder(tmp_path / "out")
    export_decoder(
        first.decoder(), tmp_path / "next", tokenizer=first.wakeful_tokenizer, shard="20KB"
    )
    assert (tmp_path / "next" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert AutoTokenizer.from_pretrained(tmp_path / "next").eos_token_id == theirs.eos_token_id
    assert len(list((tmp_path / "next").glob("model-*.safetensors"))) > 2
    tokens = some_tokens(1, 9)
    second = read_decoder(tmp_path / "next")
    assert torch.equal(second.decoder()(tokens), first.decoder()(tokens))
    assert second.wakeful_tokenizer.same_tokens(tokenizer)
    assert second.encode(text) == tokenizer.encode(text)


ALONE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("wakeful", "jaxtyping", "polars", "tyro"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoModel, AutoModelForCausalLM

for folder in sys.argv[1:]:
    tokens, wanted = torch.load(folder + "/wanted.pt")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    assert torch.equal(model(tokens).logits, wanted)
    plain = model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)
    slow = model.generate(
        tokens, max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=False
    )
    assert torch.equal(plain, slow)
    base = AutoModel.from_pretrained(folder, trust_remote_code=True)
    logits = model.lm_head(base(tokens).last_hidden_state)
    assert torch.equal(model.model.decoder.capped(logits), wanted)
    model(tokens, labels=tokens).loss.backward()
    model.save_pretrained(folder + "-again")
    again = AutoModelForCausalLM.from_pretrained(folder + "-again", trust_remote_code=True)
    assert torch.equal(again(tokens).logits, wanted)
assert "wakeful" not in sys.modules
print("as exported")
"""


@pytest.mark.slow
def test_the_code_beside_the_weights_needs_no_wakeful(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folders = []
    for name in (
        "nested", "odd parts", "learned sink", "a part of every kind", "norms after",
        "scaled embeddings and caps", "a Llama with some windows",
    ):  # fmt: skip
        folder = tmp_path / name.replace(" ", "_")
        decoder = decoder_of(**OWN[name])
        export_decoder(decoder, folder, tokenizer=tokenizer)
        tokens = some_tokens(2, 9)
        with torch.no_grad():
            torch.save((tokens, decoder(tokens)), folder / "wanted.pt")
        folders.append(str(folder))
        code = {path.name for path in folder.glob("*.py")}
        assert ("wakeful__routes__sharing.py" in code) == (name == "nested")
        assert "wakeful__routes__references.py" not in code
        table = json.loads((folder / "config.json").read_text())
        assert table["auto_map"]["AutoModelForCausalLM"] == "modeling_wakeful.WakefulForCausalLM"
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", ALONE, *folders],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "as exported", done.stderr


def test_nothing_is_overwritten_or_left_half_written(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_of()
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("mine")
    for name in ("there", "file"):
        with pytest.raises(WakefulError, match=f"{name} exists already"):
            export_decoder(decoder, tmp_path / name, tokenizer=tokenizer)
    with pytest.raises(WakefulError, match="cannot be written: Not a directory"):
        export_decoder(decoder, tmp_path / "file" / "out", tokenizer=tokenizer)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("wakeful.hf.weights_out.save_tensors", full)
    with pytest.raises(WakefulError, match="the disk is full"):
        export_decoder(decoder, tmp_path / "out", tokenizer=tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
def test_the_command_line(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    export_decoder(decoder_of(route="svformer"), first, tokenizer=tokenizer)
    assert main(["export", first, second, "--dtype", "float16"]) == 0
    assert "trust_remote_code=True" in capsys.readouterr().out
    assert read_decoder(second, dtype=torch.float16).decoder().config.route == "svformer"
    assert load_file(Path(second) / "model.safetensors")["lm_head.weight"].dtype == torch.float16
    for arguments, words in (
        ([first, second], "exists already"),
        ([first], "name a model to export and a folder or a file NAME.gguf"),
        ([first, str(tmp_path / "x"), "--step", "3"], "step = 3"),
        ([str(tmp_path), str(tmp_path / "x")], "has no config.json"),
    ):
        assert main(["export", *arguments]) == 1
        assert words in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_the_command_line_continues_a_prompt_with_what_was_exported(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder = decoder_of(route="svformer")
    export_decoder(decoder, tmp_path / "out", tokenizer=tokenizer)
    capsys.readouterr()
    arguments = ["generate", str(tmp_path / "out"), "--prompt", "ab", "--num_tokens", "6"]
    assert main([*arguments, "--temperature", "0", "--device", "cpu"]) == 0
    ids = tokenizer.encode("ab")
    expected = generate_tokens(
        decoder, ids, num_tokens=6, temperature=0, stop={tokenizer.end_of_text}
    )
    text = escape_controls(tokenizer.decode(list(expected)), keep="\n\t")
    assert capsys.readouterr().out == f"ab{text}\n"
    assert main([*arguments, "--step", "3"]) == 1
    assert "step = 3" in capsys.readouterr().err
    # A folder that holds no model is named as what it should be.
    (tmp_path / "empty").mkdir()
    assert main(["generate", str(tmp_path / "empty"), "--prompt", "x"]) == 1
    assert "has no run.json" in capsys.readouterr().err


def test_an_export_keeps_what_lies_beside_a_tokenizer(tmp_path: Path) -> None:
    inner = Tokenizer.train(["a b c"], 257).inner
    inner.add_special_tokens(["<bos>", "<pad>"])
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|endoftext|>", bos_token="<bos>", pad_token="<pad>",
        chat_template="{{ messages[0]['content'] }}!",
    )  # fmt: skip
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "generation_config.json").write_text('{"max_new_tokens": 7}')
    Tokenizer.load(tmp_path / "theirs").save(tmp_path / "run")  # as an heir's run does
    export_decoder(
        tiny_decoder(dtype=torch.float32, vocab_size=259), tmp_path / "out",
        tokenizer=Tokenizer.load(tmp_path / "run"),
    )  # fmt: skip
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    said = again.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert (again.bos_token, again.pad_token, said) == ("<bos>", "<pad>", "a!")
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    found = (generation.max_new_tokens, generation.bos_token_id, generation.pad_token_id)
    assert found == (7, theirs.bos_token_id, theirs.pad_token_id)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("parts", [{"norm": "layernorm_scaling"}, {"embedding": "projected"}])
def test_what_could_fold_stays_beside_a_part_of_ours(parts: dict[str, str], tmp_path: Path) -> None:
    decoder = tiny_decoder(dtype=torch.float32, vocab_size=270, **parts, route="resformer")
    tokenizer = Tokenizer.train(["def f(x):\n    return x + 1\n"] * 5, 270)
    assert export_decoder(decoder, tmp_path / "out", tokenizer=tokenizer) == "wakeful"
    again = read_decoder(tmp_path / "out").decoder()
    assert again.config == decoder.config
    tokens = some_tokens(2, 9)
    assert torch.equal(again(tokens), decoder(tokens))
