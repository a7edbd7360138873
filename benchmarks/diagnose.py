"""What diagnosing a model costs: `python -m benchmarks diagnose` gives the ratios.

    python -m benchmarks.diagnose --model SMOLLM2_FOLDER --text LONG_TEXT_FILE

prints besides the model's figures and its peak resident memory over the loaded model (Linux), a
process for each length. Without --model: a random model of SmolLM2-135M's shape; without --text:
random tokens.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

from benchmarks.resident import forget_peak, resident
from benchmarks.timing import Ratio, compare, seconds
from wakeful.data.sources import read_documents
from wakeful.hf.checkpoint_reader import smollm2_folder
from wakeful.probes import exact
from wakeful.probes.attention import Entropy, Importance, Sinks, Values
from wakeful.probes.base import AttentionEvent, Event, Frame, Probe, gather, mean_over_layers
from wakeful.probes.certificates import column_bounds
from wakeful.probes.hidden import BlockInfluence, OutlierChannels, Outliers, Smoothing
from wakeful.probes.rank import Ranks
from wakeful.probes.streaming import head_weights
from wakeful.probes.watch import watch

LENGTHS = (1024, 4096)
LONG = (4096, 8192)
"""Where ranks are bounds for now."""


def ratios() -> Iterator[Ratio]:
    """Yield a watched forward over a plain one of SmolLM2, and certified ranks over `svdvals`."""
    model = load(str(smollm2_folder()))
    text = next(d.text for d in read_documents("python-stdlib") if len(d.text) > 100_000)
    ids = encoded(str(smollm2_folder()), text, max(LENGTHS + LONG))
    with torch.inference_mode():
        for length in LENGTHS:
            yield overhead(model, ids[:, :length])
        yield from ranks(model, ids[:, :1024])
        for length in LONG:
            yield long_ranks(model, ids[:, :length])


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        print(peak(arguments, arguments.peak))
        return
    model = load(arguments.model)
    with torch.inference_mode():
        figures(model, tokens(arguments, 1024))
        for row in ranks(model, tokens(arguments, 1024)):
            print(f"{row.name} / {row.peer} = {row.ratio:.4f} [{row.low:.4f}, {row.high:.4f}]")
    memory(arguments)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="", help="folder of a Transformers causal LM")
    parser.add_argument("--text", default="", help="text file; repeated where it is too short")
    parser.add_argument("--threads", type=int, default=1)
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
    return encoded(arguments.model, Path(arguments.text).read_text(), length)


def encoded(folder: str, text: str, length: int) -> torch.Tensor:
    """Return (1, length) ids of the text, repeated where it is too short."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return torch.tensor([(ids * (length // len(ids) + 1))[:length]])


class TimedRanks(Ranks):
    """Ranks, and the seconds that they take beside the statistics that other probes share."""

    spent = 0.0

    def see_attention(self, event: AttentionEvent) -> None:
        began = time.perf_counter()
        super().see_attention(event)
        self.spent += time.perf_counter() - began


def cheap_probes() -> tuple[Probe, ...]:
    """Every metric except rank."""
    return (
        Sinks(), Entropy(), Importance(), Values(), Outliers(), Smoothing(), OutlierChannels(),
        BlockInfluence(),
    )  # fmt: skip


def overhead(model: PreTrainedModel, ids: torch.Tensor) -> Ratio:
    """Compare plain and watched forwards, taken in turns so that both meet the same machine."""

    def plain() -> None:
        model(ids, use_cache=False)

    def watched() -> None:
        with watch(model, *cheap_probes()):
            model(ids, use_cache=False)

    length = ids.shape[1]
    return compare(
        f"all metrics but rank, L={length}", watched, "a plain SDPA forward", plain,
        rounds=7 if length <= 1024 else 3, warmup=1,
        target="<= 1.50" if length <= 1024 else "<= 3.00",
    )  # fmt: skip


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


