"""The verb reproduce: an exhibit run as a user would, gone on with, refused where it must be."""

import dataclasses
import os
import random
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from training.test_cluster import stand_in
from wakeful.cli import main
from wakeful.config.schema import Config, DataConfig
from wakeful.device import free_memory
from wakeful.errors import Diverged, WakefulError
from wakeful.inheritance import rounds
from wakeful.inheritance.outcome import read_inheritance
from wakeful.runs.run import Run
from wakeful.scores import Score
from wakeful.training import cluster
from wakeful_papers import reproduce
from wakeful_papers.exhibits.exhibit import Claim, Scale, exhibit_names, read_exhibit
from wakeful_papers.exhibits.judge import JudgedExhibit
from wakeful_papers.exhibits.plan import Plan, heirs_table, plan_exhibit
from wakeful_papers.exhibits.total import total_cost
from wakeful_papers.options import ReproduceOptions
from wakeful_papers.verbs import models as exhibit_models
from wakeful_papers.verbs import reproduce as verb
from wakeful_papers.verbs import runs as exhibit_runs
from wakeful_papers.verbs.reproduce import Reproduction

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dogs",
    "and",
    "many",
    "more",
    "of",
    "them",
    "do",
    "so",
    "again",
    "today",
]


TITLES = {
    "mean_attention": "mean attention of all heads",
    "hidden_magnitude": "magnitude of hidden states",
    "attention_of_layers": "attention, mean over a layer’s heads",
}
"""Words of drawings that exhibits give no title."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(60):
        words = random.Random(number).choices(WORDS, k=400)
        (folder / f"{number}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))


def test_an_exhibit_is_run_judged_and_gone_on_with(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {"steps": 2, "seeds": (0, 1), "text": str(text)}
    trained: list[str] = []

    def train(config, path, **options):
        trained.append(config.name)
        if len(trained) == 3:
            raise KeyboardInterrupt
        return real(config, path, **options)

    real = exhibit_runs.train_run
    monkeypatch.setattr(exhibit_runs, "train_run", train)
    with pytest.raises(KeyboardInterrupt):
        reproduce("value-residual/fig10", **asked)
    place = tmp_path / "runs/reproduce/tiny/value-residual-fig10"
    assert Run.open(place).header.status == "stopped"
    done = reproduce("value-residual/fig10", **asked)
    assert trained == ["vanilla", "resformer", "vanilla", "vanilla", "resformer"]
    assert done.path.resolve() == place
    assert Run.open(place).header.status == "done"
    assert len(done.verdicts) == 3
    assert repr(done) == "\n  ".join(["<Reproduction>", *done.verdicts])
    page = done.page.read_text("utf-8")
    assert "tiny scale: 0.2" in page
    assert "less attention on the first token" in page
    assert "value norm of the first token over the others" in page
    figures = done.frame
    assert set(figures["row"]) == {"vanilla", "resformer"}
    assert set(figures["seed"]) == {0, 1}
    mass = figures.filter(figures["figure"].str.contains("first_key_mass"))["value"]
    assert len(mass) == 4
    assert mass.is_between(0, 1).all()
    assert done.summary["scale"] == "tiny"
    # Another exhibit takes the runs that are there; so does the same one again.
    again = reproduce("value-residual/fig19", **asked)
    assert trained[5:] == ["neutreno", "svformer", "neutreno", "svformer"]
    assert again.path.name == "value-residual-fig19"
    reproduce("value-residual/fig10", **asked)
    assert len(trained) == 9
    # A folder of another exhibit, or of other seeds, is left as it is.
    for other, seeds in (("value-residual/fig12", ["0", "1"]), ("value-residual/fig10", ["5"])):
        told = ["reproduce", other, "--out", str(place), "--seeds", *seeds, "--text", str(text)]
        assert main(told) == 1
        assert "is of value-residual/fig10 at the tiny scale" in capsys.readouterr().err
    # So is one with other settings, whose page would be lost.
    kept, longer = done.page.read_text("utf-8"), asked | {"steps": 3, "out": str(place)}
    with pytest.raises(
        WakefulError, match=r"with seeds 0, 1 and --steps 2, --text .*text.*; choos"
    ):
        reproduce("value-residual/fig10", **longer)
    assert done.page.read_text("utf-8") == kept
    # A row that diverges with one seed leaves the claims to the others; the baseline may not.
    wild = "resformer"

    def diverging(config, path, **options):
        if config.name == wild:
            raise Diverged("the loss of step 2 is not finite")
        return real(config, path, **options)

    monkeypatch.setattr(exhibit_runs, "train_run", diverging)
    more = asked | {"seeds": (0, 1, 2), "runs": str(tmp_path / "runs/reproduce/tiny/runs")}
    left = reproduce("value-residual/fig10", out=str(tmp_path / "more"), **more)
    assert {verdict.seeds for verdict in left.exhibits[0].verdicts} == {2}
    told = "<li>resformer, seed 2: the loss of step 2 is not finite</li>"
    assert told in left.page.read_text("utf-8")
    wild = "vanilla"
    with pytest.raises(Diverged):
        reproduce("value-residual/fig10", out=str(tmp_path / "none"),
                          **(asked | {"seeds": (3,)}))  # fmt: skip


def test_heirs_are_compared_with_their_reference(text: Path, tmp_path: Path) -> None:
    done = reproduce("lazy/fig17", steps=2, seeds=[0], text=str(text), out=str(tmp_path / "o"))
    assert set(done.frame["row"]) == {"reference", "reference_on", "heir"}
    assert "a smaller share of lazy layers" in done.verdicts[0]
    assert "not applicable (no lazy layers" in done.verdicts[0]  # untrained layers are not lazy
    assert "no lazy layers" in done.page.read_text("utf-8")


@pytest.mark.parametrize("where", ["", "local(workers=2)"])
def test_a_baseline_or_an_heir_that_diverges_is_left_out(
    where: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where:
        monkeypatch.setattr(cluster, "_PAUSE", {"local": 0.0, "slurm": 0.0})
        stand_in(monkeypatch, {})
    diverging: set[tuple[str, int]] = {("distilbert", 0)}
    real = rounds.train_run

    def train(config: Config, *given: Any, **named: Any) -> Run:
        if (config.name.partition("-")[0], config.train.seed) in diverging:
            raise Diverged("the loss of step 2 is not finite")
        return real(config, *given, **named)

    monkeypatch.setattr(rounds, "train_run", train)
    asked: dict[str, Any] = {"steps": 2, "text": str(text), "cluster": where}
    runs, out = str(tmp_path / "runs"), tmp_path / "out"
    for _ in range(2):  # the second time all is read
        done = reproduce("lazy/fig16", seeds=[0], runs=runs, out=str(out), **asked)
        assert set(done.frame["row"]) == {"reference", "heir", "random", "random_total"}
        outcomes = [(verdict.seeds, verdict.outcome) for verdict in done.exhibits[0].verdicts[:2]]
        assert outcomes == [(0, "not run"), (1, "not resolved")]  # below distillation, random
        page = done.page.read_text("utf-8")
        assert "<li>distilbert, seed 0: the loss of step 2 is not finite</li>" in page
        diverging.clear()
    # Without an heir its seed has the rows that are trained alone.
    diverging.add(("heir", 1))
    done = reproduce("lazy/fig16", seeds=[0, 1], runs=runs, out=str(tmp_path / "more"), **asked)
    assert set(done.frame.filter(seed=1)["row"]) == {"reference", "random_total"}
    assert [verdict.seeds for verdict in done.exhibits[0].verdicts[:2]] == [0, 1]
    assert "<li>heir, seed 1: the loss of step 2 is not finite</li>" in done.page.read_text("utf-8")


def test_runs_and_heirs_are_dealt_out(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(name: str, folder: str, where: str = "") -> Reproduction:
        return reproduce(
            name, steps=2, seeds=[0, 1], text=str(text), cluster=where,
            out=str(tmp_path / folder), runs=str(tmp_path / f"{folder}-runs"),
        )  # fmt: skip

    monkeypatch.setattr(cluster, "_PAUSE", {"local": 0.0, "slurm": 0.0})
    alone = ran("lazy/fig17", "alone")
    monkeypatch.delattr(exhibit_runs, "train_run")  # jobs do it all, and what they leave is read
    made = stand_in(monkeypatch, {})
    dealt = ran("lazy/fig17", "dealt", "local(workers=2)")
    assert (len(made.jobs), made.most) == (4, 2)  # two references, then the heirs of each
    losses = pl.col("figure").str.contains("loss")
    assert dealt.frame.filter(losses).equals(alone.frame.filter(losses))
    assert ran("lazy/fig17", "dealt", "local(workers=2)").verdicts == dealt.verdicts
    assert len(made.jobs) == 4
    # A row that diverges is left out, and not tried again where the command runs.
    real = cluster.train_run

    def diverging(config: Config, *given: Any, **named: Any) -> Run:
        if config.name == "resformer" and config.train.seed == 1:
            raise Diverged("the loss of step 2 is not finite")
        return real(config, *given, **named)

    monkeypatch.setattr(cluster, "train_run", diverging)
    left = ran("value-residual/fig10", "left", "slurm(workers=2)")
    told = "<li>resformer, seed 1: the loss of step 2 is not finite</li>"
    assert told in left.page.read_text("utf-8")


def test_several_exhibits_are_trained_side_by_side_and_judged_by_workers(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster, "_PAUSE", {"local": 0.0, "slurm": 0.0})
    names = ("value-residual/fig20", "value-residual/fig12", "lazy/fig17")
    asked: dict[str, Any] = {"steps": 2, "seeds": [0], "text": str(text)}
    alone = reproduce(*names, **asked, runs=str(tmp_path / "alone"))
    kept = [one.verdicts for one in alone.exhibits]
    for place in (tmp_path / "runs/reproduce/tiny").glob("*-fig*"):
        shutil.rmtree(place)
    stand_in(monkeypatch, {})
    trained: list[Path] = []
    real = cluster.train_run

    def counted(config: Config, path: Path, **kwargs: Any) -> Run:
        trained.append(Path(path))
        return real(config, path, **kwargs)

    monkeypatch.setattr(cluster, "train_run", counted)
    monkeypatch.setattr(exhibit_runs, "train_run", None)  # what a job left is read
    dealt = reproduce(*names, **asked, cluster="local(workers=2)")
    assert [one.exhibit for one in dealt.exhibits] == [one.exhibit for one in alone.exhibits]
    for one, before in zip(dealt.exhibits, kept, strict=True):
        assert [each.outcome for each in one.verdicts] == [each.outcome for each in before]
        folder = tmp_path / "runs/reproduce/tiny" / one.exhibit.replace("/", "-")
        assert Run.open(folder).header.status == "done"
        assert (folder / "report.html").is_file()
    assert len(trained) == len(set(trained)) == 3  # vanilla and resformer once, and a reference
    assert dealt.page.name == "claims.html"
    assert dealt.picture() is not None
    # One that cannot be judged leaves the others as they are.
    stand_in(monkeypatch, {})
    judged = verb._judge

    def failing(wanted: Any, runs: str, name: str, place: Path) -> None:
        if name == "value-residual/fig20":
            raise WakefulError("no memory")
        judged(wanted, runs, name, place)

    monkeypatch.setattr(verb, "_judge", failing)
    monkeypatch.setattr(verb, "exhibit_names", lambda: names)
    left = reproduce(**asked, all=True, cluster="local(workers=2)")
    assert left.omissions == ("value-residual/fig20: no memory",)
    assert len(left.exhibits) == 2
    with pytest.raises(WakefulError, match=r"^value-residual/fig20: no memory"):
        reproduce(*names, **asked, cluster="local(workers=2)")


def test_runs_of_a_text_that_has_changed_are_not_set_beside_new_ones(
    text: Path, tmp_path: Path
) -> None:
    asked = {"steps": 2, "seeds": (0,), "text": str(text), "runs": str(tmp_path / "runs")}
    reproduce("value-residual/fig3", out=str(tmp_path / "one"), **asked)
    for number in range(30):
        (text / f"{number}.txt").write_text(" ".join(random.Random(-number).choices(WORDS, k=90)))
    # Rows that are new beside a baseline of old, and a model of old that is to be looked at.
    with pytest.raises(WakefulError, match="were trained on different texts, both called"):
        reproduce("value-residual/fig16", out=str(tmp_path / "two"), **asked)
    with pytest.raises(WakefulError, match="was trained on other data than"):
        reproduce("value-residual/fig12", out=str(tmp_path / "three"), **asked)


def test_heirs_of_a_text_that_has_changed_are_not_set_beside_their_reference(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reproduced() -> Reproduction:
        return reproduce("lazy/fig4", steps=2, seeds=[0], text=str(text), out=str(tmp_path / "o"))

    with monkeypatch.context() as context:
        context.setattr(exhibit_runs, "inherit_with_baselines", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            reproduced()
    for number in range(30):
        (text / f"{number}.txt").write_text(" ".join(random.Random(-number).choices(WORDS, k=90)))
    with pytest.raises(WakefulError, match="were trained on different texts, both called"):
        reproduced()


def test_exhibits_look_closer_by_probes_of_their_own(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mappings, positions, spectra, other lengths, rotated states, pictures."""
    monkeypatch.setattr(
        verb, "read_exhibit", lambda name: dataclasses.replace(read_exhibit(name), looks=2)
    )
    (tmp_path / "here").mkdir()
    asked = {"steps": 2, "seeds": [0], "text": str(text), "runs": str(tmp_path / "runs")}
    measured: dict[str, set[str]] = {}
    for name in ("value-residual/fig3", "value-residual/fig12", "value-residual/fig19",
                 "value-residual/fig20",
                 "activation/fig1", "activation/fig3",
                 "activation/largest-weights", "lazy/fig12",
                 "lazy/fig13", "lazy/fig19"):  # fmt: skip
        done = reproduce(name, out=str(tmp_path / "here" / name.replace("/", "-")), **asked)
        columns = {column.figure for column in read_exhibit(name).table.columns}
        assert columns <= set(done.frame["figure"]), name
        assert all("not measured" not in sentence for sentence in done.verdicts), done.verdicts
        drawn = done.page.read_text("utf-8")
        for expression in read_exhibit(name).draw:
            title = TITLES.get(expression.partition("(")[0]) or expression.rpartition("title='")[2]
            assert title.rstrip("')").split("’")[0] in drawn
        measured[name] = set(done.frame["figure"])
    cosine = "layers(metric='mapping_cosine', variant='identity')"
    assert cosine in measured["value-residual/fig3"]


