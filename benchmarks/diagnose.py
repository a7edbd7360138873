"""What diagnosing a model costs, as ratios measured side by side in one run.

    python benchmarks/diagnose.py --model SMOLLM2_FOLDER --text LONG_TEXT_FILE

Without --model: a random model of SmolLM2-135M's shape; without --text: random tokens. The figures:

    overhead   a watched forward over a plain SDPA forward, all metrics except rank
    rank       torch.linalg.svdvals over the certified ranks, a head, and integers that differ
    memory     peak resident memory over the loaded model (Linux), a process for each length
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

from wakeful.probes import exact
from wakeful.probes.base import AttentionEvent, Event, Frame, Probe, gather
from wakeful.probes.blocks import BlockInfluence
from wakeful.probes.certificates import column_bounds
from wakeful.probes.concentration import Entropy, Importance
from wakeful.probes.gram import matrix_rank
from wakeful.probes.hidden import OutlierChannels, Outliers, Smoothing
from wakeful.probes.rank import Rank
from wakeful.probes.sinks import FirstToken
from wakeful.probes.streaming import head_weights
from wakeful.probes.values import Values
from wakeful.probes.watch import watch


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        print(peak(arguments, arguments.peak))
        return
    model = load(arguments.model)
    with torch.inference_mode():
        for length in arguments.lengths:
            overhead(model, tokens(arguments, length), arguments.repeats)
        figures(model, tokens(arguments, 1024))
        ranks(model, tokens(arguments, 1024))
    if arguments.memory:
        memory(arguments)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="", help="folder of a Transformers causal LM")
    parser.add_argument("--text", default="", help="text file; repeated where it is too short")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--memory", type=int, nargs="*", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--peak", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def load(folder: str) -> PreTrainedModel:
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        tie_word_embeddings=True, initializer_range=0.06,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tokens(arguments: argparse.Namespace, length: int) -> torch.Tensor:
    if not (arguments.text and arguments.model):
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, 49152, (1, length), generator=generator)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    text = Path(arguments.text).read_text()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return torch.tensor([(ids * (length // len(ids) + 1))[:length]])


def cheap_probes() -> tuple[Probe, ...]:
    """Every metric except rank."""
    return (
        FirstToken(), Entropy(), Importance(), Values(), Outliers(), Smoothing(), OutlierChannels(),
        BlockInfluence(),
    )  # fmt: skip


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def overhead(model: PreTrainedModel, ids: torch.Tensor, repeats: int) -> None:
    """Compare plain and watched forwards, taken in turns so that both meet the same machine."""

    def plain() -> None:
        model(ids, use_cache=False)

    def watched() -> None:
        with watch(model, *cheap_probes()):
            model(ids, use_cache=False)

    plain()
    pairs = [(seconds(plain), seconds(watched)) for _ in range(repeats)]
    alone, beside = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"overhead  L={ids.shape[1]:<5} plain {alone:7.2f} s  watched {beside:7.2f} s  "
        f"ratio {beside / alone:.3f}"
    )


class Matrices(Probe):
    """Keeps every head's explicit weights, and whether certificates settle its rank."""

    def __init__(self) -> None:
        self.heads: list[tuple[bool, torch.Tensor]] = []

    def see(self, event: Event) -> None:
        if isinstance(event, AttentionEvent):
            found = event.statistics[0]
            bounds = column_bounds(
                found.column_sums, found.column_energy, found.largest_row_sum, 0.9
            )
            for head, known in enumerate(bounds):
                weights = head_weights(event.sequences[0], head)
                self.heads.append((known.closed, weights))

    def rows(self) -> Frame:
        return gather([])


def ranks(model: PreTrainedModel, ids: torch.Tensor) -> None:
    matrices = Matrices()
    with watch(model, matrices):
        model(ids, use_cache=False)

    probe = Rank(tau=0.9)
    with watch(model, FirstToken(), probe):
        model(ids, use_cache=False)
    rows = probe.rows().filter(metric="rank", variant="paper")
    got = rows.filter(rows["head"].is_not_null()).sort("layer", "head")["value"].to_list()
    svd, ours, wrong, certified = 0.0, 0.0, 0, 0.0
    for (closed, A), value in zip(matrices.heads, got, strict=True):
        started = time.perf_counter()
        true = int(exact.rank(A, 0.9))
        svd += time.perf_counter() - started
        took = seconds(lambda A=A: matrix_rank(A, 0.9)) if not closed else 0.0
        ours += took
        certified += closed
        wrong += true != int(value)
    count = len(got)
    print(
        f"rank      L={ids.shape[1]:<5} {count} heads, {int(certified)} by certificate alone\n"
        f"          svdvals {svd:7.2f} s  ours in all {probe.spent:7.2f} s  ratio "
        f"{svd / probe.spent:.2f}  (in turns, head by head: {svd / ours:.2f})\n"
        f"          integers that differ: {wrong} of {count}"
    )
    near = [A for (closed, A), value in zip(matrices.heads, got, strict=True) if closed]
    if near:
        stacked = torch.stack(near)
        c1, c2 = stacked.sum(1), stacked.square().sum(1)
        one = torch.ones(len(near))
        took = min(seconds(lambda: column_bounds(c1, c2, one, 0.9)) for _ in range(5))
        each = svd / count
        print(
            f"          near-rank-1 heads: {took / len(near) * 1e6:.1f} µs a head by certificate, "
            f"{each * 1e3:.0f} ms by svdvals: {each * len(near) / took:.0f}×"
        )


