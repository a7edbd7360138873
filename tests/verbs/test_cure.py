"""The verb cure: a model in, the same function without outliers out; and what it refuses."""

import html
import json
import shlex
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
)

import wakeful
from inheritance.references import once
from verbs.test_diagnose import llama, save_tokenizer  # noqa: F401
from wakeful.cli import main
from wakeful.curing.search import Candidate, CureChoice, FormatTrial, Proof, SearchTexts
from wakeful.diagnosis.verdict import diagnosis_summary, findings
from wakeful.errors import WakefulError
from wakeful.estimates import LossChange
from wakeful.hf import as_transformers
from wakeful.hf.families.granite import SWA
from wakeful.loading.load import read_decoder
from wakeful.model.decoder import Decoder
from wakeful.probes.running import logits_of
from wakeful.quantization.schemes import Scheme
from wakeful.surgery import SinkChoice, SinkTrial, losses_after_opening, round_changed

READ = ["--length", "16", "--num_sequences", "2"]
TEXT = "The quick brown fox jumps over the lazy dog; the dog sleeps on. " * 20


@pytest.fixture
def ended(llama: Path) -> Path:  # noqa: F811
    """Give the same folder with a tokenizer that has an end of text."""
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.eos_token = "<bos>"
    tokenizer.save_pretrained(llama)
    return llama


@pytest.fixture
def words(tmp_path: Path) -> str:
    path = tmp_path / "words.txt"
    path.write_text(TEXT, "utf-8")
    return str(path)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["cure", *arguments]) == 1
    errors = capsys.readouterr().err.strip()
    assert "\n" not in errors
    return errors


@pytest.mark.slow
def test_a_rotated_model_is_a_stock_one(
    llama: Path, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:  # fmt: skip
    out, rotation = tmp_path / "cured", "haar"
    arguments = [str(llama), "--text", words, "--rotate", rotation, "--out", str(out), *READ]
    assert main(["cure", *arguments]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"wakeful evaluate {llama} {out} --text {words}" in printed
    plain, cured = (AutoModelForCausalLM.from_pretrained(folder) for folder in (llama, out))
    assert type(plain) is type(cured)
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(cured(tokens).logits, plain(tokens).logits, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(cured.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    text = "a fox"
    assert AutoTokenizer.from_pretrained(out).encode(text) == (
        AutoTokenizer.from_pretrained(llama).encode(text)
    )
    assert AutoTokenizer.from_pretrained(out).model_max_length == 64
    page = (out / "report.html").read_text("utf-8")
    assert "What was done" in page
    found = json.loads((out / "cure.json").read_text("utf-8"))
    assert found["architecture"] == "llama"
    assert "values, haar, seed 0;" in found["done"]["Rotation"]
    assert "values, haar, seed 0;" in page
    card = (out / "README.md").read_text("utf-8")
    assert f"Made from {llama.name}" in card
    assert "- Rotation: residual stream" in card
    assert "| loss, nats per token | 6." in card
    assert f"wakeful cure {llama} --text" in card
    assert "--rotate haar" in card
    again = wakeful.load(out)
    assert again.logits(tokens).shape == (2, 20, 257)


@pytest.mark.slow
def test_values_of_a_model_with_norms_after_sublayers_turn(words: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        layer_types=["sliding_attention", "full_attention"], sliding_window=8,
        initializer_range=0.3,
    )  # fmt: skip
    folder, out = tmp_path / "gemma", tmp_path / "cured"
    Gemma3ForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    read = {"text": words, "length": 16, "num_sequences": 2, "device": "cpu"}
    with pytest.raises(WakefulError, match=r"norm after a sublayer.*--rotate_values"):
        wakeful.cure(folder, rotate="hadamard", **read)
    wakeful.cure(folder, rotate_values=True, out=str(out), **read)
    plain, cured = (AutoModelForCausalLM.from_pretrained(each) for each in (folder, out))
    assert type(plain) is type(cured) is Gemma3ForCausalLM
    tokens = torch.arange(1, 41).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(cured(tokens).logits, plain(tokens).logits, atol=1e-4, rtol=1e-4)
    heads = [model.model.layers[0].self_attn.v_proj.weight for model in (plain, cured)]
    assert not torch.allclose(*heads)
    inside = wakeful.cure(folder, rotate_values=True, rotate_inner=True, rotate_keys=True, **read)
    torch.testing.assert_close(
        inside.model.logits(tokens), plain(tokens).logits, atol=1e-4, rtol=1e-4
    )


@pytest.mark.slow
def test_a_prefix_goes_along(ended: Path, words: str, tmp_path: Path) -> None:
    out = tmp_path / "cured"
    found = wakeful.cure(
        ended, rotate="haar", rotate_inner=True, prefix="bos", text=words, length=16,
        num_sequences=2, out=out,
    )  # fmt: skip
    assert found.prefix == (256,)
    assert found.stock == "wakeful"
    plain, read = wakeful.load(ended), wakeful.load(out)
    assert read.context == plain.context - 1
    tokens = torch.arange(20).view(1, 20)
    first = torch.tensor([[256]])
    with torch.no_grad():
        expected = plain.logits(torch.cat([first, tokens], 1))[:, 1:]
        torch.testing.assert_close(read.logits(tokens), expected, atol=1e-4, rtol=1e-4)
    theirs = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert theirs.config.max_position_embeddings == read.context == 63
    assert AutoTokenizer.from_pretrained(out).model_max_length == 63
    assert read_decoder(out, max_length=63).context == 63
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, expected, atol=1e-4, rtol=1e-4)
        said = theirs.generate(tokens, max_new_tokens=5, do_sample=False)
        same = plain.module.generate(
            torch.cat([first, tokens], 1), max_new_tokens=5, do_sample=False
        )
    assert said[0, 20:].tolist() == same[0, 21:].tolist()
    assert not read.adds_bos
    # What the uncured model gives BOS as text, the cured one gives it where it is stored.
    shorter, longer = (
        wakeful.diagnose(model, text=words, length=length, num_sequences=1, bos=bos).models[0]
        for model, length, bos in ((read, 16, "off"), (plain, 17, "on"))
    )
    kept = diagnosis_summary(shorter)["stored_prefix_mass"]
    assert kept == pytest.approx(
        diagnosis_summary(longer)["first_key_mass_without_row_0"], rel=1e-4
    )
    assert f"The stored prefix receives {kept:.1%}" in findings(shorter)[0].text
    assert "stored prefix" not in findings(longer)[0].text
    small = wakeful.quantize(read, "fine", text=words, length=16, num_sequences=2)
    assert small.model.context == read.context
    wakeful.evaluate(read, text=words, length=16, num_sequences=2)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"prefix": "bos"}, {"sinks": True}])
