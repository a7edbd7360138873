"""What the advised cure does to small models with attention sinks, and to any model.

    python -m benchmarks.patients                          # the twelve of small_models, and smollm2
    python -m benchmarks.patients llama smollm2=wiki.txt FOLDER=TEXT
    python -m benchmarks.patients --folder runs/patients --grow           # only train them

Each model is diagnosed and cured by the command that the diagnosis advises, as are those that the
cure advises in its turn; then the result is diagnosed. The change of the loss is the cure's own: on
the same tokens, paired by window. The folder keeps models and figures, and nothing there is done
twice. A patient reads its task's text, another model python-stdlib or the text after "=".
"""

import argparse
import contextlib
import io
import json
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import wakeful
from benchmarks.small_models import CONFIGS, LENGTH, TEXT, grow
from wakeful.cli import main as run_command
from wakeful.diagnosis.measure import ModelDiagnosis
from wakeful.diagnosis.report import LEVELS
from wakeful.diagnosis.verdict import diagnosis_summary, findings

SMALL = {"length": LENGTH, "num_sequences": 8}
OTHER = {"length": 256, "num_sequences": 4}
"""Sequences to read: a patient, and another model, which is larger."""
MOST_CURES = 3
"""Advised cures that are tried on one model."""
NEXT = re.compile(r"^Next: .*?\. (wakeful .*)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """What a model showed before and after the cure that its diagnosis advised."""

    name: str
    before: dict[str, Any]
    """Figures of a diagnosis, and the levels of its findings."""
    commands: list[str]
    """The advised command lines, one after another; the last wrote the cured model."""
    after: dict[str, Any] | None = None
    change: tuple[float, float] | None = None
    """Of the loss in nats per token, and half the width of its 95% interval."""
    output: str
    """What the last command printed; without one, what the diagnosis says to do."""

    @property
    def verdict(self) -> str:
        """What the cured model's own diagnosis finds, or why there is none."""
        if not self.commands:
            return f"{_ills(self.before)}; {self.output}"
        if self.after is None:
            return f"refused: {self.output.splitlines()[-1] if self.output else ''}"
        return _ills(self.after)


def _ills(figures: Mapping[str, Any]) -> str:
    levels = figures["levels"].items()
    return ", ".join(
        f"{level} {title}" for title, level in levels if level != "healthy"
    ).lower() or ("healthy")


def treat(name: str, model: str, reading: Mapping[str, Any], folder: Path) -> Treatment:
    """Diagnose a model, run what this advises, and diagnose what it wrote."""
    diagnosis = wakeful.diagnose(model, **reading)
    (model_diagnosis,) = diagnosis.models
    before = _figures(model_diagnosis)
    advice = _cures(step.command for step in diagnosis.report.steps)
    commands, cured = list[str](), ""
    output = model_diagnosis.advice.words if model_diagnosis.advice else "nothing to cure"
    while advice and len(commands) < MOST_CURES:
        out = folder / f"{name}-cured-{len(commands) + 1}"
        shutil.rmtree(out, ignore_errors=True)
        commands.append(advice[0])
        status, output = _run(_completed(advice[0], reading, out))
        if status:
            break
        cured = str(out)
        advice = [each for each in _cures(NEXT.findall(output)) if each not in commands]
    if not cured:
        return Treatment(name=name, before=before, commands=commands, output=output)
    after = _figures(wakeful.diagnose(cured, **reading, no_advice=True).models[0])
    return Treatment(
        name=name, before=before, commands=commands, after=after, change=_change(cured),
        output=output,
    )  # fmt: skip


def _figures(diagnosis: ModelDiagnosis) -> dict[str, Any]:
    figures = diagnosis_summary(diagnosis)
    return {
        "share": figures["first_key_share_without_row_0"],
        "mass": figures["first_key_mass_without_row_0"],
        "kurtosis_first": figures["kurtosis_first"],
        "kurtosis_rest": figures["kurtosis_rest"],
        "levels": {each.title: LEVELS[each.level] for each in findings(diagnosis)},
    }


def _cures(commands: Iterable[str]) -> list[str]:
    return [command for command in commands if command.startswith("wakeful cure ")]


def _completed(command: str, reading: Mapping[str, Any], out: Path) -> list[str]:
    """Return the words after `wakeful`, with the text of the diagnosis and a folder of ours."""
    words = shlex.split(command)[1:]
    for key, value in {**reading, "out": out}.items():
        option = f"--{key}"
        if option not in words:
            words += [option, str(value)]
        elif key == "out":
            words[words.index(option) + 1] = str(value)
    return words


def _run(words: Sequence[str]) -> tuple[int, str]:
    """Return the exit status of a command and all that it printed."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        status = run_command(list(words))
    return status, stream.getvalue()


def _change(cured: str) -> tuple[float, float]:
    """Return the change of the loss that a cure wrote, and half its 95% interval's width."""
    change = json.loads((Path(cured) / "cure.json").read_text("utf-8"))["loss_change"]
    low, high = change["interval"]
    return change["change"], (high - low) / 2


def table(treatments: Iterable[Treatment]) -> Iterator[str]:
    """Yield the lines of a table in Markdown, a row a model."""
    yield (
        "| model | share | mass | kurtosis, first token | the rest | change of the loss, 95% "
        "| advised | verdict |"
    )
    yield "|" + "---|" * 8
    for each in treatments:
        change = "{:+.4f} ± {:.4f}".format(*each.change).replace("-", "−") if each.change else "–"
        styles = {"share": ".1%", "mass": ".1%", "kurtosis_first": ".1f", "kurtosis_rest": ".1f"}
        figures = [
            " → ".join(f"{side[key]:{style}}" for side in (each.before, each.after) if side)
            for key, style in styles.items()
        ]
        cures = ", then ".join(f"`{_options(command)}`" for command in each.commands) or "–"
        yield f"| {' | '.join([each.name, *figures, change, cures, each.verdict])} |"


def _options(command: str) -> str:
    """Return a cure's options, without the text to read and the folder."""
    words = shlex.split(command)[3:]
    for option in ("--text", "--length", "--num_sequences", "--out"):
        if option in words:
            place = words.index(option)
            del words[place : place + 2]
    return shlex.join(words)


def main() -> None:
    """Treat the models that the command line names, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", help="patients by name, or MODEL=TEXT; default: all")
    parser.add_argument("--folder", type=Path, default=Path("runs/patients"))
    parser.add_argument("--figures", type=Path, help="folder of figures; default: FOLDER/figures")
    parser.add_argument("--grow", action="store_true", help="only train patients")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: Path = options.figures or options.folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for argument in options.models or [*CONFIGS, "smollm2"]:
        model, _, text = argument.partition("=")
        name, reading = Path(model).name, {"text": text, **OTHER}
        if model in CONFIGS:
            place = options.folder / name
            if not place.exists():
                grow(name, place)
            model, reading = str(place), {"text": text or str(place / TEXT), **SMALL}
        file = figures / f"{name}.json"
        if options.grow or file.exists():
            continue
        treatment = treat(name, model, reading, figures)
        file.write_text(json.dumps(asdict(treatment), indent=1) + "\n", encoding="utf-8")
        print(list(table([treatment]))[-1], flush=True)
    files = sorted(figures.glob("*.json"), key=lambda file: file.stat().st_mtime)
    treatments = [Treatment(**json.loads(file.read_text("utf-8"))) for file in files]
    print(*table(treatments), sep="\n")


if __name__ == "__main__":
    main()
