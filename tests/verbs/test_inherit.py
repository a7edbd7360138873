"""The verb inherit: what it writes, what it refuses, and its page."""

import contextlib
import copy
import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from inheritance.references import SMALL, once, reference, text, trained
from test_cli import fails as command_fails
from training.runs import tiny
from wakeful.cli import main as run_command
from wakeful.config.keywords import options_from
from wakeful.config.schema import TrainConfig
from wakeful.config.tables import to_table
from wakeful.data.mixture import mixture_of
from wakeful.data.preparing import load_data, prepare_data
from wakeful.data.tokens import PreparedData, is_prepared
from wakeful.errors import WakefulError
from wakeful.estimates import mean_paired_difference
from wakeful.inheritance.bridge import find_gaps
from wakeful.inheritance.layers import LayerMap
from wakeful.inheritance.options import InheritOptions
from wakeful.inheritance.outcome import read_inheritance
from wakeful.inheritance.recipe import read_recipe
from wakeful.inheritance.report import inheritance_report, parity_sentence
from wakeful.inheritance.solving import spread_windows
from wakeful.inheritance.stream import TextStream
from wakeful.inheritance.tool import inherit
from wakeful.layer_ranges import format_layers
from wakeful.loading.load import read_decoder
from wakeful.model.decoder import Decoder
from wakeful.quantization.tool import quantize
from wakeful.reports.html import write_page
from wakeful.runs import checkpoint
from wakeful.runs.distributed import World
from wakeful.runs.run import Run, read_windows
from wakeful.training.loop import train_run
from wakeful.training.validation import mean_loss

__all__ = ["reference", "text", "trained"]


def main(arguments: list[str]) -> int:
    """Run a command; an option that is repeated counts as it was given last."""
    return run_command(once(arguments))


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return command_fails(capsys, *once(arguments))


@pytest.fixture
def command(reference: Run, text: Path, tmp_path: Path) -> list[str]:
    """Give the beginning of a command that takes seconds; its output goes to `out`."""
    return ["inherit", str(reference.path), "--text", str(text), "--out", str(tmp_path / "out"),
            "--steps", "4", *SMALL]  # fmt: skip


