"""Diagnosing SmolLM2-135M against the tools people look into models with, where both can.

The peers compute a model's first-key mass and the kurtosis of its block outputs, so those two are
timed: every layer and head of one sequence, forward pass included. Ranks, column masses and value
spectra the peers do not have. Each row first checks that both tools give the same figures.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.timing import Ratio, compare
from wakeful.data.sources import read_documents
from wakeful.hf.checkpoint_reader import smollm2_folder
from wakeful.loading.load import load
from wakeful.probes.attention import Sinks
from wakeful.probes.hidden import Outliers
from wakeful.probes.watch import watch

LENGTH = 1024
Figures = Callable[[], np.ndarray]


def ratios() -> Iterator[Ratio]:
    """Give ours over eager attention, transformer-lens and actlens for both metrics."""
    loaded = load("smollm2", device=torch.device("cpu"), dtype=torch.float32)
    text = next(d.text for d in read_documents("python-stdlib") if len(d.text) > 8 * LENGTH)
    ids = loaded.encode_plain(text)[:LENGTH]
    model = loaded.module
    assert isinstance(model, PreTrainedModel)
    eager = eager_model()
    ours: dict[str, Figures] = {
        "first-key mass": partial(our_mass, model, ids),
        "kurtosis": partial(our_kurtosis, model, ids),
    }
    lens, act = transformer_lens(ids), actlens(ids)
    peers: dict[str, dict[str, Figures]] = {
        "first-key mass": {
            "eager, output_attentions": partial(eager_mass, eager, ids),
            f"transformer-lens {metadata.version('transformer-lens')}": lens[0],
            f"actlens {metadata.version('actlens')}": act[0],
        },
        "kurtosis": {
            f"transformer-lens {metadata.version('transformer-lens')}": lens[1],
            f"actlens {metadata.version('actlens')}": act[1],
        },
    }
    with torch.inference_mode():
        for metric, run in ours.items():
            for peer, run_peer in peers[metric].items():
                # actlens keeps attention in half precision.
                np.testing.assert_allclose(run(), run_peer(), rtol=5e-3, atol=1e-4)
                yield compare(
                    f"{metric}, L={len(ids)}", run, peer, run_peer, rounds=5, warmup=1,
                    target="<= 1",
                )  # fmt: skip


def eager_model() -> PreTrainedModel:
    """Return SmolLM2 with attention that returns its matrices."""
    return AutoModelForCausalLM.from_pretrained(
        smollm2_folder(), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def our_mass(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """Return the mean mass on key 0 over later rows, (layers, heads)."""
    with watch(model, Sinks()) as w:
        model(torch.tensor([ids]), use_cache=False)
    rows = w.frame.filter(metric="first_key_mass_without_row_0")
    rows = rows.filter(rows["head"].is_not_null()).sort("layer", "head")
    return rows["value"].to_numpy().reshape(rows["layer"].n_unique(), -1)


def our_kurtosis(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """Return the kurtosis of block outputs at the first token and over the others, (layers, 2)."""
    with watch(model, Outliers()) as w:
        model(torch.tensor([ids]), use_cache=False)
    rows = w.frame.filter(metric="kurtosis", variant="paper")
    found = [rows.filter(position=place).sort("layer")["value"] for place in ("first", "rest")]
    # Layer 0 of the rows is the embedding.
    return np.stack([column.to_numpy()[-model.config.num_hidden_layers :] for column in found], 1)


def eager_mass(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """Return the same from the matrices that eager attention returns."""
    found = model(torch.tensor([ids]), use_cache=False, output_attentions=True).attentions
    return torch.stack([matrix[0, :, 1:, 0].mean(-1) for matrix in found]).numpy()


def transformer_lens(ids: list[int]) -> tuple[Figures, Figures]:
    """Return both figures by a cache of patterns or of block outputs."""
    from transformer_lens import TransformerBridge  # pyright: ignore[reportMissingImports]

    model = eager_model()  # which the bridge changes
    bridge = TransformerBridge.boot_transformers(str(smollm2_folder()), hf_model=model)
    layers = range(model.config.num_hidden_layers)

    def kept(name: str) -> list[torch.Tensor]:
        wanted = [f"blocks.{layer}.{name}" for layer in layers]
        _, cache = bridge.run_with_cache(torch.tensor([ids]), names_filter=wanted)
        return [cache[key] for key in wanted]

    def mass() -> np.ndarray:
        patterns = kept("attn.hook_pattern")
        return torch.stack([pattern[0, :, 1:, 0].mean(-1) for pattern in patterns]).numpy()

    def kurtosis() -> np.ndarray:
        return np.stack([split(kurtosis_of(h[0].numpy())) for h in kept("hook_resid_post")])

    return mass, kurtosis


def actlens(ids: list[int]) -> tuple[Figures, Figures]:
    """Return both figures by its captures and its own statistics."""
    from actlens.providers import NNsightProvider  # pyright: ignore[reportMissingImports]
    from actlens.reducers import HEAD_METRICS, STATS  # pyright: ignore[reportMissingImports]

    provider = NNsightProvider(str(smollm2_folder()))
    places = np.arange(len(ids))
    distance = places[:, None] - places[None, :]

    def mass() -> np.ndarray:
        patterns = provider.capture(ids, "attn_pattern")
        return np.stack(
            [HEAD_METRICS["first_token"](p.astype(np.float32), distance) for p in patterns]
        )

    def kurtosis() -> np.ndarray:
        states = provider.capture(ids, "resid_post")
        return np.stack([split(STATS["kurtosis"](h, -1) + 3) for h in states])

    return mass, kurtosis


def kurtosis_of(x: np.ndarray) -> np.ndarray:
    """Return the kurtosis of each row, not excess."""
    centred = x - x.mean(-1, keepdims=True)
    return (centred**4).mean(-1) / (centred**2).mean(-1) ** 2


def split(values: np.ndarray) -> np.ndarray:
    """Return the first token's value and the mean of the others'."""
    return np.array([values[0], values[1:].mean()])
