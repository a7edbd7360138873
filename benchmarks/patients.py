"""What the advised cure does to small models with attention sinks, and to any model.

    python -m benchmarks.patients                          # the twelve of small_models, and smollm2
    python -m benchmarks.patients llama smollm2=wiki.txt FOLDER=TEXT
    python -m benchmarks.patients --folder runs/patients --grow           # only train them

Each model is diagnosed and cured by the command that the diagnosis advises, as are those that the
cure advises in its turn; then the result is diagnosed, and its losses are compared in pairs. The
folder keeps models and figures, and nothing there is done twice. A patient reads its task's text,
another model python-stdlib or the text after "=".
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

import numpy as np
import torch

import wakeful
from benchmarks.small_models import CONFIGS, LENGTH, TEXT, grow
from wakeful.cli import main as run_command
from wakeful.estimates import paired_ratio, reach
from wakeful.evaluation.diagnosis import Diagnosis
from wakeful.evaluation.findings import findings, summary
from wakeful.reports.diagnosis import LEVELS

SMALL = {"length": LENGTH, "num_sequences": 8}
OTHER = {"length": 256, "num_sequences": 2}
"""Sequences of a diagnosis: of a patient and of another model, which is larger."""
SMALL_WINDOWS, OTHER_WINDOWS = 32, 16
"""Windows of the same length over which losses are compared."""
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
    losses: tuple[float, float] | None = None
    """In nats a token, before and after."""
    change: tuple[float, float] | None = None
    """Of the loss, paired by window, and half the width of its 95% interval."""
    output: str
    """What the last command printed."""

    @property
    def verdict(self) -> str:
        """What the cured model's own diagnosis finds, or why there is none."""
        if not self.commands:
            return f"{_ills(self.before)}; nothing advised"
        if self.after is None:
            return f"refused: {self.output.splitlines()[-1] if self.output else ''}"
        return _ills(self.after)


def _ills(figures: Mapping[str, Any]) -> str:
    levels = figures["levels"].items()
    return ", ".join(
        f"{level} {title}" for title, level in levels if level != "healthy"
    ).lower() or ("healthy")


def treat(
    name: str, model: str, reading: Mapping[str, Any], windows: int, folder: Path
) -> Treatment:
    """Diagnose a model, run what this advises, and diagnose what it wrote."""
    diagnosis = wakeful.diagnose(model, **reading)
    before = _figures(diagnosis.models[0])
    advice = _cures(step.command for step in diagnosis.report.steps)
    commands, output, cured = list[str](), "", ""
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
    after = _figures(wakeful.diagnose(cured, **reading).models[0])
    losses, change = _compare(model, cured, {**reading, "num_sequences": windows})
    return Treatment(
        name=name, before=before, commands=commands, after=after, losses=losses, change=change,
        output=output,
    )  # fmt: skip


def _figures(diagnosis: Diagnosis) -> dict[str, Any]:
    figures = summary(diagnosis)
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


def _compare(
    model: str, cured: str, reading: Mapping[str, Any]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return both losses, and their paired difference with half its 95% interval's width."""
    frame = wakeful.evaluate(model, cured, **reading).frame.filter(metric="perplexity")
    names = frame["model"].unique(maintain_order=True).to_list()
    plain, other = (frame.filter(model=name).sort("example") for name in names)
    weights = plain["weight"].to_numpy()
    losses = [rows["value"].to_numpy() / weights for rows in (plain, other)]
    change, error = paired_ratio(losses[1], losses[0], weights)
    means = [float(np.average(loss, weights=weights)) for loss in losses]
    return (means[0], means[1]), (change, reach(error, len(weights)))


def table(treatments: Iterable[Treatment]) -> Iterator[str]:
    """Yield the lines of a table in Markdown, a row a model."""
    yield (
        "| model | share | mass | kurtosis, first token | the rest | loss, nats a token | its "
        "change, 95% | advised | verdict |"
    )
    yield "|" + "---|" * 9
    for each in treatments:
        loss = change = "–"
        if each.losses and each.change:
            loss = "{:.3f} → {:.3f}".format(*each.losses)
            change = "{:+.4f} ± {:.4f}".format(*each.change).replace("-", "−")
        styles = {"share": ".1%", "mass": ".1%", "kurtosis_first": ".1f", "kurtosis_rest": ".1f"}
        figures = [
            " → ".join(f"{side[key]:{style}}" for side in (each.before, each.after) if side)
            for key, style in styles.items()
        ]
        cures = ", then ".join(f"`{_options(command)}`" for command in each.commands) or "–"
        yield f"| {' | '.join([each.name, *figures, loss, change, cures, each.verdict])} |"


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
        name, reading, windows = Path(model).name, {"text": text, **OTHER}, OTHER_WINDOWS
        if model in CONFIGS:
            place = options.folder / name
            if not place.exists():
                grow(name, place)
            model, reading = str(place), {"text": text or str(place / TEXT), **SMALL}
            windows = SMALL_WINDOWS
        file = figures / f"{name}.json"
        if options.grow or file.exists():
            continue
        treatment = treat(name, model, reading, windows, figures)
        file.write_text(json.dumps(asdict(treatment), indent=1) + "\n", encoding="utf-8")
        print(list(table([treatment]))[-1], flush=True)
    files = sorted(figures.glob("*.json"), key=lambda file: file.stat().st_mtime)
    treatments = [Treatment(**json.loads(file.read_text("utf-8"))) for file in files]
    print(*table(treatments), sep="\n")


if __name__ == "__main__":
    main()
