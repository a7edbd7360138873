"""What OrthoAdam adds to a whole training step, against fused AdamW in the same run.

    python benchmarks/optimizer.py --threads 1 --repeats 5

One model of the papers' 82M shape (8 layers, width 512, SwiGLU 1792, 8 heads, vocabulary 50277,
untied) on random tokens. Each repeat makes one forward and backward, then every optimiser takes its
step on those gradients, in an order that changes from repeat to repeat. A whole step is forward +
backward + the optimiser's step, and the ratio is over fused AdamW's whole step of the same repeat.
Prints the median and range of the ratios, the ratio of the best times (the one to read on a busy
machine), seconds, and the bytes each optimiser holds over AdamW's.
"""

import argparse
import statistics
import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wakeful.optim.groups import decay_groups
from wakeful.optim.orthoadam import OrthoAdam

CONTENDERS: Mapping[str, tuple[str, str]] = {  # rotation, kernel
    "identity": ("identity", "auto"),
    "hadamard": ("hadamard", "auto"),
    "hadamard compiled": ("hadamard", "compiled"),
    "hadamard foreach": ("hadamard", "foreach"),
    "block_diagonal": ("block_diagonal", "auto"),
    "haar": ("haar", "auto"),
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = Mlp(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """A plain decoder with the library's names; without RoPE, which would only add to the step."""

    def __init__(self, layers: int, width: int, hidden: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state and, for OrthoAdam, of its rotations' tensors, each tensor counted once."""
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    if isinstance(optimizer, OrthoAdam):
        for rotation in optimizer.rotations():
            for value in vars(rotation).values():
                tensors += value if isinstance(value, tuple) else [value]
    stores = {t.data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
    return sum(stores.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="forward and backward under autocast")
    parser.add_argument("--only", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    model = Model(8, 512, 1792, 8, 50277).to(device)

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    optimizers: dict[str, torch.optim.Optimizer] = {
        "adamw fused": torch.optim.AdamW(
            decay_groups(model.named_parameters(), weight_decay=0.1), lr=1e-5, fused=True
        )
    }
    for name in arguments.only:
        rotation, kernel = CONTENDERS[name]
        groups = decay_groups(model.named_parameters(), weight_decay=0.1)
        optimizers[name] = OrthoAdam(groups, lr=1e-5, rotation=rotation, kernel=kernel)
    passes: list[float] = []
    steps: dict[str, list[float]] = {name: [] for name in optimizers}
    for repeat in range(arguments.repeats + 1):
        tokens = torch.randint(0, 50277, (arguments.batch, arguments.length + 1), device=device)
        start = wait()
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=arguments.bf16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        del logits
        passes.append(wait() - start)
        names = list(optimizers)
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            start = wait()
            optimizers[name].step()
            steps[name].append(wait() - start)
    size = sum(p.numel() for p in model.parameters())
    dtype = "bf16 autocast" if arguments.bf16 else "float32"
    print(
        f"{size / 1e6:.1f}M parameters, {arguments.batch} x {arguments.length} tokens, {dtype}, "
        f"{device}, {arguments.threads} thread(s), torch {torch.__version__}, "
        f"{arguments.repeats} repeats"
    )
    print(f"forward + backward {statistics.median(passes[1:]):.3f} s")
    base = held_bytes(optimizers["adamw fused"])
    for name, optimizer in optimizers.items():
        ratios = [
            (forward + mine) / (forward + theirs)
            for forward, mine, theirs in zip(
                passes[1:], steps[name][1:], steps["adamw fused"][1:], strict=True
            )
        ]
        forward = min(passes[1:])
        best = (forward + min(steps[name][1:])) / (forward + min(steps["adamw fused"][1:]))
        print(
            f"{name:18} step {statistics.median(steps[name][1:]):.3f} s (first "
            f"{steps[name][0]:.2f}), whole step x{statistics.median(ratios):.4f} "
            f"[{min(ratios):.4f}, {max(ratios):.4f}] best {best:.4f}, "
            f"memory x{held_bytes(optimizer) / base:.4f}"
        )


if __name__ == "__main__":
    main()
