"""Probes of exhibits: spectra, positions, mappings, rotated states, channels, gradients."""

import itertools

import polars as pl
import pytest
import torch

from devices import GPU, stand_in_gpu
from helpers import some_tokens, tiny_decoder
from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.probes import exact
from wakeful.probes.attention import Values
from wakeful.probes.base import AttentionEvent, HiddenEvent, Probe, gather
from wakeful.probes.hidden import Outliers
from wakeful.probes.watch import watch
from wakeful_papers.probes.channels import ChannelOverlap, LargestWeights
from wakeful_papers.probes.gradients import query_key_gradients
from wakeful_papers.probes.mappings import Mappings
from wakeful_papers.probes.positions import Positions, Spectrum
from wakeful_papers.probes.rotated import RotatedShape

GROUPED = ModelConfig(
    vocab_size=61, max_length=64, num_layers=3, num_heads=4, num_kv_heads=2, width=32,
    mlp_width=48, init_std=0.3,
)  # fmt: skip


def value(rows: pl.DataFrame, **wanted: object) -> float:
    chosen = rows.filter(**wanted).filter(pl.col("head").is_null())
    assert len(chosen) == 1, chosen
    return chosen["value"][0]


class Events(Probe):
    def __init__(self) -> None:
        self.seen = []

    def see(self, event) -> None:
        self.seen.append(event)

    def rows(self):
        return gather([])


def test_a_spectrum_is_one_layers_eigenvalues_in_their_order() -> None:
    model = Decoder(GROUPED).double().eval()
    tokens = torch.randint(0, 61, (2, 21), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), watch(model, Values(), Spectrum(layer=1, curve=5)) as seen:
        model(tokens)
    found = seen.frame.filter(metric="value_eigenvalue_sorted")
    assert found["layer"].unique().to_list() == [1]
    assert found["position"].to_list() == ["1", "2", "3", "4", "5"]
    assert found["value"].is_sorted(descending=True)
    largest = value(seen.frame, metric="value_eigenvalue", layer=1, position="1")
    assert found["value"][0] == pytest.approx(largest)


def test_each_position_is_that_of_the_weights() -> None:
    model = Decoder(GROUPED).double().eval()
    tokens = torch.randint(0, 61, (1, 21), generator=torch.Generator().manual_seed(0))
    events = Events()
    with torch.inference_mode(), watch(model, Positions(tokens=7), events) as seen:
        model(tokens)
    for event in events.seen:
        if isinstance(event, AttentionEvent):
            A = exact.attention_weights(event.q[0], event.k[0], scale=event.scale)
            a = exact.token_importance(A).mean(0)
            norms = event.v[0].transpose(0, 1).flatten(1).norm(dim=-1)
            for metric, expected in (("importance_at", a), ("value_norm_at", norms)):
                found = [
                    value(seen.frame, layer=event.layer, metric=metric, position=str(place))
                    for place in range(7)
                ]
                assert found == pytest.approx(expected[:7].tolist())
        elif isinstance(event, HiddenEvent):
            found = value(seen.frame, layer=event.layer, metric="hidden_norm_at", position="3")
            assert found == pytest.approx(float(event.h[0, 3].norm()))
    assert "7" not in set(seen.frame["position"])