@pytest.fixture(scope="module")
def done(trained: tuple[Path, Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of an inheritance with everything in it."""
    text, run = trained
    out = tmp_path_factory.mktemp("inherit") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WAKEFUL_CACHE", str(text.parent / "cache"))
        assert main(
            ["inherit", str(run.path), "--text", str(text), "--out", str(out), "--steps", "4",
             "--keep", "0.5", "--grow", "1", "--rounds", "2", "--until",
             "budget", "--eval_every", "2", "--baseline", "random", "reference", "--route",
             'resformer(mode="learnable")', *SMALL]
        ) == 0  # fmt: skip
    return out


def test_it_leaves_ordinary_runs_and_one_page(done: Path, reference: Run, text: Path) -> None:
    assert Run.open(done).header.status == "done"
    fingerprint = read_decoder(reference.path, dtype="auto").tokenizer.fingerprint
    names = ["heir-2", "heir-3", "random", "reference"]
    for name in names:
        run = Run.open(done / name)
        assert run.header.status == "done"
        assert run.config.model.route == 'resformer(mode="learnable")'
        assert read_decoder(run.path, dtype="auto").tokenizer.fingerprint == fingerprint
    summary = json.loads((done / "summary.json").read_text())
    assert [arm["arm"] for arm in summary["arms"]] == names
    assert summary["final"] == "heir-3"
    assert summary["departures"] == []
    assert summary["reference"]["tokens"] == 40 * 4 * 16
    frame = pl.read_parquet(done / "reference.parquet")
    assert summary["reference"]["loss"] == pytest.approx(mean_loss(frame)[0])
    first = summary["recipe"]
    assert (first["rule"], first["layers"]) == ("angle", [0, 3])
    assert summary["arms"][1]["layers"] == sorted(first["order"][:3])
    heir, whole = summary["arms"][1], summary["reference"]
    decoder = read_decoder(done / "heir-3", dtype="auto").decoder()
    assert heir["parameters"] == decoder.num_parameters()["total"]
    assert heir["cache_bytes_per_token"] == 3 / 4 * whole["cache_bytes_per_token"]
    page = (done / "report.html").read_text()
    assert "<dt>BOS</dt><dd>none before a window" in page
    assert len(re.findall('class="spec"', page)) == 1
    for words in (
        "heir-3",
        "the same shape at random",
        "parity",
        "over which the stream turns least",
    ):
        assert words in page, words


def test_the_paired_differences_are_those_of_the_windows(done: Path) -> None:
    summary = json.loads((done / "summary.json").read_text())
    for arm in summary["arms"]:
        ours = pl.read_parquet(done / arm["runs"][-1] / "validation.parquet")
        theirs = pl.read_parquet(done / "reference.parquet")
        assert ours["tokens"].to_list() == theirs["tokens"].to_list()
        gap = mean_loss(ours)[0] - mean_loss(theirs)[0]
        assert arm["minus_reference"] == pytest.approx(gap)
        assert arm["loss"] == pytest.approx(mean_loss(ours)[0])
        assert arm["parity"] == (gap <= 0)


def test_its_runs_serve_every_other_verb(
    done: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heir, random = str(done / "heir-2"), str(done / "random")
    assert main(["generate", heir, "--prompt", "def ", "--num_tokens", "3"]) == 0
    page = tmp_path / "both.html"
    assert main(["report", heir, random, "--out", str(page)]) == 0
    assert "heir-2" in page.read_text()
    assert main(["diagnose", heir, "--text", str(text), "--length", "16", "--num_sequences", "2",
                 "--out", str(tmp_path / "diagnosis")]) == 0  # fmt: skip
    again = tmp_path / "again"
    assert main(["inherit", heir, "--text", str(text), "--layers", "1", "--steps", "2",
                 "--out", str(again), *SMALL]) == 0  # fmt: skip
    assert Run.open(again / "heir-1").config.model.num_layers == 1
    capsys.readouterr()
    assert main(["report", str(done), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert "leave out --title" in fails(capsys, "report", str(done), "--title", "x")


def test_as_one_model_it_is_none_and_what_is_in_it_is_named(
    done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = fails(capsys, "generate", str(done), "--prompt", "a")
    assert f"is an inheritance; name one of its runs: {done}/heir-2, {done}/heir-3" in message


def test_all_layers_and_no_training_to_speak_of_is_the_reference(
    command: list[str], reference: Run, tmp_path: Path
) -> None:
    assert main([*command, "--layers", "4", "--steps", "1", "--lr", "0"]) == 0
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    (heir,) = summary["arms"]
    assert heir["start_loss"] == summary["reference"]["loss"] == heir["loss"]
    assert heir["parity"] is True
    assert "parity is reached" in parity_sentence(read_inheritance(tmp_path / "out")[0])


def test_more_layers_than_the_reference_has_are_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = fails(capsys, *command, "--layers", "5", "--choose", "first")
    assert "layers = 5 is more than the reference's 4" in said
    assert not (tmp_path / "out").exists()


def test_an_heir_is_bridged_and_learns_from_its_reference_by_default(
    command: list[str], reference: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--baseline", "random"]) == 0
    out = tmp_path / "out"
    heir, random = Run.open(out / "heir-2"), Run.open(out / "random")
    assert heir.config.train.distill.teacher == str(reference.path)
    assert heir.config.train.distill.alpha == 0
    assert random.config.train.distill.teacher == ""
    summary = read_inheritance(out)[0]
    (one,) = summary.bridges
    assert summary.recipe.rule == "angle"
    assert (one.after, one.first, one.last) == (0, 1, 2)
    assert one.error < one.plain
    page = (out / "report.html").read_text()
    assert "Layers 1–2 are bridged by the layer before them" in page
    assert "heirs learn from the reference" in page
    # Its export's card says where it comes from and what it reached.
    assert main(["export", str(heir.path), str(tmp_path / "model"), "--dtype", "bfloat16"]) == 0
    card = (tmp_path / "model/README.md").read_text()
    facts = yaml.safe_load(card.split("---\n")[1])
    assert facts["library_name"] == "transformers"
    assert "base_model" not in facts  # the reference is a folder here
    for words in (
        f"Started from {reference.path}, its layers 0, 3",
        "Layers 1–2 are bridged by the layer before them, in closed form",
        f"Trained on {reference.path}'s predictions: KL(teacher ‖ student).",
        f"wakeful export {heir.path} {tmp_path / 'model'} --dtype bfloat16",
        str(summary.data.corpus_sha256),
    ):  # fmt: skip
        assert words in card, words
    # The same layers without a bridge start from the reference's own matrix.
    plain = [
        *command,
        "--out",
        str(tmp_path / "plain"),
        "--bridge.map",
        "none",
        "--heal.by",
        "text",
    ]
    assert main(plain) == 0
    without = read_inheritance(tmp_path / "plain")[0]
    assert without.bridges == ()
    assert without.heir.layers == summary.heir.layers
    assert without.heir.start_loss != summary.heir.start_loss
    assert Run.open(tmp_path / "plain/heir-2").config.train.distill.teacher == ""
    assert "heirs learn from the text alone" in (tmp_path / "plain/report.html").read_text()


def card_of(run: Path, folder: Path) -> str:
    assert main(["export", str(run), str(folder)]) == 0
    return (folder / "README.md").read_text("utf-8")


def test_a_card_and_a_page_say_all_that_an_heir_went_through(
    command: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    given = ["--layers", "2", "--heal.alpha", "0.25", "--baseline", "random"]  # fmt: skip
    assert main([*command, *given]) == 0
    summary = read_inheritance(out)[0]
    heir = summary.heir
    # Bridges stand over every gap of the heir.
    found = [(one.after, one.first, one.last) for one in summary.bridges]
    layers = LayerMap(heir.layers, "angle")
    assert found == [(gap.after, gap.first, gap.last) for gap in find_gaps(layers, 4)]
    (run,) = heir.runs
    card = card_of(out / run, tmp_path / run)
    page = (out / "report.html").read_text("utf-8")
    taught = "0.25 CE + 0.75 · KL({})"
    bridged = f"Layers {format_layers(range(found[0][1], found[0][2] + 1))} are bridged by"
    for words in (bridged, taught.format("teacher ‖ student")):
        assert words in card, words
    for words in (bridged, taught.format("reference ‖ heir")):
        assert words in page, words
    assert heir.tokens == 512
    random = card_of(out / "random", tmp_path / "random")
    assert "The baseline random beside the heirs of" in random
    assert "Trained on text by cross-entropy." in random
    assert "Started from" not in random


def test_what_growth_until_parity_costs_is_said(
    command: list[str], done: Path, tmp_path: Path
) -> None:
    summary = read_inheritance(done)[0]
    assert summary.heir.tokens == 512
    assert "after 512 tokens (1,024 in 8 steps over all 2 rounds of growth)" in parity_sentence(
        summary
    )
    out = tmp_path / "out"
    growing = ["--layers", "2", "--grow", "1", "--until", "budget"]
    assert main([*command, *growing, "--heal.temperature", "2"]) == 0
    card = card_of(out / "heir-4", tmp_path / "card")
    assert "predictions: 4 · KL(teacher ‖ student) at temperature 2." in card
    verdict = parity_sentence(read_inheritance(out)[0])
    assert "after 512 tokens (1,536 in 12 steps over all 3 rounds of growth)" in verdict


def test_a_reference_in_memory_teaches_before_it_is_written(
    reference: Run, text: Path, tmp_path: Path
) -> None:
    model = read_decoder(reference.path)
    found = inherit(
        model.decoder(), tokenizer=model.wakeful_tokenizer, text=str(text),
        out=str(tmp_path / "out"), steps=7, length=16, batch_size=4, validation_fraction=0.02,
        device="cpu",
    )  # fmt: skip
    teacher = Run.open(found.path / "heir-2").config.train.distill.teacher
    assert teacher == str(tmp_path / "out/exported-reference")


def test_a_mixture_heals_an_heir_on_text_and_on_prepared_data(
    command: list[str], reference: Run, text: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    own, out = tmp_path / "own", tmp_path / "out"
    text = Path(shutil.copytree(text, tmp_path / "text"))  # what follows changes it
    other_text = tmp_path / "other-text"
    other_text.mkdir()
    for number in range(60):
        (other_text / f"{number:02d}.txt").write_text(f"{number} " * 20)
    tokenizer = str(reference.path / "tokenizer.json")
    assert main(
        ["prepare", str(other_text), "--out", str(own), "--tokenizer", tokenizer,
         "--validation_fraction", "0.2"]
    ) == 0  # fmt: skip
    source = f'mixture(parts=[("text", "{text}", 3), ("own", "{own}", 1)])'
    mixed = [*command, "--text", source, "--baseline", "random", "--bridge.tokens", "320"]
    assert main(mixed) == 0
    recipe = read_recipe(out)
    domains = mixture_of(recipe.data.source)
    assert domains is not None
    assert [(each.name, each.weight) for each in domains] == [("text", 3), ("own", 1)]
    assert [is_prepared(Path(each.source)) for each in domains] == [True, True]
    assert domains[1].source == str(own)
    # The closed forms read each part by its share: of twenty rows fifteen and five.
    data = load_data(recipe.data)
    rows = spread_windows(data, 20, 16, recipe.data)
    firsts = [PreparedData.open(each.source).train.tokens[:16].tolist() for each in domains]
    assert all(first in rows.tolist() for first in firsts)
    assert rows.tolist().index(firsts[1]) == 2
    summary = read_inheritance(out)[0]
    windows = read_windows(out / "reference.parquet")
    heir = read_windows(out / "heir-2" / "validation.parquet")
    assert windows["domain"].to_list() == heir["domain"].to_list()
    for place, part in enumerate(("text", "own")):
        ours, theirs = (each.filter(pl.col("domain") == part) for each in (heir, windows))
        found, usual = summary.heir.parts[place], summary.reference.parts[place]
        assert (found.part, usual.part) == (part, part)
        assert (found.loss, found.standard_error) == mean_loss(ours)
        assert (usual.loss, usual.standard_error) == mean_loss(theirs)
        gap = mean_paired_difference(ours["loss"], theirs["loss"], ours["tokens"])
        assert (found.minus_reference, found.minus_reference_error) == gap
        assert usual.minus_reference == 0
    page = (out / "report.html").read_text()
    assert "Loss by part" in page
    assert "a mixture of text (0.75), own (0.25)" in page
    # It goes on, with the same tokens, though the cache no longer knows the text by that name.
    shutil.rmtree(out / "random")
    Run(out).set_status("stopped")
    folder = Path(domains[0].source)
    assert main(["inherit", "--resume", str(out)]) == 0
    assert read_inheritance(out)[0].arms[1].loss == summary.arms[1].loss
    (text / "000.txt").touch()  # another text by its date, and what was prepared is gone
    shutil.rmtree(folder)
    Run(out).set_status("stopped")
    assert "was started on different text" in fails(capsys, "inherit", "--resume", str(out))
    other = tmp_path / "other"
    prepare_data(str(text), tokenizer=None, vocab_size=290, cache_dir=other)
    (folder,) = (other / "data").iterdir()
    wrong = source.replace(str(own), str(folder))
    assert "with another tokenizer than the rest of the mixture" in fails(
        capsys, *command, "--text", wrong, "--out", str(tmp_path / "b")
    )
    assert not (tmp_path / "b").exists()


def test_matrices_are_solved_within_documents_where_training_stays_in_them(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor | None] = []
    real = TextStream.__init__

    def see(
        self: TextStream, decoder: Decoder, tokens: torch.Tensor, documents=None, *rest: Any
    ) -> None:
        seen.append(documents)
        assert documents is None or documents.shape == tokens.shape
        assert isinstance(rest[0], torch.autocast)
        assert rest[0].fast_dtype == torch.bfloat16
        real(self, decoder, tokens, documents, *rest)

    monkeypatch.setattr(TextStream, "__init__", see)
    wishes = ["--steps", "1", "--bridge.map", "output",
              "--data.no_cross_documents", "--dtype", "bfloat16"]  # fmt: skip
    assert main([*command, *wishes]) == 0
    assert len(seen) == 2
    assert all(documents is not None for documents in seen)


def test_an_optimizer_of_another_package_heals_or_is_refused_before_there_is_a_folder(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = [*command, "--layers", "1", "--optimizer.name"]
    assert "before of its state is of the type deque" in fails(
        capsys, *odd, "training.odd_optimizers:Queued"
    )
    assert "evaluates other weights than it trains" in fails(
        capsys, *odd, "training.odd_optimizers:Averaged"
    )
    assert not (tmp_path / "out").exists()
    assert main([*odd, "torch.optim:SGD(momentum=0.9)"]) == 0
    heir = Run.open(tmp_path / "out" / "heir-1")
    state = load_file(checkpoint.newest_checkpoint(heir.checkpoints) / "optimizer.safetensors")
    assert "state.0.momentum_buffer" in state


def test_it_goes_on_where_it_was_stopped(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--baseline", "random"]) == 0
    out = tmp_path / "out"
    whole = json.loads((out / "summary.json").read_text())
    shutil.rmtree(out / "random")
    for name in ("summary.json", "report.html"):
        (out / name).unlink()
    Run(out).set_status("stopped")
    assert main(["inherit", "--resume", str(out), "--figures", "svg"]) == 0
    assert (out / "figures" / "validation-loss-over-training-steps.svg").is_file()
    again = json.loads((out / "summary.json").read_text())
    for one, other in zip(whole["arms"], again["arms"], strict=True):
        assert one["loss"] == other["loss"]
        assert [point["loss"] for point in one["curve"]] == [p["loss"] for p in other["curve"]]
    assert Run.open(out).header.status == "done"
    capsys.readouterr()
    assert "no other option" in fails(capsys, "inherit", "--resume", str(out), "--layers", "3")
    assert "exists already" in fails(capsys, *command)
    wrong = fails(capsys, "inherit", "--resume", str(out / "random"))
    assert "is not an inheritance: run.json calls it 'train'" in wrong


@pytest.mark.parametrize("named", ["text", "text/*.txt", "mixture(parts=[('a', 'text', 1.0), "
                                   "('b', 'text/0*.txt', 2.0)])"])  # fmt: skip
def test_it_goes_on_from_another_folder(
    named: str, reference: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(text, tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ref").symlink_to(reference.path)
    assert (
        main(
            [
                "inherit",
                "ref",
                "--text",
                named,
                "--out",
                "out",
                "--steps",
                "4",
                "--layers",
                "1",
                "--baseline",
                "random",
                *SMALL,
            ]
        )
        == 0
    )
    whole = (tmp_path / "out" / "summary.json").read_text()
    shutil.rmtree(tmp_path / "out" / "random")
    shutil.rmtree(tmp_path / "out" / "heir-1")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["inherit", "--resume", "../out"]) == 0
    again, before = (
        json.loads(one) for one in ((tmp_path / "out/summary.json").read_text(), whole)
    )
    for new, old in zip(again["arms"], before["arms"], strict=True):
        assert new["loss"] == old["loss"]
    assert [*Path().iterdir()] == []


def test_bad_input_is_one_line_and_changes_nothing(
    command: list[str], reference: Run, text: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def refused(*options: str) -> str:
        message = fails(capsys, *command, *options)
        assert not (tmp_path / "out").exists()
        return message

    assert "layers = 5 is more than the reference's 4" in refused("--layers", "5")
    assert "wants layer 7" in refused("--blocks", "0", "7")
    assert "both say which layers" in refused("--layers", "2", "--keep", "0.5")
    assert "has all 4 layers of the reference" in refused("--layers", "4", "--grow", "2")
    assert "all 4 of the reference before round 3" in refused("--layers", "2", "--grow", "2",
                                                              "--rounds", "3")  # fmt: skip
    assert "have no order to grow in" in refused("--blocks", "0", "2", "--grow", "1")
    assert "--until budget needs --grow: it is for growing" in refused("--until", "budget")
    assert 'Invalid value "rand" for --baseline' in refused("--baseline", "rand")
    assert "unknown route 'resformers'" in refused("--route", "resformers")
    assert "heal.alpha must be in [0, 1], got 2.0" in refused("--heal.alpha", "2")
    assert "heal.temperature must be in (0, inf), got 0" in refused("--heal.temperature", "0")
    assert "optimizer.lr specified multiple" in refused("--lr", "0.2", "--optimizer.lr", "0.3")
    assert "Unknown option: --train.distill.alpha" in refused("--train.distill.alpha", "2")
    assert "adamm" in refused("--optimizer.name", "adamm")
    assert "longer than the model's context" in refused("--length", "999")
    assert "no such" in refused("--text", str(tmp_path / "nothing")).lower()
    assert "--blocks 0 and --choose first" in refused("--blocks", "0", "--choose", "first")
    assert "name one reference" in fails(capsys, "inherit", "--layers", "2")
    nowhere = fails(capsys, "inherit", str(tmp_path / "none"), *command[2:])
    assert "not a folder, GGUF file or run directory" in nowhere
    comparison = tmp_path / "comparison"
    Run(comparison).make("compare", {})
    assert "comparison" in fails(capsys, "inherit", str(comparison), *command[2:])
    assert not (tmp_path / "out").exists()


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Give a Transformers folder with a random Llama in several shards and a tokenizer of bytes."""
    folder = tmp_path / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="8KB")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<end>"])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(folder)
    return folder


def test_a_transformers_folder_is_inherited_from(
    command: list[str], llama: Path, tmp_path: Path
) -> None:
    from_llama = ["inherit", str(llama), *command[2:], "--layers", "2"]
    assert main([*from_llama, "--steps", "2", "--baseline", "random", "reference"]) == 0
    heir = Run.open(tmp_path / "out/heir-2")
    # Its embedding has more rows than its tokenizer has tokens, and keeps them.
    assert heir.config.model.vocab_size == 260
    assert read_decoder(heir.path, dtype="auto").tokenizer.vocab_size == 257
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["reference"]["tokens"] is None
    assert "is not known" in (tmp_path / "out/report.html").read_text()


def test_inheritune_is_one_word(command: list[str], tmp_path: Path) -> None:
    """The first half of the layers as they are, trained on the text, two more a round until parity;
    every other option keeps its meaning, and the last word is the user's.
    """
    assert main([*command, "--recipe", "inheritune", "--steps", "2", "--until", "budget"]) == 0
    recipe = read_recipe(tmp_path / "out")
    assert (recipe.layers, recipe.grow, recipe.rounds) == ((0, 1), 2, 2)
    assert (recipe.bridge.map, recipe.heal.by, recipe.baselines) == ("none", "text", ())
    assert (recipe.optimizer.lr, recipe.optimizer.final_lr) == (1e-3, 1e-4)
    heirs = sorted(path.name for path in (tmp_path / "out").glob("heir-*"))
    assert heirs == ["heir-2", "heir-4"]
    options = options_from(InheritOptions, {"recipe": "inheritune", "lr": 0.01, "layers": 3})
    assert (options.optimizer.lr, options.optimizer.final_lr) == (0.01, 0.001)
    assert (options.until, options.choose) == ("parity", "first")
    named = {"recipe": "inheritune", "blocks": [0, 2], "grow": 0}
    assert options_from(InheritOptions, named).blocks == (0, 2)
    with pytest.raises(WakefulError, match="recipe must be one of wakeful, inheritune"):
        options_from(InheritOptions, {"recipe": "mergekit"})


def test_an_heirs_export_keeps_what_lies_beside_the_references_tokenizer(
    command: list[str], llama: Path, tmp_path: Path
) -> None:
    theirs = AutoTokenizer.from_pretrained(llama)
    theirs.add_special_tokens({"bos_token": "<s>", "pad_token": "<pad>", "unk_token": "<unk>"})
    theirs.chat_template = "{{ messages[0]['content'] }}!"
    begins = [("<s>", theirs.bos_token_id)]
    theirs.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=begins
    )
    theirs.save_pretrained(llama)
    (llama / "generation_config.json").write_text('{"do_sample": true, "top_k": 7}')
    assert main(["inherit", str(llama), *command[2:], "--layers", "2", "--steps", "2"]) == 0
    # The reference is used to BOS, so its heirs learn with it, and the page says so.
    assert tomllib.loads((tmp_path / "out/recipe.toml").read_text())["data"]["bos"] is True
    assert "before every window, for heir" in (tmp_path / "out/report.html").read_text("utf-8")
    with pytest.raises(WakefulError, match="contradict"):
        options_from(InheritOptions, {"bos": "off", "data": {"bos": True}})
    with pytest.raises(WakefulError, match="leave it out"):
        options_from(InheritOptions, {"data": {"first_batch": 3}})
    assert main(["export", str(tmp_path / "out/heir-2"), str(tmp_path / "heir")]) == 0
    again = AutoTokenizer.from_pretrained(tmp_path / "heir")
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template"):
        assert getattr(again, name) == getattr(theirs, name), name
    assert again("a b").input_ids == theirs("a b").input_ids
    generation = AutoModelForCausalLM.from_pretrained(tmp_path / "heir").generation_config
    assert (generation.do_sample, generation.top_k) == (True, 7)
    assert generation.pad_token_id == theirs.pad_token_id


