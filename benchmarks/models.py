"""The models that are timed: ours, and what people would otherwise train, of one shape."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.config.model import ModelConfig
from wakeful.model.attend import attend
from wakeful.model.decoder import Decoder
from wakeful.model.initialize import initialize

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    num_layers: int
    num_heads: int
    width: int
    mlp_width: int
    vocab_size: int
    max_length: int


SMALL = Shape(8, 8, 512, 1792, 8192, 256)
"""The 82M shape of Value Residual Learning with a vocabulary that leaves the layers most work."""
GPT2 = {"norm": "layernorm", "positions": "learned", "mlp": "gelu_exact", "tied": True}
"""Our decoder's options for what `PlainGPT` is."""


class Ours(nn.Module):
    """Our decoder and its loss."""

    def __init__(self, shape: Shape, **options: object) -> None:
        super().__init__()
        config = ModelConfig(**vars(shape), **options)  # pyright: ignore[reportArgumentType]
        self.decoder = initialize(Decoder(config), 0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder.loss(tokens[:, :-1], tokens[:, 1:])


class Llama(nn.Module):
    """Transformers' Llama."""

    def __init__(self, shape: Shape) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=shape.vocab_size,
                hidden_size=shape.width,
                intermediate_size=shape.mlp_width,
                num_hidden_layers=shape.num_layers,
                num_attention_heads=shape.num_heads,
                num_key_value_heads=shape.num_heads,
                max_position_embeddings=shape.max_length,
                attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class XTransformers(nn.Module):
    """x-transformers' decoder with the same parts as Llama."""

    def __init__(self, shape: Shape) -> None:
        from x_transformers import Decoder as XDecoder  # pyright: ignore[reportMissingImports]
        from x_transformers import TransformerWrapper  # pyright: ignore[reportMissingImports]

        super().__init__()
        self.model = TransformerWrapper(
            num_tokens=shape.vocab_size,
            max_seq_len=shape.max_length,
            use_abs_pos_emb=False,
            attn_layers=XDecoder(
                dim=shape.width,
                depth=shape.num_layers,
                heads=shape.num_heads,
                attn_dim_head=shape.width // shape.num_heads,
                rotary_pos_emb=True,
                use_rmsnorm=True,
                ff_swish=True,
                ff_glu=True,
                ff_no_bias=True,
                ff_mult=shape.mlp_width / shape.width,
                attn_flash=True,
            ),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class PlainGPT(nn.Module):
    """GPT-2 as one writes it for a training loop of one's own: fused SDPA, tied head, no biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab_size, shape.width)
        self.positions = nn.Embedding(shape.max_length, shape.width)
        self.blocks = nn.ModuleList(_PlainBlock(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embed(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class _PlainBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.num_heads = shape.num_heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, shape.mlp_width, bias=False)
        self.down = nn.Linear(shape.mlp_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def random_tokens(shape: Shape, batch: int, length: int, device: torch.device = CPU) -> Tensor:
    """Return (batch, length + 1) ids."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(shape.vocab_size, (batch, length + 1), generator=generator).to(device)


def training_step(
    model: nn.Module, tokens: Tensor, *, bfloat16: bool = False, compiled: bool = False
) -> Callable[[], object]:
    """Return a whole step of training on `tokens`: forward, backward, fused AdamW."""
    model = model.to(tokens.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if compiled else model

    def step() -> None:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bfloat16):
            loss = run(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def attention_passes(
    inputs: list[Tensor], grad: Tensor, *, compiled: bool = False
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return forward and backward of softmax-1 and of fused SDPA on q, k and v (B, L, H, d)."""
    sink = torch.zeros(grad.shape[2], device=grad.device)
    scale = grad.shape[-1] ** -0.5

    def softmax1(*heads: Tensor) -> Tensor:
        return attend(*heads, scale=scale, sink=sink)

    def fused(*heads: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in heads)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def passes(run: Callable[..., Tensor]) -> Callable[[], object]:
        run = torch.compile(run) if compiled else run
        return lambda: torch.autograd.grad(run(*inputs), inputs, grad)

    return passes(softmax1), passes(fused)


def greedy(model: nn.Module, prompt: Tensor, num_tokens: int) -> Tensor:
    """Return a Transformers model's `num_tokens` likeliest tokens (B, N) after a prompt (B, L)."""
    out = model.generate(  # pyright: ignore[reportCallIssue]
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[:, prompt.shape[1] :]
