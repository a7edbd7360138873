"""`quantize` on whole models: which layers, on which routes, and what it refuses."""

import dataclasses

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)  # fmt: skip

from helpers import some_tokens, tiny_config, tiny_decoder
from wakeful.errors import WakefulError
from wakeful.evaluation.perplexity import check_likelihoods as likelihood_check
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.modeling import WakefulForCausalLM
from wakeful.probes.running import logits_of
from wakeful.quantization import SCHEMES, parse_scheme, quantize_module, quantized_layers
from wakeful.quantization.linear import quantize_layer
from wakeful.quantization.measure import measure_damage

FLOAT32 = {"dtype": torch.float32}


def llama(**over: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3, **over,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=29, n_embd=16, n_layer=2, n_head=2, n_positions=32, initializer_range=0.3
    )
    return GPT2LMHeadModel(config).eval()


@torch.inference_mode()
def logits(model: nn.Module, length: int = 11) -> torch.Tensor:
    return logits_of(model, some_tokens(2, length))


def test_which_layers() -> None:
    decoder = tiny_decoder(**FLOAT32).eval()
    names = list(quantized_layers(quantize_module(decoder, "fine")))
    assert names[:7] == [
        f"blocks.0.{name}"
        for name in ("attention.query", "attention.key", "attention.value", "attention.out",
                     "mlp.gate", "mlp.up", "mlp.down")
    ]  # fmt: skip
    assert names[-1] == "head"
    assert len(names) == 4 * 7 + 1
    tied = quantize_module(tiny_decoder(**FLOAT32, tied=True).eval(), "fine")
    assert "head" not in quantized_layers(tied)
    assert tied.head.weight is tied.embed.weight
    shared = quantize_module(decoder, "fine", skip=["head", "blocks.1.*"])
    assert len(quantized_layers(shared)) == 3 * 7
    assert shared.embed.weight is decoder.embed.weight
    assert shared.head.weight is decoder.head.weight


@pytest.mark.slow
def test_a_quantized_decoder_still_caches_and_has_a_loss() -> None:
    # In float64 no sum in another order puts an activation on the other side of a rounding.
    decoder = quantize_module(tiny_decoder().eval(), "fine")
    tokens = some_tokens(1, 9)
    with torch.inference_mode():
        whole = decoder(tokens)
        cache = decoder.new_cache(1, 9)
        parts = [decoder(tokens[:, n : n + 1], cache=cache) for n in range(9)]
        # Per-token scales do not see the other tokens.
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
        loss = decoder.loss(tokens[:, :-1], tokens[:, 1:])
        expected = torch.nn.functional.cross_entropy(whole[0, :-1], tokens[0, 1:])
    torch.testing.assert_close(loss, expected)


@pytest.mark.slow
def test_transformers_models() -> None:
    for model, count in ((llama(), 15), (llama(tie_word_embeddings=True), 14), (gpt2(), 8)):
        full = logits(model)
        small = quantize_module(model, "fine")
        assert type(small) is type(model)
        assert len(quantized_layers(small)) == count
        assert 0 < (logits(small) - full).norm() / full.norm() < 0.1
        assert torch.equal(logits(model), full)
    tied = quantize_module(gpt2(), "w4")
    assert tied.lm_head.weight is tied.transformer.wte.weight
    assert "transformer.h.1.mlp.c_proj" in quantized_layers(tied)


@pytest.mark.parametrize("name", SCHEMES)
def test_coarser_is_worse(name: str) -> None:
    """8-bit weights and inputs must be nearer to the model than 3-bit ones."""
    decoder = tiny_decoder(**FLOAT32).eval()
    full = logits(decoder)
    crude = quantize_module(
        decoder, "scheme(weights=absmax(bits=3, per='tensor'), inputs=absmax(bits=3, per='tensor'))"
    )
    error, other = ((logits(m) - full).norm() for m in (quantize_module(decoder, name), crude))
    assert error < other / 2


