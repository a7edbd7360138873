"""A training step of each variant against vanilla, and of vanilla against the field."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks.timing import Ratio, compare
from wakeful.model.architecture import ModelConfig
from wakeful.model.decoder import Decoder
from wakeful.model.initialise import initialise

VOCABULARY, LENGTH, BATCH = 8192, 256, 4
SHAPE = {"num_layers": 8, "num_heads": 8, "width": 512, "mlp_width": 1792}
"""The 82M shape of Value Residual Learning with a vocabulary that leaves the layers most work."""


def ratios() -> Iterator[Ratio]:
    """Yield time ratios of whole steps (forward, backward, fused AdamW), float32."""
    vanilla = _step(_decoder())
    for name, options, target in (
        ("ResFormer, learnable", {"route": 'resformer(mode="learnable")'}, "<= 1.03"),
        ("ResFormer, identity", {"route": "resformer"}, "<= 1.03"),
        ("SVFormer", {"route": "svformer"}, "<= 1.00"),
        ("softmax-1", {"normalizer": "softmax1"}, ""),
        ("NeuTRENO", {"route": "neutreno"}, ""),
        ("DenseFormer", {"depth": "denseformer"}, ""),
        ("RMSNorm-S", {"norm": "rmsnorm_single"}, ""),
    ):
        yield compare(
            name, _step(_decoder(**options)), "our vanilla", vanilla, rounds=11, target=target
        )
    yield compare(
        "vanilla", vanilla, "Transformers Llama", _step(_llama()), rounds=11, target="<= 1.00"
    )
    yield compare(
        "vanilla", vanilla, "x-transformers", _step(_x_transformers()), rounds=11, target="<= 1.00"
    )


def _decoder(**options: str) -> "_Ours":
    config = ModelConfig(vocab_size=VOCABULARY, max_length=LENGTH, **SHAPE, **options)  # pyright: ignore[reportArgumentType]
    return _Ours(initialise(Decoder(config), 0))


class _Ours(nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder.loss(tokens[:, :-1], tokens[:, 1:])


class _HuggingFace(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens[:, :-1], use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class _XTransformers(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=SHAPE["width"],
        intermediate_size=SHAPE["mlp_width"],
        num_hidden_layers=SHAPE["num_layers"],
        num_attention_heads=SHAPE["num_heads"],
        num_key_value_heads=SHAPE["num_heads"],
        max_position_embeddings=LENGTH,
        attn_implementation="sdpa",
    )
    return _HuggingFace(LlamaForCausalLM(config))


def _x_transformers() -> nn.Module:
    from x_transformers import Decoder as XDecoder
    from x_transformers import TransformerWrapper

    return _XTransformers(
        TransformerWrapper(
            num_tokens=VOCABULARY,
            max_seq_len=LENGTH,
            use_abs_pos_emb=False,
            attn_layers=XDecoder(
                dim=SHAPE["width"],
                depth=SHAPE["num_layers"],
                heads=SHAPE["num_heads"],
                attn_dim_head=SHAPE["width"] // SHAPE["num_heads"],
                rotary_pos_emb=True,
                use_rmsnorm=True,
                ff_swish=True,
                ff_glu=True,
                ff_no_bias=True,
                ff_mult=SHAPE["mlp_width"] / SHAPE["width"],
                attn_flash=True,
            ),
        )
    )


def _step(model: nn.Module) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(
        VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0)
    )

    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
