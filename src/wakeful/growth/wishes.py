"""What a user asks of an inheritance."""

from dataclasses import dataclass
from typing import Literal

Choose = Literal["first", "middle", "last", "alternate", "stacked",
                 "rank", "mass", "influence", "angle", "lazy"]  # fmt: skip
Copy = Literal["all", "attention", "mlp", "without_norms"]
"""What of a block is inherited: everything; the attention or the feed-forward network, each with
the norm before it; or both without their norms (table 2). The rest starts at random."""
Until = Literal["parity", "budget"]
GrowFrom = Literal["reference", "student"]


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """Everything an inheritance may be told; zeros and empty texts mean what each field says."""

    layers: int = 0
    """Layers of the heir. 0: as many as keep says, or half of the reference's."""
    keep: float = 0.0
    """Share of the reference's layers to keep, instead of layers."""
    choose: Choose = "first"
    """Which layers: a range, or those with the highest rank, mass, influence or turn (angle)."""
    blocks: tuple[int, ...] = ()
    """The layers themselves, counted from 0, instead of layers, keep and choose."""
    pinned: int = 1
    """First layers that stay whatever a diagnosis says of them."""
    copy: Copy = "all"
    """What of a block is inherited; the rest starts at random."""
    route: str = ""
    """Value route to switch on, e.g. resformer(mode="learnable"). Empty: the reference's."""
    normalizer: str = ""
    """Normalizer to switch on, e.g. softmax1. Empty: the reference's."""
    grow: int = 0
    """Layers that each round adds. 0: one round."""
    until: Until = "parity"
    """Grow until the reference's loss is reached, or through all rounds."""
    rounds: int = 0
    """Most rounds. 0: until the heir is as deep as the reference."""
    grow_from: GrowFrom = "reference"
    """A round begins from the reference's blocks, or keeps the student's and adds to them."""
    baseline: tuple[str, ...] = ()
    """Other starts to train alike, by name: random, stacking, half_width ... (listed above)."""
    text: str = ""
    """Text to train on: a file, folder or glob, or prepared data. Empty: what data names."""
    data: str = "python-stdlib"
    """Text by name: python-stdlib, or hf:NAME for a Hugging Face dataset."""
    text_field: str = "text"
    """Field of JSONL and parquet rows that holds the text."""
    max_bytes: int = 0
    """Read no more text than this, in bytes. 0 means all."""
    validation_text: str = ""
    """Text to validate on. Empty: a share of the documents is held out."""
    validation_fraction: float = 0.005
    """That share."""
    steps: int = 0
    """Optimizer steps of a round and of each baseline. 0: as many as minutes allow."""
    minutes: float = 0.0
    """Time for everything; with steps, no new round begins after it. 0 without steps: 30."""
    batch_size: int = 4
    """Sequences a step."""
    micro_batch_size: int = 0
    """Sequences at once; the rest of a step accumulates. 0 means batch_size."""
    length: int = 256
    """Tokens a sequence."""
    optimizer: str = "adamw"
    """adamw, orthoadam, rmsprop, sgd, sgd_momentum or muon."""
    lr: float = 1e-3
    """Peak learning rate; it falls to a tenth along a cosine."""
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices."""
    alpha: float = 0.6
    """Share of the cross-entropy in the loss of the distilled baselines."""
    temperature: float = 1.0
    """Temperature of their divergence."""
    eval_every: int = 0
    """Steps between evaluations of the full validation set. 0: a fifth of the steps."""
    checkpoint_every: int = 0
    """Steps between checkpoints. 0: at the end, and whenever a signal stops the run."""
    seed: int = 0
    """Seed of the data order and of what is not inherited."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda ..."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the forward pass; bfloat16 is mixed precision over float32 weights."""
    prompts: tuple[str, ...] = ("def ",)
    """Beginnings that every trained model continues."""
    diagnose_length: int = 512
    """Tokens a sequence of the diagnosis that layers are chosen by."""
    diagnose_sequences: int = 4
    """Sequences of that diagnosis, from the training text's beginning."""