@pytest.mark.slow
def test_static_scales_are_the_largest_of_the_calibration() -> None:
    decoder = tiny_decoder(**FLOAT32).eval()
    tokens = [some_tokens(1, 12, seed=n) for n in range(3)]
    seen: list[torch.Tensor] = []
    handle = decoder.blocks[1].mlp.down.register_forward_hook(
        lambda _m, args, out: seen.extend((args[0].abs().max(), out.abs().max()))
    )
    with torch.inference_mode():
        for each in tokens:
            decoder(each)
    handle.remove()
    scheme = parse_scheme("coarse", "static")
    small = quantize_module(decoder, scheme, calibration=tokens)
    layer = quantized_layers(small)["blocks.1.mlp.down"]
    assert layer.input_scale is not None
    assert layer.output_scale is not None
    assert float(layer.input_scale) == pytest.approx(float(max(seen[::2])) / 127)
    assert float(layer.output_scale) == pytest.approx(float(max(seen[1::2])) / 127)
    # A static scale does not depend on the other tokens of a sequence.
    with torch.inference_mode():
        torch.testing.assert_close(small(tokens[0])[:, :5], small(tokens[0][:, :5]))
    assert not torch.equal(logits(small), logits(quantize_module(decoder, "coarse")))


def test_what_is_refused(as_users_run_it: None) -> None:
    decoder = tiny_decoder(**FLOAT32).eval()
    with pytest.raises(WakefulError, match="static scales need calibration"):
        quantize_module(decoder, parse_scheme("coarse", "static"))
    with pytest.raises(WakefulError, match="would be ignored"):
        quantize_module(decoder, "coarse", calibration=[some_tokens(1, 4)])
    with pytest.raises(WakefulError, match="--skip nothing matches no layer"):
        quantize_module(decoder, "fine", skip=["nothing"])
    with pytest.raises(WakefulError, match=r"mlp matches no layer; .* '\*.mlp.\*'"):
        quantize_module(decoder, "fine", skip=["head", "*.mlp"])
    with pytest.raises(WakefulError, match="norm matches no layer"):
        quantize_module(decoder, "fine", skip=["norm"])
    with pytest.raises(WakefulError, match=r"already: blocks\.0\.attention\.query is fine"):
        quantize_module(quantize_module(decoder, "fine"), "w4")
    with pytest.raises(WakefulError, match="no linear layer"):
        quantize_module(nn.Sequential(nn.Embedding(3, 4)), "fine")
    before = logits(decoder)
    up, down = decoder.blocks[2].mlp.up.weight.data, decoder.blocks[0].mlp.down.weight.data
    kept = up.clone(), down.clone()
    up[0, 0] = torch.nan
    with pytest.raises(WakefulError, match=r"a NaN .*--skip blocks.2.mlp.up$"):
        quantize_module(decoder, "fine")
    down.fill_(torch.inf)
    skip = "--skip blocks.0.mlp.down blocks.2.mlp.up"
    with pytest.raises(WakefulError, match=rf"a NaN or an infinity .* {skip}$"):
        quantize_module(decoder, "fine")
    down.copy_(kept[1])
    assert "blocks.2.mlp.up" not in quantized_layers(
        quantize_module(decoder, "w4", skip=["*.2.mlp.up"])
    )
    up.copy_(kept[0])
    assert torch.equal(logits(decoder), before)


def test_projections_of_the_embedding_stay_where_they_cannot_be_folded() -> None:
    config = WakefulConfig(parts=dataclasses.asdict(tiny_config(embedding="projected")))
    model = WakefulForCausalLM(config).eval()
    small = quantized_layers(quantize_module(model, "fine"))
    assert "model.decoder.blocks.0.attention.query.q_proj" in small
    assert not any("embedding" in name for name in small)


@pytest.mark.parametrize("method", ["smooth(norms=True)", "gptq"])
def test_a_model_in_training_is_looked_at_without_dropout(method: str) -> None:
    model, text = gpt2(), [some_tokens(1, 8)]
    scheme = f"w4a16(method={method})"
    expected = quantized_layers(quantize_module(model, scheme, calibration=text))
    found = quantized_layers(quantize_module(model.train(), scheme, calibration=text))
    for name, layer in expected.items():
        assert torch.equal(found[name].dequantize(), layer.dequantize())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("scheme", ["coarse", "w4", "nvfp4", "fp8(inputs=e4m3(per='tensor'))"])