def ranks(model: PreTrainedModel, ids: torch.Tensor) -> Iterator[Ratio]:
    """Time every head's certified rank against `svdvals`, head by head; all must be equal."""
    matrices = Matrices()
    with watch(model, matrices):
        model(ids, use_cache=False)
    probe = TimedRanks(tau=0.9)
    with watch(model, Sinks(), probe):
        model(ids, use_cache=False)
    rows = probe.rows().filter(metric="rank", variant="paper")
    got = rows.filter(rows["head"].is_not_null()).sort("layer", "head")["value"].to_list()
    exactly: list[float] = []
    for (_, A), value in zip(matrices.heads, got, strict=True):
        began = time.perf_counter()
        true = int(exact.rank(A, 0.9))
        exactly.append(time.perf_counter() - began)
        if true != int(value):
            raise SystemExit(f"a rank of {int(value)} is {true} by svdvals: no time to compare")
    each = statistics.median(exactly)
    low, _, high = (probe.spent / (len(got) * x) for x in statistics.quantiles(exactly, n=4))
    yield Ratio(
        f"rank of {len(got)} heads, equal, L={ids.shape[1]}", "svdvals",
        probe.spent / sum(exactly), high, low, probe.spent, sum(exactly), "<= 0.125",
    )  # fmt: skip
    near = [A for closed, A in matrices.heads if closed]
    if near:
        stacked = torch.stack(near)
        c1, c2, one = stacked.sum(1), stacked.square().sum(1), torch.ones(len(near))
        took = [seconds(lambda: column_bounds(c1, c2, one, 0.9)) / len(near) for _ in range(9)]
        low, _, high = statistics.quantiles(took, n=4)
        best = statistics.median(took)
        yield Ratio(
            f"rank of a head near rank 1, by certificate ({len(near)} heads)", "svdvals",
            best / each, low / each, high / each, best, each, "<= 0.01",
        )  # fmt: skip


def long_ranks(model: PreTrainedModel, ids: torch.Tensor) -> Ratio:
    """Time what is known of all ranks of a long sequence against one plain forward."""
    forward = seconds(lambda: model(ids, use_cache=False, logits_to_keep=1))
    probe = TimedRanks()
    with watch(model, Sinks(), probe):
        model(ids, use_cache=False, logits_to_keep=1)
    rows = probe.rows().filter(metric="rank", variant="paper")
    heads = rows.filter(rows["head"].is_not_null())
    known = heads.filter(kind="exact").height
    ratio = probe.spent / forward
    return Ratio(
        f"ranks, {known} of {heads.height} exact, others bounds, L={ids.shape[1]}",
        "a plain SDPA forward", ratio, ratio, ratio, probe.spent, forward, "<= 3.00",
    )  # fmt: skip


def figures(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Print what TARGETS gives for the model, over Transformers' own list of hidden states."""
    outliers, first = Outliers(), Sinks()
    with watch(model, outliers, first, Ranks()) as w:
        output = model(ids, labels=ids, use_cache=False, output_hidden_states=True)
    rows = w.frame
    layers = rows.filter(rows["head"].is_null())

    def mean(metric: str, position: str) -> float | None:
        return mean_over_layers(layers.filter(metric=metric, position=position, variant="paper"))

    print(f"figures   loss {output.loss.item():.3f}")
    print(f"          first-key mass {mean('first_key_mass_with_row_0', 'all'):.3f}")
    print(f"          first-key share {mean('first_key_share_with_row_0', 'all'):.4f}")
    states = [h[0].float() for h in output.hidden_states]
    kurtosis = torch.stack([exact.kurtosis(h) for h in states])
    largest = torch.stack([exact.token_max_activation(h) for h in states])
    print(
        f"          kurtosis {kurtosis[:, 0].mean():.0f} / {kurtosis[:, 1:].mean():.0f} over "
        f"Transformers' states, {mean('kurtosis', 'first'):.0f} / {mean('kurtosis', 'rest'):.0f} "
        "over block outputs"
    )
    print(
        f"          max |x| {largest[:, 0].mean():.0f} / {largest[:, 1:].mean():.0f} over "
        "Transformers' states, "
        f"{mean('max_activation', 'first'):.0f} / {mean('max_activation', 'rest'):.0f}"
        " over block outputs"
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
        command = [
            sys.executable,
            "-m",
            "benchmarks.diagnose",
            "--peak",
            str(length),
            "--model",
            arguments.model,
        ]
        command += ["--text", arguments.text, "--threads", str(arguments.threads)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(f"memory    L={length:<5} {done.stdout.strip().splitlines()[-1]}", flush=True)


def peak(arguments: argparse.Namespace, length: int) -> str:
    """Run all metrics, ranks as bounds past their limit, and return the peak in gigabytes."""
    model = load(arguments.model)
    ids = tokens(arguments, length)
    with torch.inference_mode():
        model(ids[:, :16], use_cache=False)
        loaded = resident() / 1024
        forget_peak()
        model(ids, use_cache=False, logits_to_keep=1)
        alone = resident("VmHWM") / 1024
        forget_peak()
        rank = Ranks()
        started = time.perf_counter()
        with watch(model, *cheap_probes(), rank) as w:
            model(ids, use_cache=False, logits_to_keep=1)
        took = time.perf_counter() - started
        top = resident("VmHWM") / 1024
        kinds = w.frame.filter(metric="rank", variant="paper")["kind"].value_counts()
    return (
        f"loaded {loaded:.2f} GB, plain forward +{alone - loaded:.3f} GB, all metrics "
        f"+{top - loaded:.3f} GB, peak {top:.2f} GB in {took:.0f} s {dict(kinds.iter_rows())}"
    )


if __name__ == "__main__":
    main()
