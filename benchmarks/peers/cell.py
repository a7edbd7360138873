"""One cell: quantize a model by one tool's method in one format, and read text with it.

Run as `python -m benchmarks.peers.cell JOB`, in the tool's environment; it needs torch,
Transformers and the tool. The figures go to the job's `out`, or why there are none.
"""

import json
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.peers.formats import FORMATS, group_of
from benchmarks.timing import synchronize

Logits = Callable[[Tensor], Tensor]
"""Token ids (1, L) to logits (1, L, vocabulary)."""


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Return the losses of every window of every text, seconds, bytes and peak memory."""
    torch.manual_seed(0)
    torch.set_num_threads(job["threads"])
    device = job["device"]
    model: PreTrainedModel = (
        AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval().to(device)
    )
    calibration = [torch.tensor([window], device=device) for window in job["calibration"]]
    form = FORMATS[job["format"]] if job["format"] else None
    found: dict[str, Any] = {"bytes": None, "seconds": 0.0, "group": 0}
    asked: nn.Module = model
    save: Callable[[nn.Module, Path], None] | None = None
    if form is not None:
        widths = {
            module.in_features
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and not name.endswith("lm_head")
        }
        tool = import_module(f"benchmarks.peers.with_{job['tool']}")
        found["group"] = group_of(widths)
        start = time.perf_counter()
        asked = tool.quantized(model, job["method"], form, calibration, found["group"], job)
        synchronize()
        found["seconds"] = time.perf_counter() - start
        save = getattr(tool, "save", None)
    logits = logits_of(asked, device)
    found["losses"] = {name: losses(logits, windows) for name, windows in job["texts"].items()}
    found["tasks"] = {
        name: [scores(logits, item) for item in items] for name, items in job["tasks"].items()
    }
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_initialized():
        found["peak"] = torch.cuda.max_memory_allocated()
    if save is not None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "saved"
            try:
                save(asked, path)
                found["bytes"] = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
            except Exception as error:  # a tool that cannot write it has no bytes to compare
                found["unsaved"] = f"{type(error).__name__}: {error}"[:300]
    return found


def logits_of(model: nn.Module, device: str) -> Logits:
    """Return what gives logits on the processor, whichever class a tool returned."""
    model = model.to(device)  # llm-compressor leaves it elsewhere
    if isinstance(model, PreTrainedModel):  # with a cache, which some formats quantize
        return lambda tokens: model(input_ids=tokens.to(device), use_cache=True).logits.cpu()
    return lambda tokens: model(tokens.to(device)).cpu()


@torch.no_grad()
def losses(logits: Logits, windows: Sequence[Sequence[int]]) -> list[float]:
    """Return the mean loss of each window, in nats a token, summed in float64."""
    found = []
    for window in windows:
        tokens = torch.tensor([window])
        found.append(cross_entropy(logits(tokens)[0, :-1].double(), tokens[0, 1:]).item())
    return found


@torch.no_grad()
def scores(logits: Logits, item: dict[str, Any]) -> float:
    """Return 1 where the right continuation of several has the largest log probability a byte; or,
    of a single one, where the most likely token is right at each place.
    """
    best: list[float] = []
    for ending, size in zip(item["endings"], item["sizes"], strict=True):
        tokens = torch.tensor([item["start"] + ending])
        rows = logits(tokens)[0, -len(ending) - 1 : -1].double().log_softmax(-1)
        wanted = torch.tensor(ending)
        if len(item["endings"]) == 1:
            return float((rows.argmax(-1) == wanted).all())
        best.append(rows.gather(1, wanted[:, None]).sum().item() / size)
    return float(max(range(len(best)), key=best.__getitem__) == item["right"])


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    try:
        figures = main(asked)
    except Exception as error:  # what a tool does not do is a result
        traceback.print_exc()
        figures = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    Path(asked["out"]).write_text(json.dumps(figures), "utf-8")