@pytest.fixture
def pretrained(text: Path, tmp_path: Path) -> Path:
    """A small model that was trained here, and stands for one of somebody else's."""
    config = dataclasses.replace(
        plan_exhibit(read_exhibit("lazy/fig13"), "tiny").jobs[0].config,
        data=DataConfig(source=str(text), vocab_size=300),
    )
    small = dataclasses.replace(config.model, num_layers=4, num_heads=2, width=32, mlp_width=64)
    steps = dataclasses.replace(config.train, steps=2, eval_every=2)
    exhibit_runs.train_run(
        dataclasses.replace(config, model=small, train=steps), tmp_path / "theirs"
    )
    return tmp_path / "theirs"


def test_pretrained_models_are_looked_at_and_quantized(
    text: Path, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {"seeds": (0, 1), "text": str(text), "models": [str(pretrained)], "dtype": "bfloat16"}
    done = reproduce("lazy/fig9", **asked)
    assert set(done.frame["row"]) == {"openllama-3b"}
    assert set(done.frame["seed"]) == {0, 1}
    columns = done.frame.filter(done.frame["figure"].str.starts_with("layers"))["value"]
    assert columns.n_unique() == 2  # each seed reads a stretch of its own
    page = done.page.read_text("utf-8")
    assert f"{pretrained} in place of OpenLLaMA 3B" in page
    assert "; float32<" in page  # that is what models are read in; the option is of training
    assert f"{pretrained.name}, for OpenLLaMA 3B" in page  # in charts and tables
    assert "0 confirmed" not in page
    assert len(done.verdicts) == 1  # the other model is the paper's scale's
    # What has been read is not read again by an exhibit that reads the same.
    monkeypatch.setattr(exhibit_runs, "measure_model", None)
    again = reproduce("value-residual/fig18", **asked)
    assert "similarity is high where entropy is low" in again.verdicts[0]
    assert "not measured" not in again.verdicts[0]
    # Other weights under the same path are read anew.
    (weights, *_) = pretrained.rglob("*.safetensors")
    os.utime(weights, (1, 1))
    with pytest.raises(TypeError):
        reproduce("value-residual/fig18", **asked)


def test_probes_of_an_exhibit_look_at_pretrained_models_too(
    text: Path, pretrained: Path, tmp_path: Path
) -> None:
    asked = {"seeds": [0, 1], "text": str(text), "models": [str(pretrained)]}
    for name, drawn in (("activation/appendix-j", "magnitude of hidden states"),
                        ("activation/appendix-k", "mean attention of all heads")):  # fmt: skip
        done = reproduce(name, out=str(tmp_path / name.rpartition("/")[2]), **asked)
        assert set(done.frame["row"]) == {"gpt2-medium"}
        assert done.frame["value"].null_count() == 0
        shares = done.frame.filter(pl.col("figure").str.contains("overlap|share"))["value"]
        assert shares.is_between(0, 1).all()
        assert len(shares) == (4 if name.endswith("j") else 2)
        assert drawn in done.page.read_text("utf-8")


def test_a_table_sets_pretrained_models_beside_trained_ones(
    text: Path, pretrained: Path, tmp_path: Path
) -> None:
    done = reproduce(
        "activation/table1", steps=2, seeds=[0], text=str(text), models=[str(pretrained)],
        out=str(tmp_path / "table"),
    )  # fmt: skip
    cost = done.frame.filter(figure="damage_w4")
    assert cost["row"].to_list() == ["vanilla", "softmax1-orthoadam", "gpt2"]
    assert all("not measured" not in sentence for sentence in done.verdicts)


def test_heirs_are_made_of_a_pretrained_model_on_little_text(
    text: Path, pretrained: Path, tmp_path: Path
) -> None:
    done = reproduce(
        "lazy/table10", steps=8, seeds=[0], text=str(text), models=[str(pretrained)],
        out=str(tmp_path / "table"), runs=str(tmp_path / "runs"),
    )  # fmt: skip
    groups = ["repeated10", "fresh10", "repeated20", "fresh20"]
    assert done.frame["group"].unique(maintain_order=True).to_list() == groups
    assert set(done.frame["row"]) == {"reference", "heir"}
    assert "not measured" not in " ".join(done.verdicts)
    heirs = [Run.open(path.parent).config for path in tmp_path.glob("runs/*heirs*/*/*/run.json")]
    read = sorted(config.data.max_tokens for config in heirs if config.train.steps == 10)
    tokens = heirs[0].train.batch_size * heirs[0].train.length
    assert read == [0, tokens]
    # Algorithm 1 of When Attention Collapses: the first layers as they are, trained on the text.
    summary, _ = read_inheritance(next(tmp_path.glob("runs/*heirs*/*")))
    assert summary.recipe.rule == "first"
    assert summary.heir.layers == (0, 1)
    assert summary.recipe.bridge.map == "none"
    assert summary.recipe.heal.by == "text"


def test_models_that_do_not_fit_an_exhibit_are_refused() -> None:
    with pytest.raises(WakefulError, match="looks at no pretrained model: leave out --models"):
        reproduce("value-residual/fig6", models=["smollm2"])
    with pytest.raises(WakefulError, match="looks at 1 pretrained model, and --models names 2"):
        reproduce("lazy/fig11", models=["smollm2", "other"])
    # Heirs need every reference: what is not named would be trained in the paper's place.
    told = (
        r"looks at 5 pretrained models, and --models names 1; PLACE=MODEL names some of small-few"
    )
    with pytest.raises(WakefulError, match=told):
        reproduce("lazy/table9", models=["smollm2"])
    for mixed in (["small-few=smollm2", "other"], ["small-few=smollm2", "small-few=other"]):
        with pytest.raises(WakefulError, match="names 1 of 2 models as PLACE=MODEL"):
            reproduce("lazy/table9", models=mixed)


@pytest.mark.parametrize("name", ["lazy/fig11", "lazy/fig20", "activation/table1"])
def test_a_model_that_is_not_there_leaves_nothing_behind(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an exhibit that reads it, makes heirs of it, and reads it beside rows of its own."""
    asked: list[str] = []

    def missing(name: str, **options: object) -> None:
        asked.append(name)
        raise OSError(f"{name} is not on the hub\nTry another")

    monkeypatch.setattr(exhibit_models.AutoConfig, "from_pretrained", missing)
    monkeypatch.chdir(tmp_path)
    for model, told in {
        "nope-model": "'nope-model' cannot be loaded as a run directory, a Transformers folder, a "
        "GGUF file or a hub name: nope-model is not on the hub",
        "smolm2": "unknown model 'smolm2' (did you mean 'smollm2'?)",
    }.items():
        assert main(["reproduce", name, "--models", model]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(told)
    assert asked == ["nope-model"]
    assert not [*tmp_path.iterdir()]


def test_a_model_is_refused_by_what_lies_there(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(model: Path, name: str = "lazy/fig11") -> str:
        known: exhibit_models.ModelLocations = {}
        plan = plan_exhibit(read_exhibit(name), "tiny", models=[str(model)])
        with pytest.raises(WakefulError) as first:
            exhibit_models.check_models(plan, known)
        with monkeypatch.context() as patch:
            patch.setattr(exhibit_models, "find_model", None)  # nobody looks again
            with pytest.raises(WakefulError) as again:
                exhibit_models.check_models(plan, known)
        assert str(first.value) == str(again.value)
        return str(first.value)

    plan = plan_exhibit(read_exhibit("lazy/fig20"), "tiny", models=[str(pretrained)])
    exhibit_models.check_models(plan, {})
    comparison = tmp_path / "comparison"
    Run(comparison).make("compare", {})
    assert "holds no trained model: run.json calls it 'compare'" in refused(comparison)
    begun = tmp_path / "begun"
    begun.mkdir()
    for each in ("run.json", "config.toml"):
        shutil.copy(pretrained / each, begun)
    assert "holds no checkpoint" in refused(begun)
    assert "holds no model" in refused(pretrained / "checkpoints")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert "has no model.safetensors" in refused(folder)
    (folder / "config.json").write_text('{"model_type": "nobody"}')
    assert "describes no model" in refused(folder)
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    assert "cut.gguf" in refused(tmp_path / "cut.gguf")
    stored = {"quant_method": "compressed-tensors"}
    LlamaConfig(quantization_config=stored).save_pretrained(folder)
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    assert "quantized, and heirs have whole weights" in refused(folder, "lazy/fig20")


def test_a_text_that_is_not_there_leaves_nothing_behind(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    for name in ("lazy/fig11", "lazy/fig20"):
        with pytest.raises(WakefulError, match="nowhere"):
            reproduce(name, models=[str(pretrained)], text="nowhere.txt")
    assert {path.name for path in tmp_path.iterdir()} == before


def test_tasks_are_for_those_of_several_exhibits_that_have_some() -> None:
    asked = ReproduceOptions(tasks=True)
    tasks = {name: verb.plan_with_options(read_exhibit(f"value-residual/{name}"), asked).tasks
             for name in ("fig6", "table1")}  # fmt: skip
    assert not tasks["fig6"]
    assert "piqa" in tasks["table1"]


def test_models_are_named_by_the_place_they_take() -> None:
    def sources(name: str, scale: Scale, *models: str) -> dict[str, str]:
        plan = plan_exhibit(read_exhibit(name), scale, models=models)
        return {row: each.source for row, each in {**plan.existing, **plan.references}.items()}

    theirs = sources("lazy/table9", "paper")
    assert theirs["other-many"] == "openlm-research/open_llama_7b"
    named = sources("lazy/table9", "paper", "large-few=mine", "large-many=a=b")
    assert named == theirs | {"large-few": "mine", "large-many": "a=b"}
    assert sources("lazy/fig9", "tiny", "openllama-7b=mine") == {
        "openllama-3b": "smollm2", "openllama-7b": "mine",
    }  # fmt: skip
    assert sources("lazy/fig9", "tiny", "mine") == {"openllama-3b": "mine"}


def test_what_cannot_be_run_is_said_in_one_line_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cases = {
        ("value-residual/fig66",): "did you mean 'value-residual/fig6'",
        ("value-residual/table4",): "nothing to measure: they are the presets",
        ("value-residual/fig6", "--all"): "leave out value-residual/fig6",
        ("value-residual/fig6", "value-residual/fig7", "--out", "x"): "one exhibit's folder",
        ("value-residual/fig6", "--seeds", "-1"): "seed",
        ("value-residual/fig6", "--tasks"): "value-residual/fig6 asks no tasks",
        ("active-dormant", "--tasks"): "none of 2 exhibits asks tasks",
    }
    for arguments, words in cases.items():
        assert main(["reproduce", *arguments]) == 1
        assert words in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(verb, "free_memory", lambda device: 10**6)
    assert main(["reproduce", "value-residual/fig6", "--scale", "paper"]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "of memory (81.9M parameters in training), and there are 1 MB free" in told
    monkeypatch.setattr(verb, "free_memory", lambda device: 10**15)
    monkeypatch.setattr(verb.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    assert main(["reproduce", "value-residual/fig6", "--scale", "paper"]) == 1
    assert "of disk, and" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    assert main(["reproduce", "value-residual/fig6", "--out", "mine"]) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine"]


def test_a_folder_in_the_way_of_several_exhibits_is_not_avoided_by_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Run("runs/reproduce/tiny/value-residual-fig6").make("compare", {})
    with pytest.raises(WakefulError, match="choose another with --out"):
        reproduce("value-residual/fig6")
    with pytest.raises(WakefulError, match="not an exhibit's folder; move it away"):
        reproduce("value-residual/fig6", "value-residual/fig7")


def test_every_exhibit_is_listed_and_what_all_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in exhibit_names())
    total = total_cost(plan_exhibit(read_exhibit(name), "tiny") for name in exhibit_names()
                     if not read_exhibit(name).settings)  # fmt: skip
    words = " ".join(shown.split())
    assert f"tiny: {total.runs:,} runs, {total.tokens / 1e6:,.1f}M tokens" in words
    assert re.search(r"H100 hours, [5-7]\d\.\d GB of memory", words)  # one card holds each
    assert "Needs python-stdlib (of the paper's scale: c4:en)" in words
    assert "c4:en, Meta-Llama-3-8B" in words
    assert main(["reproduce", "--scale", "paper"]) == 0
    assert "Needs c4:en" in capsys.readouterr().out


def test_of_all_exhibits_those_that_do_not_fit_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("value-residual/fig12", "value-residual/fig20", "value-residual/fig7",
             "lazy/fig1-large")  # fmt: skip
    monkeypatch.setattr(verb, "exhibit_names", lambda: names)
    other = tmp_path / "runs/reproduce/tiny/value-residual-fig7"
    other.mkdir(parents=True)
    (other / "notes.txt").write_text("x")
    plans = {name: plan_exhibit(read_exhibit(name), "tiny") for name in names}
    first, last = plans[names[0]], plans[names[3]]
    assert last.memory > first.memory
    begun: list[str] = []

    def work(plan: Plan, *_: object) -> tuple[JudgedExhibit, None]:
        begun.append(plan.exhibit.name)
        print("begun")
        return JudgedExhibit(
            exhibit=plan.exhibit.name, paper="", title="", claim="", scale=plan.scale,
            headline="", verdicts=(),
        ), None  # fmt: skip

    monkeypatch.setattr(verb, "_run_exhibit", work)
    monkeypatch.setattr(verb, "free_memory", lambda device: last.memory - 1)
    assert main(["reproduce", "--all"]) == 0
    assert begun == list(names[:2])
    before, *_, after = " ".join(capsys.readouterr().out.split()).split("begun")
    # The two share their six runs.
    assert "2 exhibits: 6 runs, 1.5M tokens; very roughly" in before
    assert f"{first.memory / 1e6:,.0f} MB of memory and " in before
    assert "left out: value-residual/fig7: " in after
    assert "left out: lazy/fig1-large at the tiny scale takes about" in after
    page = (tmp_path / "runs/reproduce/tiny/claims.html").read_text("utf-8")
    assert "lazy/fig1-large at the tiny scale" in page
    # Exhibits that are named do not begin where one of them does not fit.
    with pytest.raises(WakefulError, match=r"^lazy/fig1-large at the tiny scale takes"):
        reproduce(*names[::3])
    # The disk holds either of two exhibits, not both.
    monkeypatch.setattr(verb, "free_memory", lambda device: 10**15)
    room = 0.9 * sum(total_cost([plan]).disk for plan in (first, last))
    monkeypatch.setattr(verb.shutil, "disk_usage", lambda path: SimpleNamespace(free=room))
    with pytest.raises(WakefulError, match="lazy/fig1-large at the tiny scale with the 1 before"):
        reproduce(*names[::3])
    assert begun == list(names[:2])
    assert reproduce(names[3]).exhibits[0].exhibit == names[3]
    # An exhibit whose learning rates cannot be tuned is left out too.
    begun.clear()
    tune = verb._tune

    def failing(plan: Plan, *arguments: Any) -> Plan:
        if plan.exhibit.name == names[0]:
            raise WakefulError("no rate")
        return tune(plan, *arguments)

    monkeypatch.setattr(verb, "_tune", failing)
    left = reproduce(all=True)
    assert begun == [names[1]]
    assert f"{names[0]}: no rate" in left.omissions


def test_memory_is_asked_of_the_machine_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_exhibit(read_exhibit("value-residual/table5"), "paper")
    sizes = sorted(size.memory for size in plan.model_sizes)
    runs, room = tmp_path / "runs", [10**15]
    monkeypatch.setattr(verb, "free_memory", lambda device: room[0])
    monkeypatch.setattr(verb.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**15))
    monkeypatch.setattr(cluster.shutil, "which", lambda name: name)

    def fits(where: str) -> None:
        found = cluster.cluster_of(where) if where else None
        verb.check_fits([plan], runs, lambda name: False, found)

    room[0] = sizes[-1]
    for where in ("", "local(workers=1)", "local(workers=8, gpus=1)"):
        fits(where)
    told = r"\(467\.9M parameters in training, 3 runs at a time\).*choose fewer workers"
    with pytest.raises(WakefulError, match=told):
        fits("local(workers=3)")
    room[0] = sum(sizes[-3:])
    fits("local(workers=3)")
    room[0] = 10**6  # the machine that submits jobs
    fits("slurm(workers=8)")
    with pytest.raises(WakefulError, match="choose a smaller --scale or another --device"):
        fits("")
    # Models that are read are so where the command runs.
    reading = plan_exhibit(read_exhibit("lazy/fig11"), "paper")
    with pytest.raises(WakefulError, match="lazy/fig11 at the paper scale takes"):
        verb.check_fits([reading], runs, lambda name: False, cluster.cluster_of("slurm"))
    note = verb._describe_cost(total_cost([plan]), ReproduceOptions(cluster="slurm"))
    assert note.endswith("of memory where the largest run is trained")
    assert "on this machine" not in note


def test_free_memory_is_the_machines() -> None:
    assert 2**26 < free_memory(torch.device("cpu")) < 2**46


def test_trained_models_are_asked_tasks_once(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def score(model: str, task: str, value: float) -> Score:
        examples = {"keys": ("a", "b"), "values": np.array([value, value]), "weights": np.ones(2)}
        return Score(model=model, task=task, metric="acc", **examples)

    def answers(model: str, *, tasks: tuple[str, ...], display: object) -> SimpleNamespace:
        asked.append(model)
        assert tasks == ("piqa", "sciq")
        value = len(asked) / 10
        scores = [score(model, "piqa", value), score(model, "sciq", 0.0)]
        return SimpleNamespace(scores=scores)

    def unreachable(options: object) -> None:
        raise WakefulError(f"task {options.tasks[0]} cannot be loaded")

    claims = tuple(Claim(says=name, row="resformer", direction="higher", figure=f"acc_{name}")
                   for name in ("piqa", "average"))  # fmt: skip
    fig10 = read_exhibit("value-residual/fig10")
    table1 = dataclasses.replace(
        fig10, looks=0, claims=claims,
        scales=fig10.scales | {"paper": {**fig10.scales["paper"], "tasks": ["piqa", "sciq"]}},
    )  # fmt: skip
    monkeypatch.setattr(verb, "read_exhibit", lambda name: table1)
    monkeypatch.setattr(exhibit_runs, "evaluate", answers)
    monkeypatch.setattr(verb, "read_tasks", unreachable)
    run = partial(reproduce, "value-residual/fig10", steps=2, seeds=[0], text=str(text),
                  out=str(tmp_path / "o"), tasks=True)  # fmt: skip
    with pytest.raises(WakefulError, match="task piqa cannot be loaded"):
        run()
    assert not (tmp_path / "o").exists()
    monkeypatch.setattr(verb, "exhibit_names", lambda: ("value-residual/fig10",))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WakefulError, match="no exhibit could be run; value-residual/fig10: task"):
        reproduce(all=True, steps=2, seeds=[0], text=str(text), tasks=True)
    monkeypatch.setattr(verb, "read_tasks", lambda options: {})
    for _ in range(2):
        piqa, average = run().exhibits[-1].verdicts
        assert piqa.difference == pytest.approx(0.1)
        assert average.difference == pytest.approx(0.05)
    assert len(asked) == 2


@pytest.mark.long
def test_a_tenth_of_all_exhibits_at_a_tenth_of_the_steps(tmp_path: Path) -> None:
    runnable = [name for name in exhibit_names() if not read_exhibit(name).settings]
    for name in runnable[::10]:
        steps = plan_exhibit(read_exhibit(name), "tiny").jobs[0].config.train.steps // 10
        out = tmp_path / name.replace("/", "-")
        done = reproduce(name, steps=steps, seeds=[0, 1], out=str(out))
        assert all(verdict.difference is not None for verdict in done.exhibits[-1].verdicts), name
        assert done.page.is_file()


def test_a_tokenizer_takes_the_place_of_one_to_train() -> None:
    found = read_exhibit("value-residual/fig6")
    own = {
        job.config.data.vocab_size for job in verb.plan_with_options(found, ReproduceOptions()).jobs
    }
    assert own != {DataConfig.vocab_size}
    given = verb.plan_with_options(found, ReproduceOptions(tokenizer="mine"))
    for job in given.jobs:
        assert job.config.data.tokenizer == "mine"


def test_every_row_of_an_exhibit_is_compiled_on_request() -> None:
    options = ReproduceOptions(compile=True)
    plan = verb.plan_with_options(read_exhibit("headline/heirs"), options)
    assert all(job.config.train.compile for job in plan.jobs)
    assert heirs_table(plan, plan.jobs[0], seed=0)["train"]["compile"] is True
    assert options.settings == ("--compile",)
