"""Try every cure and trained model in every engine that is here, and write the table of
docs/serve.md:

    python tools/served.py FOLDER --reader transformers=PYTHON --reader vllm=PYTHON \
        --reader llama.cpp=PYTHON

FOLDER takes the exports, and PYTHON is the interpreter of an environment with that engine, which
need not have wakeful. What was measured goes to docs/served.json; `--check` says whether the page
has the table of that file.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from readers import BEGINS, WRITTEN

from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.gguf_out import export_gguf
from wakeful.hf.weights_out import export_decoder as write
from wakeful.hf.weights_out import stock_architecture
from wakeful.loading.load import read_decoder
from wakeful.model import Decoder, ModelConfig, generate, initialize
from wakeful.surgery import learned_sinks, rotate, store_prefix
from wakeful_papers import norms  # noqa: F401  # a model below names one of its classes

ROOT = Path(__file__).resolve().parent.parent
PAGE, MEASURED = ROOT / "docs" / "serve.md", ROOT / "docs" / "served.json"
FROM = "<!-- python tools/served.py writes what follows -->\n"
TO = "<!-- and ends here -->\n"
TOKENS = 201
"""Tokens of English that are read."""
COLUMNS = {
    "transformers": "Transformers", "vllm float32": "vLLM, float32",
    "vllm bfloat16": "vLLM, bfloat16", "ours bfloat16": "ours, bfloat16", "llama.cpp": "llama.cpp",
    "mlx-lm": "mlx-lm",
}  # fmt: skip
SMALL = {
    "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "width": 128, "mlp_width": 256,
    "max_length": 256,
}  # fmt: skip
TRAINED: dict[str, dict[str, Any]] = {
    'normalizer = "softmax1"': {"normalizer": "softmax1"},
    'normalizer = "softmax1(learned=True)"': {"normalizer": "softmax1(learned=True)"},
    'the same, norm = "layernorm_scaling"': {
        "normalizer": "softmax1(learned=True)", "norm": "layernorm_scaling",
    },
    'embedding = "scaled"': {"embedding": "scaled"},
    'route = "resformer"': {"route": "resformer"},
    'route = "svformer"': {"route": "svformer"},
    'route = "cla(group=2)", normalizer = "softmax1"': {
        "route": "cla(group=2)", "normalizer": "softmax1",
    },
    'route = "output_gate", norm = "wakeful_papers.norms:GatedNorm"': {
        "route": "output_gate", "norm": "wakeful_papers.norms:GatedNorm",
    },
    'depth = "mudd", placement = "peri"': {"depth": "mudd", "placement": "peri"},
    'depth = "hyper_connections"': {"depth": "hyper_connections"},
    'a GPT-2 with normalizer = "softmax1"': {
        "normalizer": "softmax1", "norm": "layernorm", "mlp": "gelu", "bias": True,
        "positions": "learned", "num_kv_heads": 4,
    },
    'normalizer = "sigmoid"': {"normalizer": "sigmoid"},
    'route = "differential"': {"route": "differential"},
}  # fmt: skip
Job = dict[str, Any]


@torch.no_grad()
def likelihoods(made: Decoder, tokens: list[int]) -> list[float]:
    """Return each token's log probability given those before it, without the first's."""
    logits = made(torch.tensor([tokens[:-1]]))[0].float().log_softmax(-1)
    return logits.gather(1, torch.tensor(tokens[1:]).unsqueeze(1))[:, 0].tolist()


def decoders() -> Iterator[tuple[str, Callable[[], Decoder], Tokenizer, list[int]]]:
    """Yield what is exported: a name, what makes the decoder, its tokenizer, and what to read."""
    english = (ROOT / "docs" / "getting-started.md").read_text("utf-8")
    more = (ROOT / "docs" / "archive" / "findings.md").read_text("utf-8")
    loaded = read_decoder("smollm2", dtype=torch.float32)
    known, plain = loaded.wakeful_tokenizer, loaded.decoder()
    rows = torch.tensor(known.encode(more)[: 16 * 256]).view(16, 256)
    bos = known.bos
    assert bos is not None
    cures: dict[str, Callable[[], Decoder]] = {
        "`--rotate hadamard`": lambda: rotate(plain, "hadamard"),
        "`--rotate_inner`": lambda: rotate(plain, "identity", inner=True),
        "`--prefix bos`": lambda: store_prefix(plain, [bos]),
        "`store_prefix` with two tokens": lambda: store_prefix(plain, [bos, known.encode("\n")[0]]),
        "`--sinks`": lambda: learned_sinks(plain, bos, rows),
    }
    for name, cured in cures.items():
        yield name, cured, known.without_bos(), known.encode(english)[:TOKENS]
    small = Tokenizer.train([more], 512)
    ids = torch.tensor(small.encode(more))
    for name, parts in TRAINED.items():
        yield name, partial(trained, parts, ids), small, small.encode(english)[:TOKENS]


def trained(parts: dict[str, Any], ids: torch.Tensor) -> Decoder:
    """Return a small model after 40 steps of 4 × 128 tokens."""
    made = initialize(Decoder(ModelConfig(vocab_size=512, **{**SMALL, **parts})), seed=0)
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(0)
    for _ in range(40):
        begins = torch.randint(len(ids) - 129, (4,), generator=draw).tolist()
        batch = torch.stack([ids[begin : begin + 129] for begin in begins])
        optimizer.zero_grad()
        made.loss(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()
    return made


def export(folder: Path) -> None:
    """Export all of them to folders and, where one can be, a GGUF file; write what readers get.

    What is there already stays.
    """
    file = folder / "jobs.json"
    jobs: list[Job] = json.loads(file.read_text("utf-8")) if file.is_file() else []
    for number, (name, make, tokenizer, tokens) in enumerate(decoders()):
        if number < len(jobs):
            continue
        place = folder / str(number)
        made = (read_decoder(place).decoder() if place.is_dir() else make()).eval()
        job: Job = {"name": name, "folder": str(place), "tokens": tokens, "gguf": ""}
        job["kind"] = stock_architecture(made.config)[0]
        if not place.is_dir():
            write(made, place, tokenizer=tokenizer)
        try:
            path = place.with_suffix(".gguf")
            if not path.is_file():
                export_gguf(made, path, tokenizer=tokenizer, storage="f32")
            job["gguf"] = str(path)
        except WakefulError as error:
            job["no file"] = str(error)
        job["ours"] = likelihoods(made, tokens)
        written = generate(made, tokens[:BEGINS], num_tokens=WRITTEN, temperature=0)
        job["text"] = list(written)
        job["rounded"] = likelihoods(made.bfloat16(), tokens)
        jobs.append(job)
        file.write_text(json.dumps(jobs), "utf-8")
        print(f"{name}: {job['kind']}", flush=True)


QUIET = {
    "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def read(reader: str, python: str, jobs: Path, dtype: str) -> tuple[list[dict[str, Any]], str]:
    """Have another environment's interpreter read the jobs; return its answers and version."""
    answers = jobs.with_name(f"{reader}-{dtype}.jsonl")
    environment = {**os.environ, **QUIET}
    environment.pop("PYTHONPATH", None)
    readers = str(Path(__file__).with_name("readers.py"))
    command = [python, readers, reader, dtype, str(jobs), str(answers)]
    wanted = len(json.loads(jobs.read_text("utf-8")))
    if not answers.is_file() or len(answers.read_text("utf-8").splitlines()) <= wanted:
        subprocess.run(command, env=environment, cwd=jobs.parent, check=True)
    first, *rest = map(json.loads, answers.read_text("utf-8").splitlines())
    return rest, first["version"]


