"""The library as its users call it: names, results, models in memory."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import polars as pl
import pytest
import torch
from markupsafe import escape
from transformers import AutoModelForCausalLM, AutoTokenizer

import wakeful
from evaluation.models import llama
from training.runs import text, tiny
from wakeful.config import Config, config_to_table
from wakeful.curing.tool import Cure
from wakeful.diagnosis.tool import Diagnosis
from wakeful.evaluation.tool import Evaluation
from wakeful.inheritance.result import Inheritance
from wakeful.quantization.result import Quantization
from wakeful.reports.result import Result
from wakeful.runs.run import Run
from wakeful.training.comparison import Comparison
from wakeful.training.loop import train_run as train_into
from wakeful.training.tool import TrainingRun as TrainedRun

__all__ = ["llama", "text"]
SOURCE = Path(wakeful.__file__).parent
ROOMS = ["wakeful", *(f"wakeful.{room}" for room in (
    "config", "curing", "data", "depth", "diagnosis", "evaluation", "exporting", "generation", "hf",
    "inheritance", "loading", "model", "normalizers", "norms", "optim", "placements", "probes",
    "quantization", "reporting", "ropes", "routes", "surgery", "training",
))]  # fmt: skip


def in_fresh_process(program: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    ).stdout


def test_importing_the_library_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "polars", "numpy", "rich", "tyro")
    program = (
        "import sys, wakeful\n"
        f"print([name for name in {heavy} if name in sys.modules], sorted(wakeful.__all__))"
    )
    assert in_fresh_process(program).startswith("[] ['WakefulError', '__version__', 'compare'")
    assert (SOURCE / "py.typed").is_file()
    assert {name for name in dir(wakeful) if callable(getattr(wakeful, name))} >= {
        name for name in wakeful.__all__ if name != "__version__"
    }  # every name that it says it has can be imported


@pytest.mark.slow
def test_training_waits_for_transformers_only_where_it_is_needed() -> None:
    program = (
        "import sys, wakeful.training.tool, wakeful.training.comparison, wakeful.training.cluster\n"
        "import wakeful.reporting.tool\n"
        "print('transformers' in sys.modules)"
    )
    assert in_fresh_process(program) == "False\n"


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_is_there_and_not_a_module(room: str) -> None:
    package = importlib.import_module(room)
    assert package.__all__
    for name in package.__all__:
        assert not inspect.ismodule(getattr(package, name)), name
        assert name in dir(package)
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = package.nothing_of_that_name


@pytest.mark.parametrize("room", ROOMS)
def test_the_names_editors_see_are_those_there_are(room: str) -> None:
    package = importlib.import_module(room)
    file = Path(package.__file__ or "")
    stub = file.with_suffix(".pyi")
    tree = ast.parse((stub if stub.exists() else file).read_text("utf-8"))
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    others = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    others |= {
        ast.unparse(target)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    }
    assert set(package.__all__) <= imported | classes | others
    assert {name for name in classes if not name.startswith("_")} <= set(package.__all__)


def test_the_reference_has_what_verbs_take_and_return() -> None:
    # A page of the reference lists a room's `__all__`.
    rooms = [importlib.import_module(room) for room in ROOMS]
    public = {id(getattr(room, name)) for room in rooms for name in room.__all__}
    for verb in (getattr(wakeful, name) for name in wakeful.__all__):
        if not inspect.isfunction(verb):
            continue
        hints = get_type_hints(verb)
        for hint in (hints.get("options"), hints["return"]):
            for kind in get_args(hint) or (hint,):
                if getattr(kind, "__module__", "").startswith("wakeful."):
                    assert id(kind) in public, f"{verb.__name__}: {kind}"


@pytest.mark.slow
def test_a_name_that_is_a_submodules_too_is_the_function_in_any_order() -> None:
    # What is heavy is imported once, and what is ours anew in each fork.
    program = (
        "import os, sys, torch.distributed.tensor, transformers.modeling_utils, polars\n"
        "for first in sys.argv[1:]:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        room, name = first.rsplit('.', 1)\n"
        "        exec(f'import {first}\\nfrom {room} import {name}\\ngood = callable({name})')\n"
        "        os._exit(not good)\n"
        "    print(first, os.waitpid(child, 0)[1])\n"
    )
    names = ("wakeful.loading.load",)
    assert in_fresh_process(program, *names).splitlines() == [f"{name} 0" for name in names]


def test_every_result_shows_its_sentences() -> None:
    kinds = (Comparison, Cure, Diagnosis, Evaluation, Inheritance, Quantization, TrainedRun)
    assert all(kind.__repr__ is Result.__repr__ for kind in kinds)


@pytest.mark.slow
def test_three_lines_diagnose_a_model_in_memory(
    text: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(llama)
    tokenizer = AutoTokenizer.from_pretrained(llama)
    before = set(tmp_path.iterdir())
    found = wakeful.diagnose(model, tokenizer=tokenizer, text=text, length=16, num_sequences=2)
    assert set(tmp_path.iterdir()) == before  # nothing is written
    assert set(found.frame["sequences"]) == {2}
    assert found.summary["models"][0]["length"] == 16
    assert any("Attention sinks" in sentence for sentence in found.verdicts)
    assert repr(found).splitlines()[0] == "<Diagnosis>"
    assert len(repr(found).splitlines()) == 1 + len(found.verdicts)
    html = found._repr_html_()
    assert all(str(escape(sentence)) in html for sentence in found.report.headlines)
    assert "data:image/png;base64," in html
    assert "<script" not in html
    assert "http" not in html.replace("http://www.w3.org", "")
    assert len(html) < 200_000
    saved = found.save(tmp_path / "saved")
    assert Run.open(saved).header.kind == "diagnose"
    assert (saved / "report.html").is_file()
    named = wakeful.diagnose(str(llama), text=text, length=16, num_sequences=2, out="named")
    for name in ("diagnosis.parquet",):
        ours, theirs = (pl.read_parquet(place / name) for place in (saved, Path("named")))
        assert ours.drop("model").equals(theirs.drop("model"))
    assert named.models[0].loss == found.models[0].loss


def test_options_are_checked_by_name_and_value(llama: Path) -> None:
    for given, message in (
        ({"lenght": 3}, "did you mean 'length'"),
        ({"length": 1}, "at least 2"),
        ({"length": "16"}, "length must be a whole number"),
        ({"data": "b"}, "no option 'data'"),
        ({"bos": "maybe"}, "bos must be one of auto, on, off"),
    ):
        with pytest.raises(wakeful.WakefulError, match=message):
            wakeful.diagnose(str(llama), **given)
    with pytest.raises(wakeful.WakefulError, match="name a model"):
        wakeful.diagnose()


@pytest.mark.parametrize(
    ("name", "bound"), [("float16", 0.05), ("bfloat16", 0.2), ("float64", 1e-5)]
)
def test_weights_are_loaded_in_the_type_that_is_named(llama: Path, name: str, bound: float) -> None:
    model = wakeful.load(llama, device="cpu", dtype=name)
    logits = model.logits(torch.arange(9)[None])
    kind = getattr(torch, name)
    assert {parameter.dtype for parameter in model.decoder().parameters()} == {kind}
    expected = wakeful.load(llama, device="cpu").logits(torch.arange(9)[None])
    assert (logits - expected).abs().max() < bound


def test_evaluations_are_read_and_saved(text: Path, llama: Path, tmp_path: Path) -> None:
    model = wakeful.load(llama)
    found = wakeful.evaluate(model, text=text / "000.txt", length=16, num_sequences=4)
    assert set(found.frame["metric"]) == {"perplexity", "bits per byte"}
    assert found.verdicts[0].startswith("llama reaches text: perplexity ")
    assert "<table" in found._repr_html_()
    assert Run.open(found.save(tmp_path / "e")).header.status == "done"


@pytest.mark.slow
def test_a_quantized_model_comes_back_with_its_damage(
    text: Path, llama: Path, tmp_path: Path
) -> None:
    bare = wakeful.quantize(llama, "fp8")
    tokens = torch.arange(12)[None]
    full = wakeful.load(llama)
    assert not torch.equal(bare.model.logits(tokens), full.logits(tokens))
    assert bare.model.name == "llama fp8"
    with pytest.raises(wakeful.WakefulError, match="nothing was measured"):
        _ = bare.frame
    told = "fp8: 15 linear layers; the output head too; not measured: no text was given"
    assert repr(bare) == f"<Quantization>\n  {told}"
    assert bare._repr_html_() == f"<div>\n<p><b>{told}</b></p></div>"
    found = wakeful.quantize(full, "fine", "w4", text=text, length=16, num_sequences=2)
    assert set(found.models) == {"fine", "w4"}
    with pytest.raises(wakeful.WakefulError, match="2 quantized models"):
        _ = found.model
    assert len(found.verdicts) == 1 + 2
    assert found.save(tmp_path / "q") == tmp_path / "q"
    assert Run.open(tmp_path / "q").read_json("run.json")["schemes"] == ["fine", "w4"]
    size = bare.save_model(tmp_path / "small")
    assert size["bytes"] == (tmp_path / "small" / "model.safetensors").stat().st_size
    again = wakeful.load(tmp_path / "small")
    torch.testing.assert_close(
        again.logits(tokens), bare.model.logits(tokens), rtol=1e-3, atol=1e-3
    )


@pytest.mark.slow
def test_a_run_is_trained_resumed_compared_and_exported(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny(text, train={"steps": 4, "eval_every": 0, "checkpoint_every": 2})
    run = wakeful.train(config, name="first")
    assert run.path == Path("runs/first")
    assert run.config.name == "first"
    assert run.frame.filter(pl.col("kind") == "train").height == 4
    assert "validation loss" in run.verdicts[0]
    assert "<img" in run._repr_html_()
    other = wakeful.train(
        config_to_table(config), out="other", name="other", model={"route": "svformer"}
    )
    assert other.config.model.route == "svformer"
    again = wakeful.train(resume="other", steps=6)
    assert again.config.train.steps == 6
    assert again.frame.filter(pl.col("kind") == "train").height == 6
    with pytest.raises(wakeful.WakefulError, match="lengthens"):
        wakeful.train(config, steps=6, out="third")
    assert wakeful.generate(run.path, "def ", num_tokens=3, seed=1) == wakeful.generate(
        run.model, "def ", num_tokens=3, seed=1
    )
    both = wakeful.report("runs/first", "other", out="both.html")
    assert both.frame["variant"].to_list() == ["first", "other"]
    assert Path("both.html").is_file()
    assert wakeful.export(run.model, "exported") == "llama"
    assert wakeful.load("exported").decoder().config.route == "own"
    assert run.save("copy") == Path("copy")
    assert wakeful.load("copy").name == "first"
    with pytest.raises(wakeful.WakefulError, match="exists already"):
        run.save("copy")
    with pytest.raises(wakeful.WakefulError, match="would lie elsewhere"):
        wakeful.train(config, name="../x")
    with pytest.raises(wakeful.WakefulError, match="resume"):
        wakeful.train(config, resume="other")
    with pytest.raises(wakeful.WakefulError, match="no tokenizer at x"):
        wakeful.train(config, data={"tokenizer": "x.json"}, out="y")
    with pytest.raises(wakeful.WakefulError, match="leave out one"):
        wakeful.train(config, data={"tokenizer": "x.json", "vocab_size": 512}, out="y")
    for folders in (["runs/first", "compared"], ["compared"]):
        Run("compared").refuse_existing("x") if not Path("compared").exists() else None
        if not Path("compared").exists():
            with Run.create("compared", "diagnose", {}):
                pass
        with pytest.raises(wakeful.WakefulError, match="compared is a diagnosis"):
            wakeful.report(*folders)


@pytest.mark.slow
def test_variants_are_compared_from_tables(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = config_to_table(tiny(text, train={"steps": 2, "eval_every": 0}))
    model = {**table["model"], "route": "svformer"}
    variants = [{**table, "name": "a"}, {**table, "name": "b", "model": model}]
    found = wakeful.compare(*variants, seeds=[0, 1], out="cmp")
    assert found.frame["variant"].to_list() == ["a", "b"]
    assert found.page == Path("cmp/report.html")
    assert found.verdicts
    assert "<p>Next: " in found._repr_html_()
    for seeds in ([-1], [2**63]):
        with pytest.raises(wakeful.WakefulError, match="a seed lies in"):
            wakeful.compare(*variants, seeds=seeds, out="none")
    with pytest.raises(wakeful.WakefulError, match="nothing to compare 'a' with"):
        wakeful.compare(variants[0], out="none")
    assert not Path("none").exists()


@pytest.mark.slow
def test_a_reference_in_memory_is_inherited_from_and_found_again(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    config = tiny(text, train={"steps": 2, "eval_every": 0})
    run = train_into(config, tmp_path / "reference")
    reference = wakeful.load(run.path)
    module = reference.decoder()
    out = tmp_path / "heirs"
    asked = {"layers": 1, "text": text, "steps": 2, "validation_fraction": 0.05, "out": out,
             "batch_size": 4, "length": 16}  # fmt: skip
    found = wakeful.inherit(module, tokenizer=reference.wakeful_tokenizer, **asked)
    assert found.path == out
    assert set(found.frame["arm"]) == {"heir-1"}
    assert found.model.decoder().config.num_layers == 1
    assert "<img" in found._repr_html_()
    kept = wakeful.load(out / "exported-reference").decoder().state_dict()
    assert all(torch.equal(kept[name], each) for name, each in module.state_dict().items())
    assert wakeful.inherit(resume=out).verdicts == found.verdicts
    with pytest.raises(wakeful.WakefulError, match="name none"):
        wakeful.inherit(module, resume=out)


def test_an_own_runs_context_is_the_default_length(text: Path, tmp_path: Path) -> None:
    run = train_into(tiny(text, train={"steps": 1}), tmp_path / "run")
    context = run.config.model.max_length
    assert context < 512
    found = wakeful.diagnose(run.path, text=text, num_sequences=1)
    assert found.models[0].length == context
    scores = wakeful.evaluate(run.path, text=text / "000.txt", num_sequences=2)
    assert f"windows of {context} tokens every {context}" in scores.method["Text"]
    damage = wakeful.quantize(run.path, "fine", text=text, num_sequences=1)
    assert f"sequences of {context} tokens" in damage.method["Text"]


def test_a_default_configuration_is_a_config() -> None:
    assert Config().train.length <= Config().model.max_length
