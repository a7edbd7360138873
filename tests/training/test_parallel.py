"""How a decoder is laid out over processes."""

import subprocess
import sys

# The shape checks of these tests cannot be compiled: hence a process of its own.
COMPILED = """
import torch
from wakeful.config.model import ModelConfig
from wakeful.model.decoder import Decoder
from wakeful.training.parallel import allow_recompiling

limits = torch._dynamo.config
layers = limits.recompile_limit + 2
limits.fail_on_recompile_limit_hit = True
for variant in ({"route": "xsa"}, {"depth": "attention_residuals"}):
    model = ModelConfig(vocab_size=29, max_length=16, num_layers=layers, num_heads=2, width=8,
                        mlp_width=12, **variant)
    decoder, tokens = Decoder(model).eval(), torch.arange(7).unsqueeze(0)
    expected = decoder(tokens)
    allow_recompiling(layers)
    for block in decoder.blocks:
        block.compile(backend="eager")
    torch.testing.assert_close(decoder(tokens), expected)
    torch._dynamo.reset()
"""


def test_every_block_is_compiled_though_each_has_its_number() -> None:
    subprocess.run([sys.executable, "-c", COMPILED], check=True, timeout=120)
