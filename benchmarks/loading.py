"""Loading and exporting SmolLM2 against Transformers: times in turns, peaks in fresh processes."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from benchmarks.resident import resident
from benchmarks.timing import Ratio, compare
from wakeful.hf.checkpoint_reader import smollm2_folder
from wakeful.hf.weights_out import export_decoder
from wakeful.loading.load import read_decoder
from wakeful.model.decoder import Decoder

TOKENS = torch.arange(64).unsqueeze(0)
"""A forward pass ends each load: weights are mapped first and read when they are used."""


def ratios() -> Iterator[Ratio]:
    """Yield ratios of times, then of peak memory (its "seconds" are MB)."""
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as place:
        jobs = _jobs(Path(place))
        for what in ("load", "load and run", "export"):
            ours, theirs = jobs[what, "ours"], jobs[what, "theirs"]
            yield compare(what, ours, "Transformers", theirs, rounds=9, target="<= 1.20")
    for what in ("load and run", "export"):
        ours, theirs = (_peak_apart(what, side) for side in ("ours", "theirs"))
        ratio = ours / theirs
        yield Ratio(
            name=f"{what}, peak memory (MB)",
            peer="Transformers",
            ratio=ratio,
            low=ratio,
            high=ratio,
            seconds=ours,
            peer_seconds=theirs,
            target="<= 1.20",
        )


def _jobs(place: Path) -> dict[tuple[str, str], Callable[[], object]]:
    folder, out = smollm2_folder(), place / "out"

    def load_ours() -> Decoder:
        return read_decoder(folder).decoder()

    def load_theirs() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    read, model = read_decoder(folder), load_theirs()
    decoder = read.decoder()

    def export_ours() -> None:
        shutil.rmtree(out, ignore_errors=True)
        export_decoder(decoder, out, tokenizer=read.wakeful_tokenizer)

    def export_theirs() -> None:
        shutil.rmtree(out, ignore_errors=True)
        model.save_pretrained(out)

    @torch.inference_mode()
    def run(load: Callable[[], torch.nn.Module]) -> object:
        return load()(TOKENS)

    return {
        ("load", "ours"): load_ours,
        ("load", "theirs"): load_theirs,
        ("load and run", "ours"): lambda: run(load_ours),
        ("load and run", "theirs"): lambda: run(load_theirs),
        ("export", "ours"): export_ours,
        ("export", "theirs"): export_theirs,
    }


def _peak_apart(what: str, side: str) -> float:
    command = [sys.executable, "-m", "benchmarks.loading", what, side]
    return float(subprocess.check_output(command, text=True).split()[-1])


def _peak(what: str, side: str) -> float:
    """Return how many MB the largest resident size grows by."""
    disable_progress_bar()
    folder = smollm2_folder()
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out"
        before = resident("VmRSS")
        model: torch.nn.Module
        if side == "ours":
            found = read_decoder(folder)
            model = found.decoder()
            write = partial(export_decoder, model, tokenizer=found.wakeful_tokenizer)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            write = model.save_pretrained
        if what == "load and run":
            with torch.inference_mode():
                model(TOKENS)
        else:
            write(out)
        return resident("VmHWM") - before


if __name__ == "__main__":
    print(_peak(*sys.argv[1:3]))