def test_folders_that_cannot_be_a_reference_are_refused_by_name(
    command: list[str], llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*options: str) -> str:
        capsys.readouterr()
        message = fails(capsys, "inherit", str(llama), *command[2:], *options)
        assert not (tmp_path / "out").exists()
        return message

    shards = sorted(llama.glob("model-*.safetensors"))
    assert len(shards) > 1
    away = shards[1].rename(tmp_path / "away.safetensors")
    assert shards[1].name in refused()
    away.rename(shards[1])
    tokenizer = json.loads((llama / "tokenizer.json").read_text())
    for number in range(257, 270):
        tokenizer["model"]["vocab"][f"more{number}"] = number
    (llama / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "tokenizer has 270 tokens and its embedding 260" in refused()
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"model_type": "bloom"}))
    assert "our decoder cannot be a bloom" in refused()


def test_a_text_with_another_tokenizer_is_refused(
    command: list[str], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    assert main(["prepare", str(text), "--out", str(data), "--vocab_size", "270"]) == 0
    capsys.readouterr()
    message = fails(capsys, *command, "--text", str(data))
    assert "the tokenizer does not match" in message
    assert not (tmp_path / "out").exists()


def test_prepared_data_of_the_same_tokenizer_is_taken(
    command: list[str], reference: Run, text: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    data = tmp_path / "data"
    assert main(["prepare", str(text), "--out", str(data), "--tokenizer",
                 str(reference.path)]) == 0  # fmt: skip
    wrong = fails(capsys, *command, "--text", str(data), "--data.max_bytes", "999")
    assert "data.max_bytes = 999 does nothing" in wrong
    assert main([*command, "--text", str(data), "--layers", "1"]) == 0


def test_prepared_data_that_lost_what_lies_beside_the_tokenizer_is_refused(
    command: list[str], llama: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = AutoTokenizer.from_pretrained(llama)
    theirs.add_special_tokens({"bos_token": "<s>"})
    theirs.save_pretrained(llama)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(llama / "tokenizer.json", bare)
    (bare / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    data = tmp_path / "data"
    prepare = ["prepare", str(text)]
    assert main([*prepare, "--out", str(data), "--tokenizer", str(bare)]) == 0
    capsys.readouterr()
    short = ["inherit", str(llama), *command[2:], "--layers", "2", "--steps", "1"]
    assert "the tokenizer does not match" in fails(capsys, *short, "--text", str(data))
    theirs.chat_template = "{{ messages[0]['content'] }}!"
    theirs.save_pretrained(llama)
    (bare / "tokenizer_config.json").write_text('{"eos_token": "<end>", "bos_token": "<s>"}')
    assert main([*prepare, "--out", str(tmp_path / "more"), "--tokenizer", str(bare)]) == 0
    capsys.readouterr()
    said = fails(capsys, *short, "--text", str(tmp_path / "more"))
    assert "the tokenizer does not match" in said
    assert not (tmp_path / "out").exists()
    whole = tmp_path / "whole"
    assert main([*prepare, "--out", str(whole), "--tokenizer", str(llama)]) == 0
    assert main([*short, "--text", str(whole)]) == 0


def test_training_text_that_overlaps_validation_is_refused_or_left_out(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = torch.Generator().manual_seed(0)
    source = tmp_path / "texts"
    source.mkdir()

    def words(count: int) -> str:
        drawn = torch.randint(10_000, (count,), generator=generator).tolist()
        return " ".join(map(str, drawn))

    table = words(200)
    for number in range(24):
        body = f"number {number}\n{table}" if number % 2 else words(200)
        (source / f"{number:02d}.txt").write_text(body)
    validation = tmp_path / "validation.txt"
    validation.write_text(table + " and more")
    theirs = ["--text", str(source), "--validation_text", str(validation)]
    assert "the training text overlaps validation" in fails(capsys, *command, *theirs)
    assert not (tmp_path / "out").exists()
    held_out = ["--text", str(source), "--validation_fraction", "0.4"]
    assert main([*command, *held_out, "--steps", "1"]) == 0
    assert "left out of validation" in capsys.readouterr().out
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["data"]["overlap"]["documents"] > 0
    assert "left out" in (tmp_path / "out/report.html").read_text()


def test_a_damaged_summary_is_named(done: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("run.json", "summary.json", "environment.json"):
        shutil.copy(done / name, copy / name)
    assert read_inheritance(copy)[0].final == "heir-3"
    summary = json.loads((copy / "summary.json").read_text())
    summary["arms"][0]["arm"] = "<script>alert(1)</script>"
    summary["arms"][0]["loss"] = 3
    (copy / "summary.json").write_text(json.dumps(summary))
    assert (
        "<script>alert"
        not in write_page(inheritance_report(copy), copy / "report.html").read_text()
    )
    for place, value, message in (
        (("arms", 0, "loss"), "low", r"arms\[0\]\.loss must be a number"),
        (("arms", 0, "curve", 0, "step"), None, r"arms\[0\]\.curve\[0\]\.step must be"),
        (("final",), "nobody", "final = 'nobody' names no arm"),
    ):
        damaged = json.loads(json.dumps(summary))
        below = damaged
        for key in place[:-1]:
            below = below[key]
        below[place[-1]] = value
        (copy / "summary.json").write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match=message):
            inheritance_report(copy)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"keep": 1.5}, r"keep must be in \[0, 1\]"),
        ({"data": {"source": "a"}, "text": "b"}, "data.source and text both set data.source"),
        ({"steps": 0}, "train.steps must be at least 1"),
        ({"tokenizer": "x"}, "no option 'tokenizer'"),
        ({"data": {"tokenizer": "x"}}, "reference's tokenizer"),
        ({"data": {"keep_overlap": True}}, "keep_overlap"),
        ({"train": {"distill": {"teacher": "x"}}}, "train.distill.teacher"),
        ({"train": {"distill": {"alpha": 0.5}}}, "an heir learns as --heal says"),
        ({"heal": {"by": "text", "alpha": 0.5}}, "--heal.by text and --heal.alpha 0.5: "),
        ({"bridge": {"map": "none", "ridge": 0.1}}, "--bridge.map none and --bridge.ridge 0.1"),
        ({"heal": {"alpha": 1.5}}, r"heal.alpha must be in \[0, 1\], got 1.5"),
        ({"heal": {"alpha": float("nan")}}, r"heal.alpha must be in \[0, 1\], got nan"),
        ({"heal": {"temperature": 0.0}}, r"heal.temperature must be in \(0, inf\), got 0.0"),
        (
            {"heal": {"temperature": float("inf")}},
            r"heal.temperature must be in \(0, inf\), got inf",
        ),
        ({"optimizer": {"beta3": 1.0}}, "optimizer.beta3"),
    ],
)
def test_options_that_contradict_each_other(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(WakefulError, match=message):
        options_from(InheritOptions, asked)


def test_what_processes_cannot_share_is_refused_before_there_is_a_folder(
    reference: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = contextlib.nullcontext(World(0, 2))
    monkeypatch.setattr("wakeful.inheritance.tool.join_processes", lambda: two)
    with pytest.raises(WakefulError, match="cannot be shared evenly by 2 processes"):
        inherit(
            reference.path, text=str(text), out=tmp_path / "out", steps=4, length=16, device="cpu",
            layers=2, batch_size=3,
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_everything_that_train_can_be_told_an_inheritance_can() -> None:
    short = options_from(
        InheritOptions,
        {"text": "a", "steps": 3, "lr": 2e-3, "batch_size": 2, "optimizer": {"name": "muon"}},
    )
    assert (short.data.source, short.train.steps, short.optimizer.name) == ("a", 3, "muon")
    assert (short.optimizer.lr, short.optimizer.final_lr) == (2e-3, 2e-4)
    assert (short.train.batch_size, short.train.eval_batch_size) == (2, 2)
    long = options_from(
        InheritOptions,
        {"lr": 2e-3, "optimizer": {"final_lr": 0.0, "beta2": 0.99, "clip": 0.5},
         "train": {"compile": True, "checkpoint_activations": True, "dtype": "float64"}},
    )  # fmt: skip
    assert (long.optimizer.lr, long.optimizer.final_lr, long.optimizer.beta2) == (2e-3, 0.0, 0.99)
    assert long.train.compile
    assert long.train.checkpoint_activations
    assert set(to_table(long)["train"]) == set(to_table(TrainConfig()))


def test_a_reference_that_is_not_a_run_has_a_cost_nobody_knows(done: Path, tmp_path: Path) -> None:
    summary = json.loads((done / "summary.json").read_text())
    summary["reference"] |= {"tokens": None, "seconds": None}
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("run.json", "environment.json"):
        shutil.copy(done / name, copy / name)
    (copy / "summary.json").write_text(json.dumps(summary))
    assert (
        "cost is not known"
        in write_page(inheritance_report(copy), copy / "report.html").read_text()
    )


def test_a_reference_in_float64_is_inherited_in_float32(
    text: Path, reference: Run, tmp_path: Path
) -> None:
    exact = tiny(text, train={"dtype": "float64", "steps": 2})
    exact = train_run(exact, tmp_path / "exact")
    assert main(["inherit", str(exact.path), "--text", str(text), "--layers", "1", "--steps", "1",
                 "--out", str(tmp_path / "out"), *SMALL]) == 0  # fmt: skip
    heir = read_decoder(tmp_path / "out/heir-1", dtype="auto").decoder()
    assert heir.head.weight.dtype == torch.float32


def test_a_text_that_repeats_itself_asks_for_another_to_validate_on(
    reference: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "".join(f"one line of many, number {n};\n" for n in range(200))
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(6):
        (folder / f"{n}.txt").write_text(f"{n}\n{line}", "utf-8")
    asked = ["inherit", str(reference.path), "--layers", "2", "--steps", "1", "--text", str(folder)]
    told = fails(capsys, *asked, "--data.validation_fraction", "0.5", "--out", str(tmp_path / "o"))
    assert "would be held out partly occurs in the others: give --validation_text" in told
    assert not (tmp_path / "o").exists()


def test_a_reference_in_memory_is_read_as_one_from_a_path_is(
    reference: Run, text: Path, tmp_path: Path
) -> None:
    model = read_decoder(reference.path)
    short = {"tokenizer": model.wakeful_tokenizer, "text": str(text), "layers": 2, "steps": 1,
             "length": 16, "validation_fraction": 0.1, "device": "cpu"}  # fmt: skip
    half = copy.deepcopy(model.decoder()).bfloat16()
    found = inherit(half, out=str(tmp_path / "half"), **short)
    assert half.head.weight.dtype == torch.bfloat16
    whole = inherit(copy.deepcopy(half).float(), out=str(tmp_path / "whole"), **short)
    one, other = (read_windows(each.path / "reference.parquet") for each in (found, whole))
    assert one["loss"].to_list() == other["loss"].to_list()
    assert read_inheritance(found.path)[0].heir.loss == read_inheritance(whole.path)[0].heir.loss


def test_a_quantized_reference_in_memory_is_refused(
    reference: Run, text: Path, tmp_path: Path
) -> None:
    quantized = quantize(reference.path, "w4", text=str(text), length=16, num_sequences=2).model
    with pytest.raises(WakefulError, match="is quantized: name the model it was made from"):
        inherit(quantized, text=str(text), out=str(tmp_path / "out"), length=16, device="cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_every_run_has_its_own_warmup(reference: Run, text: Path, tmp_path: Path) -> None:
    short = {"text": str(text), "length": 16, "device": "cpu", "validation_fraction": 0.1,
             "bridge": {"map": "none"}}  # fmt: skip
    rounds = {"layers": 2, "grow": 1, "until": "budget", "rounds": 2, "steps": 40}
    found = inherit(reference.path, out=str(tmp_path / "rounds"), **short, **rounds)
    parts = [Run.open(path).config for path in sorted(found.path.glob("heir-*"))]
    assert [(each.train.steps, each.optimizer.warmup_steps) for each in parts] == [(40, 2)] * 2
    assert "after 2 steps, cosine" in found.page.read_text("utf-8")
    more = rounds | {"steps": 4, "optimizer": {"warmup_steps": 3}}
    found = inherit(reference.path, out=str(tmp_path / "given"), **short, **more)
    parts = [Run.open(path).config for path in sorted(found.path.glob("heir-*"))]
    assert [(each.train.steps, each.optimizer.warmup_steps) for each in parts] == [(4, 3)] * 2
    assert "after 3 steps, cosine" in found.page.read_text("utf-8")