@pytest.mark.parametrize("shape", [(0, 16), (0, 3, 16), (2, 0, 16)])
def test_nothing_in_is_nothing_out(scheme: str, shape: tuple[int, ...]) -> None:
    layer = nn.Linear(16, 5)
    small = quantize_layer(layer, parse_scheme(scheme))
    assert small(torch.zeros(shape)).shape == (*shape[:-1], 5)


def test_layers_that_are_no_matrix_are_named() -> None:
    mamba = MambaForCausalLM(
        MambaConfig(vocab_size=29, hidden_size=16, num_hidden_layers=1, state_size=4)
    ).eval()
    with pytest.raises(WakefulError, match=r"backbone.layers.0.mixer is a MambaMixer, whose A_log"):
        quantize_module(mamba, "fine")
    with pytest.raises(WakefulError, match=r"mixer.conv1d is a Conv1d of 32 groups"):
        quantize_module(mamba, "fine", skip=["backbone.layers.0.mixer"])
    mixtral = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=2,
        )
    ).eval()  # fmt: skip
    kept = quantize_module(mixtral, "fine", skip=["*.mlp.gate", "*.mlp.experts"])
    assert len(quantized_layers(kept)) == 5
    assert torch.isfinite(logits(kept)).all()


class Doubled(nn.Linear):
    """A linear layer that does something of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Spelled(nn.Linear):
    """A linear layer that spells its product out, as Falcon's does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def test_a_linear_layer_that_spells_its_product_out_is_one() -> None:
    model = llama()
    spelled = Spelled(16, 24, bias=False)
    plain = quantized_layers(quantize_module(model, "fine"))["model.layers.1.mlp.up_proj"]
    spelled.weight = model.model.layers[1].mlp.up_proj.weight
    model.model.layers[1].mlp.up_proj = spelled
    layer = quantized_layers(quantize_module(model, "fine"))["model.layers.1.mlp.up_proj"]
    x = torch.randn(3, 16)
    assert torch.equal(layer(x), plain(x))


def test_a_linear_layer_with_a_way_of_its_own_is_refused() -> None:
    model = llama()
    model.model.layers[1].mlp.up_proj = Doubled(16, 24, bias=False)
    with pytest.raises(WakefulError, match=r"layers.1.mlp.up_proj is a Doubled"):
        quantize_module(model, "fine")


class Wrapped(nn.Module):
    """A decoder inside something else, as behind another library's interface."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.inner = decoder


def test_a_wrapped_decoder_keeps_its_mixing_weights() -> None:
    decoder = tiny_decoder(**FLOAT32, route="resformer(mode='learnable')").eval()
    names = list(quantized_layers(quantize_module(Wrapped(decoder), "fine")))
    assert names == [f"inner.{name}" for name in quantized_layers(quantize_module(decoder, "fine"))]


@pytest.mark.parametrize("scheme", ["moderate", "coarse"])
def test_a_sequence_has_its_own_scales_per_tensor(scheme: str) -> None:
    layer = nn.Linear(16, 8)
    small = quantize_layer(layer, parse_scheme(scheme))
    x = torch.randn(3, 5, 16) * torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    together = small(x)
    for alone, row in zip(x, together, strict=True):
        assert torch.equal(small(alone[None])[0], row)
    assert not torch.equal(small(x.view(1, 15, 16)).view(3, 5, 8), together)


def test_models_that_are_not_causal_are_refused() -> None:
    small = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    tokens = [torch.arange(12)[None]]
    encoder = BertLMHeadModel(BertConfig(**small)).eval()
    for check in (lambda m: measure_damage("m", m, {}, tokens), lambda m: likelihood_check("m", m)):
        with pytest.raises(WakefulError, match="not causal"):
            check(encoder)
        check(BertLMHeadModel(BertConfig(**small, is_decoder=True)).eval())
        check(llama())
        check(gpt2())