def test_bos_does_not_stand_twice(given: dict, ended: Path, words: str, tmp_path: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(ended)
    theirs.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 256)]
    )
    theirs.save_pretrained(ended)
    config = json.loads((ended / "config.json").read_text())
    (ended / "config.json").write_text(json.dumps(config | {"eos_token_id": [256, 7]}))
    (ended / "generation_config.json").unlink()
    plain, out = wakeful.load(ended), tmp_path / "cured"
    assert plain.adds_bos
    found = wakeful.cure(plain, text=words, **SHORT | given).model
    wakeful.cure(ended, text=words, out=out, **SHORT | given)
    read, again = wakeful.load(out), AutoTokenizer.from_pretrained(out)
    assert not found.adds_bos
    assert not read.adds_bos
    assert [256, *again.encode("a fox")] == plain.encode("a fox")
    assert found.bos == read.bos == again.bos_token_id == 256
    assert GenerationConfig.from_pretrained(out).eos_token_id == [256, 7]
    wrapped = wakeful.load(as_transformers(read.decoder()), tokenizer=theirs)
    assert wrapped.adds_bos == ("prefix" not in given)


@pytest.mark.slow
def test_the_result_says_what_was_found(llama: Path, words: str) -> None:  # noqa: F811
    found = wakeful.cure(llama, prefix="bos", text=words, length=16, num_sequences=2)
    assert found.prefix == (256,)
    assert found.diagnosis.models[1].name == "llama cured"
    assert found.difference.relative < 1e-5
    assert {"model", "layer", "metric", "value"} <= set(found.frame.columns)
    assert any(line.startswith("Prefix: ") for line in found.verdicts)


