"""Our class with an engine's attention: what vLLM's Transformers backend does, done here."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from helpers import tiny_decoder
from wakeful.errors import WakefulError
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.engine import ENGINES, EngineDot
from wakeful.hf.modeling import WakefulForCausalLM, as_transformers
from wakeful.model.attend import attend

(NAME,) = ENGINES
MODELS = {
    "vanilla": {},
    "resformer": {"route": 'resformer(mode="learnable")'},
    "svformer": {"route": "svformer(anchors=[0, 2])", "normalizer": "softmax1(learned=True)"},
    "cla": {"route": "cla", "normalizer": "softmax1(start=-0.5)", "scale_logits_by_layer": True},
    "gates": {"route": "then(output_gate, neutreno)", "mlp_rotation": True},
    "tokens": {"route": "value_embedding", "depth": "mudd", "placement": "peri"},
    "gpt-2": {"norm": "layernorm", "positions": "learned", "mlp": "gelu", "bias": True},
    "windows": {
        "qk_norm": True, "qk_norm_whole": True, "local_layers": (1, 2), "local_theta": 100.0,
        "window": 4, "logit_cap": 3.0,
    },
    "prefix": {"stored_prefix": 1},
    "prefix, borrowed": {"stored_prefix": 1, "route": "svformer(anchors=[0, 2])"},
}  # fmt: skip


class Engine:
    """The tokens of several texts in one row, and every layer's keys and values apart."""

    def __init__(self, model: WakefulForCausalLM, lengths: list[int]) -> None:
        self.model = model
        self.caches = [[None] * len(lengths) for _ in model.model.decoder.blocks]
        self.seen = [0] * len(lengths)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **kwargs):
        layer = module.layer_idx
        assert mask is None
        assert kwargs["scaling"] == module.scaling
        assert kwargs["s_aux"] is module.sinks
        kinds = module.config.layer_types
        window = module.config.sliding_window if kinds and "sl" in kinds[layer] else None
        rows, begin = [], 0
        for text, count in enumerate(self.counts):
            if not count:
                continue  # this text has ended
            part = slice(begin, begin + count)
            begin += count
            queries, keys, values = (
                heads[:, :, part].transpose(1, 2).to(torch.float64) for heads in (q, k, v)
            )
            if self.caches[layer][text] is not None:
                old = self.caches[layer][text]
                keys, values = (
                    torch.cat(pair, 1) for pair in zip(old, (keys, values), strict=True)
                )
            self.caches[layer][text] = (keys, values)
            ends = torch.arange(keys.shape[1] - count, keys.shape[1]).unsqueeze(1)
            ago = ends - torch.arange(keys.shape[1])
            keep = (ago >= 0) & (ago < (window or keys.shape[1]))
            sink = None if module.sinks is None else module.sinks.double()
            rows.append(
                attend(
                    queries, keys, values, scale=module.scaling, sink=sink, keep=keep.unsqueeze(0)
                )
            )
        return torch.cat(rows, 1).to(q.dtype).flatten(2), None

    def logits(self, pieces: list[Tensor]) -> list[Tensor]:
        """Return the logits of the next tokens of each text."""
        self.counts = [len(piece) for piece in pieces]
        places = [
            torch.arange(seen, seen + count)
            for seen, count in zip(self.seen, self.counts, strict=True)
        ]
        self.seen = [seen + count for seen, count in zip(self.seen, self.counts, strict=True)]
        row = {
            "input_ids": torch.cat(pieces).unsqueeze(0),
            "position_ids": torch.cat(places).unsqueeze(0),
        }
        return list(self.model(**row, use_cache=False).logits[0].split(self.counts))


@pytest.fixture
def interface() -> type[AttentionInterface]:
    """The registry of attention functions, where an engine puts its own."""
    registry = AttentionInterface
    yield registry
    registry._global_mapping.pop(NAME, None)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_texts_in_one_row_are_computed_as_each_alone(name: str, interface) -> None:
    options = {"max_length": 24, "dtype": torch.float64} | MODELS[name]
    decoder = tiny_decoder(**options).eval()
    for parameter in decoder.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    config = WakefulConfig.of(decoder.config)
    interface.register(NAME, Engine.attend)  # known by its name before there is one
    config._attn_implementation = NAME
    served = WakefulForCausalLM(config).double().eval()
    served.load_state_dict(as_transformers(decoder).state_dict(), strict=True)
    for module in served.modules():
        if isinstance(module, EngineDot) and module.sinks is not None:
            # As vLLM puts a tensor of its own there, which no checkpoint fills.
            module.sinks = nn.Parameter(
                torch.full_like(module.sinks.double(), torch.nan), requires_grad=False
            )
    assert served.is_backend_compatible()
    assert served.get_decoder() is served.model
    texts = [torch.randint(29, (length,)) for length in (11, 3, 17)]  # 31 tokens, past the context
    engine = Engine(served, [len(text) for text in texts])
    interface.register(NAME, engine.attend)
    found: list[list[Tensor]] = [[] for _ in texts]
    for begin, end in ((0, 7), (7, 8), (8, 17)):
        for rows, got in zip(found, engine.logits([t[begin:end] for t in texts]), strict=True):
            rows.append(got)
    for text, rows in zip(texts, found, strict=True):
        torch.testing.assert_close(torch.cat(rows), decoder(text[None])[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"normalizer": "sigmoid"}, "model.normalizer"),
        ({"route": "differential"}, "model.route"),
        ({"stored_prefix": 2}, "model.stored_prefix = 2"),
        ({"stored_prefix": 1, "normalizer": "softmax1"}, "model.normalizer = softmax1"),
    ],
)
def test_what_no_engine_computes_is_refused(options: dict[str, object], word: str, interface):
    interface.register(NAME, lambda *_, **__: None)
    config = WakefulConfig.of(tiny_decoder(**options).config)
    config._attn_implementation = NAME
    with pytest.raises(WakefulError, match=word):
        WakefulForCausalLM(config)
