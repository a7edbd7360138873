"""Watching Transformers models that attend by softmax-1: the weights of its definition."""

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from helpers import some_tokens
from hf.softmax1_models import PLAIN, build, every_model, left_padded, plain_attention, twins
from probes.architectures import Recorder
from wakeful.probes.attention import Sinks
from wakeful.probes.streaming import head_weights
from wakeful.probes.watch import watch


@pytest.fixture(autouse=True, scope="module")
def _plain():
    AttentionInterface.register(PLAIN, plain_attention)
    AttentionMaskInterface.register(PLAIN, AttentionMaskInterface()["eager"])
    yield
    AttentionInterface._global_mapping.pop(PLAIN)
    AttentionMaskInterface._global_mapping.pop(PLAIN)


@every_model
def test_weights_are_those_of_the_definition(name):
    ours, plain = twins(name)
    tokens, mask, places = left_padded((11, 6))
    for given in ({"attention_mask": mask.long(), "position_ids": places}, {}):
        recorder, sinks = Recorder(), Sinks()
        arguments = {"input_ids": tokens, "use_cache": False} | given
        with torch.no_grad():
            alone = ours(**arguments).logits
            with watch(ours, recorder, sinks) as seen:
                watched = ours(**arguments).logits
            expected = plain(**arguments, output_attentions=True).attentions
        assert torch.equal(watched, alone)
        for layer, event in recorder.attention.items():
            for b in range(2):
                real = mask[b] if given else torch.ones_like(mask[b])
                weights = expected[layer][b][:, real][:, :, real]
                got = torch.stack([head_weights(event.sequences[b], head) for head in range(4)])
                torch.testing.assert_close(got, weights, rtol=1e-5, atol=1e-6)
                assert (got.sum(-1) < 1 - 1e-6).any()
        assert not seen.frame["value"].is_nan().any()


def test_a_models_own_sinks_stay_its_own():
    watched, tokens = Recorder(), some_tokens(1, 9)
    model = build("gpt_oss")
    with torch.no_grad(), watch(model, watched):
        model(tokens, use_cache=False)
    for layer, event in watched.attention.items():
        assert torch.equal(event.sink, model.model.layers[layer].self_attn.sinks)