def figures(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Print what TARGETS gives for the model, over Transformers' own list of hidden states."""
    outliers, first = Outliers(), FirstToken()
    with watch(model, outliers, first, Rank()) as w:
        output = model(ids, labels=ids, use_cache=False, output_hidden_states=True)
    rows = w.rows()
    layers = rows.filter(rows["head"].is_null())

    def mean(metric: str, position: str) -> float:
        return layers.filter(metric=metric, position=position, variant="paper")["value"].mean()

    print(f"figures   loss {output.loss.item():.3f}")
    print(f"          first-key mass {mean('first_key_mass', 'all'):.3f}")
    print(f"          first-key share {mean('first_key_share', 'all'):.4f}")
    states = [h[0].float() for h in output.hidden_states]
    kurtosis = torch.stack([exact.kurtosis(h) for h in states])
    largest = torch.stack([exact.token_max_activation(h) for h in states])
    print(
        f"          kurtosis {kurtosis[:, 0].mean():.0f} / {kurtosis[:, 1:].mean():.0f} over "
        f"Transformers' states, {mean('kurtosis', 'first'):.0f} / {mean('kurtosis', 'rest'):.0f} "
        "over block outputs and the embedding"
    )
    print(
        f"          max |x| {largest[:, 0].mean():.0f} / {largest[:, 1:].mean():.0f} over "
        "Transformers' states, "
        f"{mean('max_activation', 'first'):.0f} / {mean('max_activation', 'rest'):.0f}"
        " over block outputs and the embedding"
    )
    ranks = rows.filter(metric="rank", variant="paper")
    heads = ranks.filter(ranks["head"].is_not_null()).sort("layer", "head")
    top = ranks.filter(ranks["head"].is_null()).sort("layer")["value"].to_list()
    print(f"          largest rank a layer {[int(k) for k in top]}")
    print(f"          layer 10 {[int(k) for k in heads.filter(layer=10)['value'].to_list()]}")
    print(
        f"          heads at rank ≤ 2: {(heads['value'] <= 2).sum()}, median "
        f"{heads['value'].median():.0f}"
    )


def memory(arguments: argparse.Namespace) -> None:
    for length in arguments.memory:
        command = [sys.executable, __file__, "--peak", str(length), "--model", arguments.model]
        command += ["--text", arguments.text, "--threads", str(arguments.threads)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(f"memory    L={length:<5} {done.stdout.strip().splitlines()[-1]}", flush=True)


def peak(arguments: argparse.Namespace, length: int) -> str:
    """Run all metrics, ranks as bounds past their limit, and return the peak in gigabytes."""
    model = load(arguments.model)
    ids = tokens(arguments, length)
    with torch.inference_mode():
        model(ids[:, :16], use_cache=False)
        loaded = resident()
        forget_peak()
        model(ids, use_cache=False, logits_to_keep=1)
        alone = resident("VmHWM")
        forget_peak()
        rank = Rank()
        started = time.perf_counter()
        with watch(model, *cheap_probes(), rank) as w:
            model(ids, use_cache=False, logits_to_keep=1)
        took = time.perf_counter() - started
        top = resident("VmHWM")
        kinds = w.rows().filter(metric="rank", variant="paper")["kind"].value_counts()
    return (
        f"loaded {loaded:.2f} GB, plain forward +{alone - loaded:.3f} GB, all metrics "
        f"+{top - loaded:.3f} GB, peak {top:.2f} GB in {took:.0f} s {dict(kinds.iter_rows())}"
    )


def resident(field: str = "VmRSS") -> float:
    """Return this process's resident memory, or its peak ("VmHWM"), in gigabytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 2**20
    raise SystemExit(f"/proc/self/status has no {field}")


def forget_peak() -> None:
    """Start the peak again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
