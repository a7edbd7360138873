"""Masks and positions in traced graphs: `torch.export`, `torch.compile`, FakeTensor, vmap."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, vmap

from helpers import some_tokens
from hf.models import INPUTS, VARIANTS, inputs_of, padded, pair
from hf.softmax1_models import build
from wakeful.hf.modeling import WakefulForCausalLM

TRACED = ("svformer", "learned sink", "gpt-2")


def exported(model: WakefulForCausalLM, given: dict[str, Tensor]) -> Tensor:
    program = torch.export.export(model, (), {**given, "use_cache": False}, strict=False)
    return program.module()(**given, use_cache=False).logits


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("name", TRACED)
@torch.no_grad()
def test_exported_models_take_masks_and_positions(name: str, kind: str) -> None:
    _, model = pair(**VARIANTS[name])
    given = inputs_of(kind)
    expected = model(**given).logits
    real = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    found = exported(model, given)
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_whole_graphs_are_compiled_with_masks_and_positions() -> None:
    script = str(Path(__file__).with_name("compiled_masks.py"))
    ran = subprocess.run(
        [sys.executable, "-W", "error", script, *INPUTS],
        capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    errors = json.loads(ran.stdout)
    assert list(errors) == list(INPUTS)
    assert max(errors.values()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("kind", INPUTS)
def test_fake_tensors_pass_through(kind: str) -> None:
    _, model = pair()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = {name: mode.from_tensor(tensor) for name, tensor in inputs_of(kind).items()}
        assert model(**given).logits.shape == (2, 12, 29)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@torch.no_grad()
def test_masks_are_batched_by_vmap() -> None:
    _, model = pair()
    tokens, mask = padded(some_tokens(3, 9), 9, 7, 2)

    def one(row: Tensor, real: Tensor) -> Tensor:
        given = {"input_ids": row[None], "attention_mask": real[None], "use_cache": False}
        return functional_call(model, {}, (), given).logits[0]

    found = vmap(one)(tokens, mask)
    expected = model(tokens, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-12)


@torch.no_grad()
def test_rows_longer_than_the_context_hold_texts_that_fit() -> None:
    """Packed texts, and padding, count by their positions (Llama runs both)."""
    for variant in ({"positions": "learned"}, {"stored_prefix": 2}, {}):
        decoder, model = pair(max_length=24, **variant)
        size = decoder.config.context
        tokens = some_tokens(1, 3 * size)
        alone = torch.cat([decoder(piece) for piece in tokens.split(size, 1)], 1)
        places = torch.arange(size).repeat(3)[None]
        packed = model(tokens, position_ids=places).logits
        torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)
        numbers = torch.arange(3).repeat_interleave(size)[None]
        by_document = decoder(tokens, documents=numbers)
        torch.testing.assert_close(by_document, alone, rtol=0, atol=1e-12)

        left, mask = padded(tokens, size)
        for row, real in ((left, mask), (left.flip(1), mask.flip(1))):
            expected = decoder(row[real.bool()][None])[0]
            first = int(real[0].argmax())
            for places in (None, torch.arange(3 * size)[None] - first):
                found = model(row, attention_mask=real, position_ids=places).logits
                torch.testing.assert_close(found[real.bool()], expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_padded_row_longer_than_the_context_is_continued() -> None:
    decoder, model = pair(max_length=24)
    tokens, mask = padded(some_tokens(2, 30), 18, 5)
    found = model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False)
    for row, length in enumerate((18, 5)):
        text = tokens[row : row + 1, 30 - length :]
        for _ in range(6):
            text = torch.cat([text, decoder(text)[:, -1:].argmax(-1)], 1)
        assert torch.equal(found[row, 30 - length :], text[0])


def test_positions_outside_the_context_are_refused() -> None:
    _, model = pair(max_length=24)
    tokens = some_tokens(1, 5)
    for places in ([0, 1, 2, 3, 24], [-1, 0, 1, 2, 3]):
        with pytest.raises(ValueError, match="positions must lie between 0 and 23"):
            model(tokens, position_ids=torch.tensor([places]))
    with pytest.raises(ValueError, match="context of 24"):
        model(
            some_tokens(1, 30), attention_mask=torch.ones(1, 30).index_fill(1, torch.tensor(0), 0)
        )


@pytest.mark.slow
@torch.no_grad()
def test_softmax1_masks_are_traced_and_a_bias_still_refused() -> None:
    model = build("llama")
    tokens, mask = padded(some_tokens(2, 9), 9, 6)
    expected = model(tokens, attention_mask=mask, use_cache=False).logits
    given = {"input_ids": tokens, "attention_mask": mask}
    found = exported(model, given)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-6)

    additive = torch.zeros(2, 1, 9, 9)
    program = torch.export.export(
        model, (), {"input_ids": tokens, "attention_mask": additive, "use_cache": False},
        strict=False,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="holds a bias between the two"):
        program.module()(input_ids=tokens, attention_mask=additive - 0.5, use_cache=False)