@pytest.mark.slow
def test_the_change_of_the_loss_comes_first(
    llama: Path, words: str, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """A cure that costs loss says so in the headline, and calls nothing healthy."""
    read = {"text": words, "length": 16, "num_sequences": 4}
    found = wakeful.cure(llama, rotate="hadamard", **read)
    plain, cured = found.before.decoder(), found.model.decoder()
    rows = torch.tensor(found.before.encode_plain(TEXT)[:64]).view(4, 16)
    before, after = (losses_after_opening(model, rows) for model in (plain, cured))
    expected = LossChange.between(before, after)
    assert vars(found.loss) == pytest.approx(vars(expected), rel=1e-4, abs=1e-7)
    assert found.summary["loss_change"]["interval"] == pytest.approx(found.loss.interval)
    assert found.done[0] == ("Loss on the text", str(found.loss))
    assert found.verdicts[0].startswith("llama cured predicts no worse: its loss changes by ")
    monkeypatch.setattr(
        "wakeful.curing.tool.loss_change", lambda *_: LossChange.between([1.0] * 3, [1.5] * 3)
    )
    worse = wakeful.cure(llama, rotate="hadamard", **read)
    assert worse.verdicts[0] == (
        "llama cured predicts worse: its loss changes by +0.500 nats per token (95% interval "
        "+0.500 to +0.500)."
    )
    assert not any("llama cured is healthy" in verdict for verdict in worse.verdicts)
    (step,) = worse.report.steps
    assert step.command == f"wakeful diagnose {llama} --text {words}"


@pytest.mark.slow
def test_auto_stores_the_token_that_costs_nothing(
    llama: Path, words: str, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    read = {"text": words, "length": 16, "num_sequences": 2}
    model = wakeful.load(llama)
    none = SinkTrial((), (3.0, 3.0))
    token = SinkTrial((7,), (3.0, 3.01), 0.01, 0.01)
    monkeypatch.setattr(
        "wakeful.curing.tool.choose_prefix",
        lambda *_, **__: SinkChoice(token, token, (none, token)),
    )
    found = wakeful.cure(model, prefix="auto", **read)
    assert found.prefix == (7,)
    assert "on the text used to choose it: +0.005 nats per token" in dict(found.done)["Prefix"]
    sunk = wakeful.cure(model, sinks=True, **read)
    assert "fitted to id 7 before the text" in dict(sunk.done)["Learned sinks"]
    costly = SinkTrial((7,), (4.0, 4.0), 0.01, 0.01)
    monkeypatch.setattr(
        "wakeful.curing.tool.choose_prefix",
        lambda *_, **__: SinkChoice(none, costly, (none, costly)),
    )
    kept = wakeful.cure(model, prefix="auto", **read)
    assert kept.prefix == ()
    assert dict(kept.done)["Prefix"].startswith("none: of all that were tried")
    assert kept.model.decoder().config.stored_prefix == 0


def test_what_a_model_forbids_is_said_before_any_work(
    llama: Path, words: str, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    stored = wakeful.cure(llama, prefix="bos", text=words, length=16, num_sequences=2).model
    monkeypatch.setattr("wakeful.curing.tool._check_predicts", None)
    monkeypatch.setattr("wakeful.curing.tool._verification_text", None)
    for options in ({"prefix": "auto"}, {"sinks": True}):
        with pytest.raises(WakefulError, match=r"stored.prefix"):
            wakeful.cure(stored, text=words, length=16, num_sequences=2, **options)


def test_the_model_given_stays(llama: Path, words: str) -> None:  # noqa: F811
    model = wakeful.load(llama)
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    wakeful.cure(model, rotate="hadamard", prefix="bos", text=words, length=16, num_sequences=2)
    assert all(torch.equal(before[n], now) for n, now in model.module.state_dict().items())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ([], "cure"),
        (["--rotate", "spiral"], "spiral"),
        (["--rotate", "eigenbasis"], "eigenbasis"),
        (["--rotate", "learned"], "learned"),
        (["--prefix", "0"], "prefix"),
        (["--prefix", "many"], "prefix"),
    ],
)
def test_bad_options(
    ended: Path,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    word: str,
) -> None:
    out = tmp_path / "cured"
    line = fails(capsys, str(ended), "--text", words, "--out", str(out), *READ, *options)
    assert word in line
    assert not out.exists()


@pytest.mark.slow
def test_a_tokenizer_without_an_end_of_text_goes_along(
    llama: Path,  # noqa: F811
    words: str,
    tmp_path: Path,
) -> None:
    out = tmp_path / "cured"
    wakeful.cure(llama, prefix="bos", text=words, length=16, num_sequences=2, out=out)
    theirs, again = (AutoTokenizer.from_pretrained(folder) for folder in (llama, out))
    assert again.eos_token is None
    assert again("a b").input_ids == theirs("a b").input_ids


def test_a_folder_that_exists(
    llama: Path,  # noqa: F811
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = fails(capsys, str(llama), "--text", words, "--prefix", "bos", "--out", str(llama))
    assert "exists" in line


@pytest.mark.slow
def test_a_quantized_model(llama: Path, words: str, tmp_path: Path) -> None:  # noqa: F811
    for scheme in ("fine", "fp8"):
        wakeful.quantize(llama, scheme, save=str(tmp_path / scheme), out=tmp_path / f"{scheme}-out")
        with pytest.raises(WakefulError, match="is quantized: cure the model it was made from"):
            wakeful.cure(tmp_path / scheme, rotate="haar", text=words, length=16, num_sequences=2)


SHORT = {"length": 16, "num_sequences": 2}


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"rotate": "hadamard"}])
def test_sinks_are_written_and_read(given: dict, ended: Path, words: str, tmp_path: Path) -> None:
    out = tmp_path / "cured"
    found = wakeful.cure(ended, text=words, out=out, sinks=True, **given, **SHORT)
    assert found.stock == ("wakeful" if SWA is None else "granite_swa")
    tokens = torch.arange(40).view(2, 20)
    theirs = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    with torch.no_grad():
        exact = deepcopy(found.model.decoder()).double()(tokens)

        def rounding(logits: torch.Tensor) -> float:
            return (logits - exact).square().mean().sqrt().item()

        expected = rounding(found.model.logits(tokens))
        for read in (wakeful.load(out).logits(tokens), theirs(tokens).logits):
            assert rounding(read) < 2 * expected  # orders of the same sums: 0.9 to 1.5
        said = theirs.generate(tokens[:1], max_new_tokens=5, do_sample=False)  # with a cache
        read = found.model.logits(said[:, :-1])[0, 19:]
    assert said[0, 20:].tolist() == read.argmax(-1).tolist()
    assert "fitted to id" in dict(found.done)["Learned sinks"]
    assert found.prefix == ()
    assert "Learned sinks" in (out / "report.html").read_text("utf-8")
    assert found.diagnosis.summary["models"][1]["loss"]


