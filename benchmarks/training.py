"""A training step of each variant against vanilla, and of ours against the field."""

from collections.abc import Iterator

from benchmarks.models import (
    GPT2,
    SMALL,
    Llama,
    Ours,
    PlainGPT,
    XTransformers,
    random_tokens,
    training_step,
)
from benchmarks.timing import Ratio, compare
from wakeful_papers import depth, norms, routes  # noqa: F401  # rows below name their classes

BATCH, LENGTH = 4, 256
VARIANTS = (
    ("ResFormer, learnable", {"route": 'resformer(mode="learnable")'}, "<= 1.03"),
    ("ResFormer, identity", {"route": "resformer"}, "<= 1.03"),
    ("SVFormer", {"route": "svformer"}, "<= 1.00"),
    ("softmax-1", {"normalizer": "softmax1"}, ""),
    ("NeuTRENO", {"route": "neutreno"}, ""),
    ("DenseFormer", {"depth": "denseformer"}, ""),
    ("RMSNorm-S", {"norm": "rmsnorm_single"}, ""),
    ("gated values", {"route": "gated"}, "<= 1.05"),
    ("gated values, ReLU", {"route": 'gated(gate="relu")'}, "<= 1.05"),
    ("gated values, mixed", {"route": 'gated(gate="mix")'}, "<= 1.05"),
    ("gated values, 12 channels", {"route": "gated(channels=12)"}, "<= 1.05"),
    ("output gate", {"route": "output_gate"}, "<= 1.05"),
    ("output gate, 12 channels", {"route": "output_gate(channels=12)"}, "<= 1.05"),
    ("output gate per channel", {"route": 'output_gate(per="channel")'}, "<= 1.05"),
    ("XSA", {"route": "wakeful_papers.routes:XSA"}, "<= 1.05"),
    ("LayerNorm scaling", {"norm": "layernorm_scaling"}, "<= 1.05"),
    ("gated norm", {"norm": "wakeful_papers.norms:GatedNorm"}, "<= 1.05"),
    ("pre-affine norm", {"norm": "wakeful_papers.norms:PreAffine"}, "<= 1.05"),
    ("x0 lambdas", {"depth": "wakeful_papers.depth:X0Lambdas"}, "<= 1.05"),
)
AGAINST_THE_FIELD = ("ResFormer, learnable", "SVFormer", "DenseFormer")


def ratios() -> Iterator[Ratio]:
    """Yield time ratios of whole steps (forward, backward, fused AdamW), float32."""
    tokens = random_tokens(SMALL, BATCH, LENGTH)
    vanilla = training_step(Ours(SMALL), tokens)
    steps = {name: training_step(Ours(SMALL, **options), tokens) for name, options, _ in VARIANTS}
    for name, _, target in VARIANTS:
        yield compare(name, steps[name], "our vanilla", vanilla, rounds=11, target=target)
    for peer, model in (("Transformers Llama", Llama), ("x-transformers", XTransformers)):
        theirs = training_step(model(SMALL), tokens)
        yield compare("vanilla", vanilla, peer, theirs, rounds=11, target="<= 0.97")
        for name in AGAINST_THE_FIELD:
            yield compare(name, steps[name], peer, theirs, rounds=11)
    yield compare(
        "vanilla, GPT-2's parts", training_step(Ours(SMALL, **GPT2), tokens),
        "a plain GPT-2 loop", training_step(PlainGPT(SMALL), tokens),
        rounds=11, target="<= 1.00",
    )  # fmt: skip