@pytest.mark.parametrize("normalizer", ["softmax", "softmax1"])
def test_mappings_are_compared_as_the_equations_have_them(normalizer: str) -> None:
    config = ModelConfig(**{**vars(GROUPED), "normalizer": normalizer})
    model = Decoder(config).double().eval()
    tokens = torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(1))
    events = Events()
    with torch.inference_mode(), watch(model, Mappings(), events) as seen:
        model(tokens)
    layers = [event for event in events.seen if isinstance(event, AttentionEvent)]
    keep = exact.causal(13, None, tokens.device)
    for n in (1, 2):
        cosines: dict[str, list[float]] = {"current_attention": [], "identity": []}
        for b in range(2):
            one, m = layers[n], layers[n - 1]
            parts: dict[str, list[torch.Tensor]] = {
                "gold": [],
                "current_attention": [],
                "identity": [],
            }
            for head in range(4):
                q, k, v = one.q[b, head], one.k[b, head // 2], one.v[b, head // 2]
                k_m, v_m = m.k[b, head // 2], m.v[b, head // 2]

                def weights(keys: torch.Tensor, seen: torch.Tensor, q=q) -> torch.Tensor:
                    x = (q @ keys.T / 8**0.5).masked_fill(~seen, -torch.inf).exp()
                    return x / (x.sum(-1, keepdim=True) + (normalizer == "softmax1"))

                both = torch.cat([keep, keep], 1)
                values = torch.cat([v, v_m])
                parts["gold"].append(weights(torch.cat([k, k_m]), both) @ values)
                parts["current_attention"].append(weights(torch.cat([k, k]), both) @ values)
                parts["identity"].append(weights(k, keep) @ v + v_m)
            joined = {name: torch.cat(each, -1) for name, each in parts.items()}
            for name, found in cosines.items():
                cosine = torch.cosine_similarity(joined[name], joined["gold"], dim=-1)
                found.append(float(cosine.mean()))
        for name, found in cosines.items():
            measured = value(seen.frame, layer=n, metric="mapping_cosine", variant=name)
            assert measured == pytest.approx(sum(found) / 2)
    assert set(seen.frame["layer"]) == {1, 2}


def test_mappings_refuse_what_is_no_softmax_of_the_text() -> None:
    config = ModelConfig(**{**vars(GROUPED), "stored_prefix": 2})
    tokens = torch.randint(0, 61, (1, 9))
    model = Decoder(config).eval()
    with pytest.raises(WakefulError, match="own tokens"), watch(model, Mappings()):  # noqa: SIM117
        with torch.inference_mode():
            model(tokens)


def test_a_rotation_spreads_what_one_channel_carries() -> None:
    h = torch.randn(1, 9, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    h[..., 5] += 500.0
    turned, plain = RotatedShape(seed=3), Outliers()
    for probe in (turned, plain):
        probe.see(HiddenEvent(0, h))
    before, after = plain.rows(), turned.rows()
    rest = {"layer": 0, "position": "rest"}
    assert value(before, metric="norm_ratio", **rest) > 0.99
    assert value(before, metric="kurtosis", **rest) > 200
    ratio = value(after, metric="norm_ratio", variant="rotated", **rest)
    assert 1 / 256 < ratio < 0.08
    assert value(after, metric="kurtosis", variant="rotated", **rest) == pytest.approx(3.0, abs=0.9)
    # Lengths stay, as do those of other probes of the same seed.
    again = RotatedShape(seed=3)
    again.see(HiddenEvent(0, h))
    assert again.rows().equals(after)


def test_channels_that_stand_out_in_every_sequence() -> None:
    torch.manual_seed(0)
    states = torch.randn(5, 7, 12, dtype=torch.float64)
    states[:, :, 3] *= 50  # stands out in all of them, at every token
    states[2:, 0, 8] = 400  # in three, at the first token
    for k in (1, 2, 4, 12):
        probe = ChannelOverlap(channels=k)
        for lines in (states[:2], states[2:]):
            probe.see(HiddenEvent(1, lines))
        probe.see(HiddenEvent(-1, states))  # the embedding is left out
        for position, part in (("first", slice(1)), ("rest", slice(1, None))):
            tops = [set(h[part].abs().mean(0).argsort(descending=True)[:k].tolist())
                    for h in states]  # fmt: skip
            pairs = [len(a & b) / k for a, b in itertools.combinations(tops, 2)]
            found = value(probe.rows(), layer=1, metric="outlier_channel_overlap",
                          position=position)  # fmt: skip
            assert found == pytest.approx(sum(pairs) / len(pairs)), (k, position)
            if k == 12 or (k == 1 and position == "rest"):
                assert found == 1
        assert probe.rows()["layer"].unique().to_list() == [1]
    alone = ChannelOverlap()
    alone.see(HiddenEvent(0, states[:1]))
    assert alone.rows().is_empty()
    with pytest.raises(WakefulError, match="channels = 13 is above the model's width, 12"):
        ChannelOverlap(channels=13).see(HiddenEvent(0, states))
    with pytest.raises(WakefulError, match="channels = 0 must be at least 1"):
        ChannelOverlap(channels=0)


def test_the_largest_weights_are_those_that_wrote_the_outlier_channels() -> None:
    model = Decoder(GROUPED).eval()
    outlier, other = 5, 9
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[outlier] *= 200
        model.blocks[2].attention.out.weight[other] = 1e-3
    tokens = some_tokens(2, 13)
    events = Events()
    for k in (1, 4, 32):
        with watch(model, LargestWeights(model, channels=k), events) as seen, torch.no_grad():
            model(tokens)
        for n in range(3):
            weights = [matrix.weight.detach().abs() for block in model.blocks[: n + 1]
                       for matrix in (block.attention.out, block.mlp.down)]  # fmt: skip
            by_weight = sorted(
                range(32), key=lambda i: -max(float(weight[i].max()) for weight in weights)
            )[:k]
            for position, part in (("first", slice(1)), ("rest", slice(1, None))):
                shares = []
                for event in events.seen:
                    if isinstance(event, HiddenEvent) and event.layer == n:
                        for h in event.h[:, part]:
                            by_state = sorted(
                                range(32), key=lambda i: -sum(float(x[i].abs()) for x in h)
                            )[:k]
                            shares.append(len(set(by_state) & set(by_weight)) / k)
                found = value(seen.frame, layer=n, metric="outlier_weight_share", position=position)
                assert found == pytest.approx(sum(shares) / len(shares)), (k, n, position)
                if k == 1 and n:
                    assert found == 1
                if k == 32:
                    assert found == 1
        events.seen.clear()
    assert -1 not in set(seen.frame.filter(metric="outlier_weight_share")["layer"])
    with pytest.raises(WakefulError, match="channels = 33 must be between 1 and the width, 32"):
        LargestWeights(model, channels=33)


def test_gradients_of_queries_and_keys_are_those_of_the_mean_loss() -> None:
    model = tiny_decoder(dtype=torch.float64)
    tokens = some_tokens(3, 12)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 4:] = -100
    model.loss(inputs, targets).backward()
    expected = {
        (metric, layer): float(heads.weight_gradient.norm())
        for layer, block in enumerate(model.blocks)
        for metric, heads in (
            ("query_gradient", Weight(block.attention.query)),
            ("key_gradient", Weight(block.attention.key)),
        )
    }
    kept = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.requires_grad_(False)  # as a model is that was loaded
    rows = query_key_gradients(
        model, [(inputs[i : i + 1], targets[i : i + 1]) for i in range(len(inputs))]
    )
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert len(rows) == len(expected)
    for (metric, layer), norm in expected.items():
        assert value(rows, layer=layer, metric=metric) == pytest.approx(norm)
    for parameter, before in zip(model.parameters(), kept, strict=True):
        assert before is None or torch.equal(parameter.grad, before)
    with pytest.raises(WakefulError, match="at least one target"):
        query_key_gradients(model, [])
    with stand_in_gpu():
        moved = query_key_gradients(model.float().to(GPU), [(inputs, targets)])
    assert moved["value"].to_list() == pytest.approx(rows["value"].to_list(), rel=1e-4)


class Weight:
    """The matrix of a projection into heads."""

    def __init__(self, heads: torch.nn.Module) -> None:
        matrices = [each for each in heads.parameters() if each.ndim == 2]
        assert len(matrices) == 1
        gradient = matrices[0].grad
        assert gradient is not None
        self.weight_gradient = gradient
