"""Watching our own decoder."""

import pytest
import torch

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.modeling import WakefulForCausalLM
from wakeful.model.attention import DotProduct
from wakeful.model.decoder import Decoder
from wakeful.probes import exact
from wakeful.probes.attention import Sinks, Values
from wakeful.probes.base import AttentionEvent, Probe, gather
from wakeful.probes.hidden import BlockInfluence, Outliers
from wakeful.probes.rank import Ranks
from wakeful.probes.streaming import head_weights
from wakeful.probes.watch import watch
from wakeful.routes import Differential

SMALL = {
    "vocab_size": 61, "max_length": 64, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
    "width": 32, "mlp_width": 48, "init_std": 0.3,
}  # fmt: skip

VARIANTS = {
    "plain": {},
    "softmax1": {"normalizer": "softmax1(learned=True, start=0.7)"},
    "resformer": {"route": "resformer"},
    "svformer": {"route": "svformer"},
    "neutreno": {"route": "neutreno"},
    "scaled": {"scale_logits_by_layer": True, "positions": "learned"},
}


class Recorder(Probe):
    def __init__(self):
        self.events = {}

    def see(self, event):
        if isinstance(event, AttentionEvent):
            self.events[event.layer] = event

    def rows(self):
        return gather([])


@pytest.mark.parametrize("heads", [4, 2])
def test_values_that_stand_side_by_side_count_once(heads):
    shape = SMALL | {"num_kv_heads": heads, "num_layers": 1, "route": "differential"}
    model = Decoder(ModelConfig(**shape)).double().eval()
    tokens = torch.randint(0, 61, (1, 21))
    made = []
    model.blocks[0].attention.value.register_forward_hook(lambda _m, _a, out: made.append(out[0]))
    with watch(model, Values()) as seen, torch.no_grad():
        model(tokens)
    frame = seen.frame
    own = made[0].transpose(0, 1)  # (G, L, d)
    joined = made[0].flatten(1)

    def values(metric, variant, position):
        found = frame.filter(metric=metric, variant=variant, position=position).sort("head")
        return torch.tensor(found["value"].to_list(), dtype=torch.float64)

    largest = exact.value_spectrum(joined)[:1]
    torch.testing.assert_close(values("value_eigenvalue", "paper", "1"), largest)
    each = exact.value_spectrum(own)[:, 0]
    torch.testing.assert_close(values("value_eigenvalue", "per_head", "1"), each)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_weights_times_the_values_are_what_attention_gave(variant, padded):
    model = Decoder(ModelConfig(**(SMALL | VARIANTS[variant]))).eval()
    tokens = torch.randint(0, 61, (2, 21))
    valid = None
    if padded:
        valid = torch.ones(2, 21, dtype=torch.bool)
        valid[1, :6] = False
    outputs = []
    handles = [
        module.register_forward_hook(lambda _m, _a, output: outputs.append(output))
        for module in model.modules()
        if isinstance(module, DotProduct)
    ]
    recorder = Recorder()
    with torch.no_grad():
        alone = model(tokens, valid=valid)
        outputs.clear()
        with watch(model, recorder, Sinks(), Ranks()) as w:
            assert torch.equal(model(tokens, valid=valid), alone)
    for handle in handles:
        handle.remove()
    assert not w.frame["value"].is_nan().any()
    for layer, event in recorder.events.items():
        for b, sequence in enumerate(event.sequences):
            v = sequence.v.repeat_interleave(2, dim=0)
            got = torch.stack([head_weights(sequence, head) for head in range(4)]) @ v
            real = slice(None) if valid is None else valid[b]
            expected = outputs[layer][b][real].transpose(0, 1)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_hooks_are_gone_and_caches_refused():
    model = Decoder(ModelConfig(**SMALL)).eval()
    cache, tokens = model.new_cache(1, 8), torch.zeros(1, 4, dtype=torch.long)
    with torch.no_grad():
        with watch(model, Sinks()) as seen:
            model(tokens, cache=cache)  # from an empty one: whole sequences
        with watch(model, Sinks()) as alone:
            model(tokens)
        assert seen.frame.equals(alone.frame)
        with pytest.raises(WakefulError, match="cache"), watch(model, Sinks()):
            model(tokens, cache=cache)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_our_class_of_transformers_shows_what_its_decoder_does():
    """Padding is known whichever way the decoder is entered."""
    torch.manual_seed(3)
    model = WakefulForCausalLM(WakefulConfig.of(ModelConfig(**SMALL))).eval()
    ids, mask = torch.randint(0, 61, (2, 21)), torch.ones(2, 21, dtype=torch.long)
    mask[1, :6] = 0
    with torch.no_grad(), watch(model, Sinks(), Outliers()) as seen:
        model(ids, attention_mask=mask)
    with torch.no_grad(), watch(model, Sinks(), Outliers()) as alone:
        model(ids[:1])
        model(ids[1:, 6:])
    one, other = (frame["value"].to_torch() for frame in (seen.frame, alone.frame))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_weights_that_are_not_one_matrix_are_refused_to_those_who_ask(monkeypatch):
    monkeypatch.setattr(Differential, "one_matrix", False)
    model = Decoder(ModelConfig(**(SMALL | {"route": "differential"}))).eval()
    tokens = torch.zeros(1, 9, dtype=torch.long)
    for probe in (Sinks(), Ranks(), Values()):
        with (
            pytest.raises(WakefulError, match=r"layer \d .* do not apply"),
            torch.no_grad(),
            watch(model, probe),
        ):
            model(tokens)
    with torch.no_grad(), watch(model, Outliers(), BlockInfluence()) as seen:
        model(tokens)
    assert seen.frame["layer"].unique().sort().to_list() == [-1, 0, 1, 2]