@pytest.mark.slow
def test_sinks_are_fitted_and_no_weight_is_trained(ended: Path, words: str) -> None:
    model = wakeful.load(ended)
    found = wakeful.cure(model, sinks=True, text=words, **SHORT)
    cured = dict(found.model.module.named_parameters())
    for name, weight in model.decoder().named_parameters():
        if name.endswith("weight"):
            assert torch.equal(cured[name], weight), name


@pytest.mark.slow
def test_sinks_take_the_same_way_twice_and_leave_the_model(ended: Path, words: str) -> None:
    model = wakeful.load(ended)
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    one, two = (wakeful.cure(model, sinks=True, text=words, **SHORT).model for _ in range(2))
    assert all(torch.equal(before[n], now) for n, now in model.module.state_dict().items())
    for (name, left), right in zip(
        one.module.state_dict().items(), two.module.state_dict().values(), strict=True
    ):
        assert torch.equal(left, right), name


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--sinks", "--prefix", "bos"], "prefix"),
        (["--sinks", "--dtype", "bfloat16"], "bfloat16"),
        (["--sinks", "--rotate", "eigenbasis"], "eigenbasis"),
        (["--sinks", "--num_sequences", "79"], "to verify on"),
    ],
)
def test_bad_sinks(
    ended: Path, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    options: list[str], word: str,
) -> None:  # fmt: skip
    out = tmp_path / "cured"
    command = once([str(ended), "--text", words, "--out", str(out), *READ, *options])
    assert word in fails(capsys, *command)
    assert not out.exists()