def cell(job: Job, found: dict[str, Any]) -> dict[str, Any]:
    """Return what a table says of an answer."""
    if "refused" in found:
        return {"refused": found["refused"]}
    ours = [job["ours"][at] for at in found.get("at", range(len(job["ours"])))]
    apart = max(abs(a - b) for a, b in zip(ours, found["logprobs"], strict=True))
    return {"difference": apart, "same text": found["text"] == job["text"]}


def measure(folder: Path, readers: dict[str, str]) -> None:
    """Export, read and write what was found to docs/served.json; other readers' cells stay."""
    jobs = folder / "jobs.json"
    folder.mkdir(parents=True, exist_ok=True)
    export(folder)
    made = json.loads(jobs.read_text("utf-8"))
    old = json.loads(MEASURED.read_text("utf-8")) if MEASURED.is_file() else {}
    rows = {
        job["name"]: old.get("rows", {}).get(job["name"], {})
        | {
            "written as": job["kind"],
            "ours bfloat16": cell(job, {"logprobs": job["rounded"], "text": job["text"]}),
        }
        for job in made
    }
    versions = old.get("versions", {})
    for reader, python in readers.items():
        for dtype in ("float32", "bfloat16") if reader == "vllm" else ("float32",):
            answers, versions[reader] = read(reader, python, jobs, dtype)
            column = f"{reader} {dtype}" if reader == "vllm" else reader
            for job, found in zip(made, answers, strict=False):  # a reader may have been stopped
                rows[job["name"]][column] = cell(job, found)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    table = {"date": today, "versions": versions, "rows": rows}
    MEASURED.write_text(json.dumps(table, indent=1) + "\n", "utf-8")


def drawn() -> str:
    """Return the table of what was measured."""
    found = json.loads(MEASURED.read_text("utf-8"))
    versions = ", ".join(found["versions"].values())
    lines = [
        f"Measured on {found['date']} with {versions}.", "",
        f"| cure or model | written as | {' | '.join(COLUMNS.values())} |",
        f"|---|---|{'---|' * len(COLUMNS)}",
    ]  # fmt: skip
    for name, row in found["rows"].items():
        kind = "our class" if row["written as"] == "wakeful" else f"`{row['written as']}`"
        cells = [_said(row.get(column)) for column in COLUMNS]
        shown = name if "`" in name else re.sub(r'(\w+ = "[^"]*")', r"`\1`", name)
        lines.append(f"| {shown} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _said(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not measured"
    if "refused" in found:
        why = re.search(
            r"model\..*?(?=\); export|, which no| makes| attends| add|$)", found["refused"]
        )
        if why is None:
            why = re.search(r"(?<=Model type )\w+(?= not supported)", found["refused"])
        return f"refused: `{why[0]}`" if why else f"refused: {found['refused']}"
    apart = f"{found['difference']:.1e}" if found["difference"] else "0"
    return f"{apart}{'' if found['same text'] else ', other text'}"


def main() -> int:
    """Return 0 where all went well, or the page is as the file is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", nargs="*")
    parser.add_argument("--reader", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.places:
        measure(Path(given.places[0]).resolve(), dict(each.split("=", 1) for each in given.reader))
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(FROM)
    whole = f"{before}{FROM}\n{drawn()}\n{TO}{rest.partition(TO)[2]}"
    if given.check:
        return int(whole != text)
    PAGE.write_text(whole, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
