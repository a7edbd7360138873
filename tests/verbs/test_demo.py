"""The verb demo: three parts, one page, and what an interruption leaves."""

import html
import re
from pathlib import Path

import pytest

from training.runs import text, tiny
from wakeful.cli import main
from wakeful.config.schema import config_from_table
from wakeful.config.tables import merge_tables, to_table
from wakeful.demonstration import tool as demo
from wakeful.demonstration.report import Story
from wakeful.diagnosis.measure import read_diagnosis
from wakeful.diagnosis.tool import diagnose
from wakeful.errors import Interrupted, WakefulError
from wakeful.runs.run import Run
from wakeful.training.compared import read_comparison

__all__ = ["text"]


@pytest.fixture
def small(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the demonstration's parts as small as they can be."""
    table = text / "000.txt"
    shorter = {
        "data": {"source": f'backcopy(alphabet=9, text="{table}")'},
        "train": {"steps": 4, "batch_size": 2, "length": 16, "eval_every": 2,
                  "diagnose": {"every": 2}},
    }  # fmt: skip
    patient = {
        name: config_from_table(merge_tables(to_table(config), shorter))
        for name, config in demo.patient_configs().items()
    }
    twins = {
        "vanilla": tiny(text, name="vanilla"),
        "softmax1": tiny(text, name="softmax1", model={"normalizer": "softmax1"}),
    }
    monkeypatch.setattr(demo, "patient_configs", lambda: patient)
    monkeypatch.setattr(demo, "twin_configs", lambda: twins)
    monkeypatch.setattr(demo, "has_smollm2", lambda: False)


def test_the_patient_and_its_cure_are_those_of_the_preset() -> None:
    vanilla, cure = demo.patient_configs().values()
    assert vanilla.model.normalizer == "softmax"
    assert cure.model.normalizer == "softmax1(learned=True, start=4.0)"
    assert vanilla.train == cure.train
    assert vanilla.train.steps % vanilla.train.diagnose.every == 0  # the last frame is the end's


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_a_demonstration_that_was_interrupted_goes_on_to_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def stopped(*_: object, **__: object) -> None:
        raise Interrupted("stopped", "go on")

    with monkeypatch.context() as stopping:
        stopping.setattr(demo, "_diagnose_once", stopped)
        with pytest.raises(Interrupted):
            demo.demonstrate(out)
    assert Run(out).header.status == "stopped"
    assert not (out / "demo.html").exists()
    with pytest.raises(WakefulError, match="or go on with what is there by --resume"):
        demo.demonstrate(out)
    with pytest.raises(WakefulError, match=r"holds no demonstration: run\.json calls it 'compare'"):
        demo.demonstrate(out / "twins", resume=True)

    weights = out / "patient/vanilla/seed-0/checkpoints/step-00000004/model.safetensors"
    written = weights.stat().st_mtime_ns
    assert main(["demo", "--out", str(out), "--resume"]) == 0
    assert weights.stat().st_mtime_ns == written
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"report: {out / 'demo.html'}"
    assert any("demo: three parts; very roughly" in line for line in lines)
    page = (out / "demo.html").read_text()
    outside = html.unescape(re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL))
    [patient] = (line for line in lines if " steps vanilla " in line)
    [twins] = (line for line in lines if line.startswith("softmax1 "))
    [absent] = (line for line in lines if "not diagnosed" in line)
    for sentence in (patient, twins, absent):
        assert sentence in outside
    mass = Run(out / "patient" / "vanilla" / "seed-0").trajectories()
    mass = mass.filter(metric="bos_mass", position="other", head=0).sort("step")["value"]
    assert f"gives BOS {mass[-1]:.1%} of its attention ({mass[0]:.1%} before training)" in patient
    assert "softmax1 and vanilla" in twins or "softmax1 ends" in twins
    assert "SmolLM2 was not diagnosed" in absent
    addresses = re.findall(r'<a href="([^"#]*)"', outside)
    assert len(addresses) == 4
    assert all((out / address).is_file() for address in addresses)
    # Nothing is fetched.
    assert not re.search(
        r"\b(srcset|action)\s*=|\bsrc\s*=(?!\"data:)|url\((?!%23)|@import|<link|<base", outside
    )
    assert Run(out).header.status == "done"

    # What is done is not done again, and is read as it was written.
    monkeypatch.setattr(demo, "diagnose", lambda *_, **__: pytest.fail("it is diagnosed"))
    (out / "demo.html").unlink()
    again = demo.demonstrate(out, resume=True, figures=("svg",))
    assert (out / "figures" / "twins-training-loss-minus-the-baselines.svg").is_file()
    assert again.page.read_text() == page
    assert {patient, twins, absent} <= {*again.report.sentences}
    [step] = again.report.steps
    assert step.command == f"wakeful diagnose {out / 'patient' / 'vanilla' / 'seed-0'}"
    found = read_diagnosis(out / "diagnosis-twins")[1]
    fresh = diagnose(out / "twins" / "softmax1" / "seed-0").models[0]
    assert found.rows.equals(fresh.rows)
    assert (found.name, found.loss, found.length) == (fresh.name, fresh.loss, fresh.length)
    told = read_comparison(out / "twins")
    story = Story(read_comparison(out / "patient"), told, found)
    assert re.match(r"\S+ has (no|some|strong) attention sinks: the first ", story.sentences[2])