@pytest.mark.slow
def test_a_cured_model_gets_no_sinks_again(ended: Path, words: str) -> None:
    cured = wakeful.cure(ended, sinks=True, text=words, **SHORT).model
    with pytest.raises(WakefulError, match="normalizer"):
        wakeful.cure(cured, sinks=True, text=words, **SHORT)


@torch.no_grad()
def test_weights_are_rounded_to_a_type_of_the_same_width() -> None:
    plain, cured = (torch.nn.Linear(2, 2).bfloat16() for _ in range(2))
    assert round_changed(cured, plain, torch.float16)
    assert not round_changed(cured, plain, torch.float32)
    cured.weight.fill_(1e5)
    with pytest.raises(WakefulError, match="weight is too large for float16"):
        round_changed(cured, plain, torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("outlier", [False, True])
def test_a_cure_is_chosen_for_a_format(
    outlier: bool, ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is chosen is carried out, or nothing is, and either is said and written."""
    figures = ((0.2, 0.1), (0.1, 0.1), (-0.1, 0.01 if outlier else 1.0))

    def chosen(
        plain: Decoder, schemes: list[Scheme], texts: SearchTexts, **kwargs: object
    ) -> CureChoice:
        other = "w8a8" if outlier else "kv4"
        assert [str(each) for each in schemes] == [rounded, other]
        assert (kwargs["token"] is None) == bool(plain.config.stored_prefix)
        assert len(texts.search) + len(texts.proof) + len(texts.calibration) == SearchTexts.num_rows
        assert logits_of(plain, texts.search).isfinite().all()
        tried = Candidate("haar", True, True, "prefix")
        trials = [
            tuple(FormatTrial(each, scheme, (loss, 0.1)) for scheme in schemes)
            for each, loss in ((Candidate(), 0.2), (tried, 0.1))
        ]
        proofs = tuple(Proof(scheme, *figures) for scheme in schemes)
        best = tried if outlier else Candidate()
        return CureChoice(best, tuple(schemes), tuple(trials), proofs)

    def keeps(*given: Any, **more: Any) -> CureChoice:
        return replace(chosen(*given, **more), best=Candidate())

    monkeypatch.setattr("wakeful.curing.tool.choose_cure", chosen)
    path, out = tmp_path / "long.txt", tmp_path / "cured"
    path.write_text(TEXT * 12, "utf-8")
    options = ["--text", str(path), "--out", str(out), *READ]
    second, rounded = "int8" if outlier else "kv4", "nvfp4(method=gptq)"
    assert main(["cure", str(ended), "--for", "nvfp4", second, *options]) == 0
    found = json.loads((out / "cure.json").read_text("utf-8"))
    assert found["choice"]["candidates"][0] == {
        "scheme": rounded, "cure": "no cure", "damage": [0.2, 0.1]
    }  # fmt: skip
    done = found["done"]
    page = (out / "report.html").read_text("utf-8")
    assert page.index("−0.100 nats per token (95% interval") < page.index("What was done")
    assert ("not sure enough to keep" in page) == (not outlier)
    command = shlex.join(["--scheme", rounded, "w8a8" if outlier else "kv4"])
    assert f"wakeful quantize {ended} {out} {command}" in html.unescape(page)
    config = wakeful.load(out).decoder().config
    assert config.stored_prefix == config.mlp_rotation == config.qk_rotation == outlier
    if outlier:
        assert "rotate haar, rotate_inner, rotate_keys, prefix" in done["Chosen"]
        assert "values, haar, seed 0;" in done["Rotation"]
        # The token that it stores stays, and what else helps is chosen.
        monkeypatch.setattr("wakeful.curing.tool.choose_cure", keeps)
        again = wakeful.cure(
            out, for_=("nvfp4", "int8"), text=str(path), length=16, num_sequences=2
        )
        assert again.model.decoder().config.stored_prefix == 1
    else:
        assert done["Chosen"].startswith("no cure: none is surely better")
        assert "Rotation" not in done
        assert "cured ()" not in page
    card = (out / "README.md").read_text("utf-8")
    assert f"--for nvfp4 {second}" in card


def test_choosing_needs_text_enough(
    ended: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(capsys, str(ended), "--text", words, "--for", "nvfp4", *READ)
    assert "choosing a cure needs" in line
    assert "--for nvfp4 and --prefix bos" in fails(
        capsys, str(ended), "--for", "nvfp4", "--prefix", "bos"
    )
