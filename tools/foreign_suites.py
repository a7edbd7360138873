"""Run the test suites of Transformers, torch and PEFT over our classes and count what passes:

    python tools/foreign_suites.py TREE [NAME ...] [--tests PATTERN] [--list]

TREE is the source tree of the Transformers that is installed, with its `tests/`; nothing is
fetched, and nothing of it is copied. NAME is a model of `OURS` or `THEIRS`, or `optimizers`, whose
cases come with torch. What does not apply is in `NOT_APPLICABLE`, with the reason. The exit status
is 1 where a test fails. The tree's tests need the package `parameterized`.

With the one NAME `peft`, TREE is the source tree (or the sdist) of the PEFT that is installed: its
decoder suite runs over a folder of our class that `export` wrote, with the configurations of LoRA
unless PATTERN says otherwise. Its tests need the package `diffusers`.
"""

import argparse
import importlib
import io
import os
import re
import sys
import tempfile
import unittest
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging

from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf import WakefulConfig, WakefulForCausalLM, WakefulModel
from wakeful.hf.weights_out import export_decoder
from wakeful.model import Decoder, ModelConfig, initialize
from wakeful.optim import build_optimizer
from wakeful.optim.build import BUILDERS
from wakeful.variants.implementations import SOFTMAX1

OURS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "svformer": {"route": "svformer"},
    "resformer": {"route": 'resformer(mode="learnable")'},
    "cla": {"route": "cla"},
    "value_embedding": {"route": "value_embedding"},
    "cured": {"normalizer": "softmax1(learned=True)", "norm": "rmsnorm_single"},
    "mudd": {"depth": "mudd"},
    "denseformer": {"depth": "denseformer"},
    "gpt2": {"norm": "layernorm", "positions": "learned", "mlp": "gelu", "bias": True},
    "windowed": {"local_layers": (0,), "window": 8, "logit_cap": 20.0},
    "stored": {"stored_prefix": 1},
    "remote": {"normalizer": "softmax1(learned=True)", "route": "svformer", "depth": "mudd"},
}
"""Our classes by name, and the parts of their models. The classes of `remote` are those of the code
that lies beside an exported model, as Transformers loads it where wakeful is not installed."""

_SMALL = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 64}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "gpt_oss": ("GptOss", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "gpt_neox": (
        "GPTNeoX",
        {
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "num_key_value_heads": 4,
            "rotary_pct": 1.0,
        },
    ),
    "gemma2": ("Gemma2", {"head_dim": 8, "attn_logit_softcapping": None, "sliding_window": 64}),
}
"""Transformers' classes by name, which attend by softmax-1."""

NOT_APPLICABLE: tuple[tuple[str, str, str], ...] = (
    ("", r"contrastive|group_beam|constrained_beam", "needs code from the Hub"),
    ("", r"continuous_batching|generate_batch|paged", "no pages of keys and values: refused"),
    ("", r"test_attention_outputs", "attention weights are never made"),
    ("", r"flash_attn|flash_attention|flex_attention|_fa\d|deepgemm", "kernels of accelerators"),
    ("", r"output_attentions|capture_outputs_decorator", "attention weights are never made"),
    ("ours", r"static_cache|compile_decod|test_generate_compile|compileable",
     "its cache is its own, and of no fixed size"),
    ("ours", r"eager_matches|sdpa_matches", "one attention, which is no implementation of theirs"),
    ("ours", r"use_reentrant_true", "the reentrant form is refused"),
    ("ours", r"^test_gradient_checkpointing_enable|training_gradient_checkpointing",
     "looks for a class of layers of theirs"),
    ("ours", r"past_key_values_format|cache_format|quant_cache|offloaded_cache|hybrid_cache",
     "reads the layers of a cache of theirs"),
    ("value_embedding", r"inputs_embeds|soft_prompt", "takes no embeddings alone"),
    ("theirs", r"eager_matches|sdpa_matches", "compares with the softmax, which softmax-1 is not"),
)  # fmt: skip
"""Model ("": any, "ours", "theirs" or a name), pattern of a test's name, why it does not apply."""


class Inputs:
    """What the suites ask for a model: a configuration and a batch."""

    batch_size, seq_length, is_training = 4, 7, True
    num_hidden_layers, num_attention_heads, hidden_size = 2, 4, 32

    def __init__(self, name: str) -> None:
        self.name = name

    def get_config(self) -> Any:
        if self.name in OURS:
            names = {key: value for key, value in _SMALL.items() if key != "num_key_value_heads"}
            parts = {
                "vocab_size": 99, "width": 32, "mlp_width": 32, "num_layers": 2, "num_heads": 4,
                "num_kv_heads": 2, "max_length": 512,
            }  # fmt: skip
            ids = {key: value for key, value in names.items() if key.endswith("_id")}
            kind = remote_classes()[0] if self.name == "remote" else WakefulConfig
            return kind(parts=parts | OURS[self.name], **ids)
        kind, options = THEIRS[self.name]
        made = getattr(transformers, f"{kind}Config")(**_SMALL | options)
        made._attn_implementation = SOFTMAX1
        return made

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        shape = self.batch_size, self.seq_length
        tokens = torch.randint(3, 99, shape)
        return self.get_config(), {"input_ids": tokens, "attention_mask": torch.ones(shape).long()}


@cache
def remote_classes() -> tuple[type, type, type]:
    """Return the classes of configuration, model and language model in an export's own code."""
    parts = OURS["remote"] | {"vocab_size": 270, "width": 32, "mlp_width": 32, "num_layers": 2}
    tokenizer = Tokenizer.train(["a b c"], 270)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "exported"
        export_decoder(Decoder(ModelConfig(**parts, num_heads=4)), place, tokenizer=tokenizer)
        names = ("configuration_wakeful.WakefulConfig", "modeling_wakeful.WakefulModel",
                 "modeling_wakeful.WakefulForCausalLM")  # fmt: skip
        config, base, causal = (get_class_from_dynamic_module(name, place) for name in names)
    assert all(
        kind.__module__.startswith("transformers_modules.") for kind in (config, base, causal)
    )
    return config, base, causal


def model_case(name: str) -> type[unittest.TestCase]:
    """Return the suites of Transformers as a test case of one model."""
    suites = importlib.import_module("tests.test_modeling_common")
    generation = importlib.import_module("tests.generation.test_utils")
    base: Any = WakefulModel
    causal: Any = WakefulForCausalLM
    if name == "remote":
        _, base, causal = remote_classes()
    elif name in THEIRS:
        kind = THEIRS[name][0]
        base, causal = (getattr(transformers, kind + end) for end in ("Model", "ForCausalLM"))

    first: Any = (_Ours,) if name in OURS else ()

    mixins: Any = (suites.ModelTesterMixin, generation.GenerationTesterMixin)

    class Case(*first, *mixins, unittest.TestCase):
        # Their training tests know a base model by the tables of theirs.
        all_model_classes = (causal,) if name in OURS else (base, causal)
        has_attentions = False
        test_resize_embeddings = True

        def setUp(self) -> None:
            torch.manual_seed(0)
            self.model_tester = Inputs(name)

    Case.__name__ = Case.__qualname__ = name
    return Case


class _Ours:
    """What a model outside Transformers tells its suites, which know their own by tables."""

    def _prepare_for_class(
        self, inputs_dict: dict[str, Any], model_class: Any, return_labels: bool = False
    ) -> dict[str, Any]:
        labels = {"labels": inputs_dict["input_ids"]} if return_labels else {}
        return inputs_dict | labels

    def _check_past_key_values_for_generate(
        self, batch_size: int, past_key_values: Any, seq_length: int, config: Any
    ) -> None:
        """Check a cache in which a layer that borrows keys or values has none of its own."""
        cache = past_key_values
        assert len(cache) == config.num_hidden_layers
        assert cache.get_seq_length() == seq_length
        full = (batch_size, config.num_key_value_heads, seq_length, config.head_dim)
        none = (batch_size, 0, seq_length, config.head_dim)
        for layer in cache.layers:
            assert layer.keys.shape in (full, none)
            assert layer.values.shape in (full, none)


def optimizer_case() -> type[unittest.TestCase]:
    """Return torch's cases of optimizers, as far as it installs them, for each of ours."""
    cases: Any = importlib.import_module("torch.testing._internal.common_optimizers")
    schedules = {info.optim_cls.__name__: info.scheduler_inputs for info in cases.optim_db}

    class Optimizers(unittest.TestCase):
        def built(self, name: str, **options: Any) -> tuple[Any, list[Any]]:
            torch.manual_seed(0)
            weight, bias = (
                torch.nn.Parameter(torch.randn(10, 5)),
                torch.nn.Parameter(torch.randn(10)),
            )
            named = [("layer.weight", weight), ("layer.bias", bias)]
            return build_optimizer(name, named, **options), [weight, bias]

    def learns(name: str, make: Any) -> Any:
        def test(self: Optimizers) -> None:
            optimizer, (weight, bias) = self.built(name, lr=1e-2, weight_decay=0.0)
            schedulers = [one(optimizer) for one in make]
            target = torch.randn(5)
            losses = []
            for _ in range(20):
                optimizer.zero_grad()
                loss = (weight.mv(target) + bias).square().sum()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                for scheduler in schedulers:
                    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                        scheduler.step(loss)
                    else:
                        scheduler.step()
            assert losses[-1] < losses[0]
            again, _ = self.built(name, lr=1e-2, weight_decay=0.0)
            again.load_state_dict(optimizer.state_dict())

        return test

    def refuses(name: str, given: Any) -> Any:
        def test(self: Optimizers) -> None:
            options = dict(given.optimizer_error_input.kwargs)
            expected = self.assertRaisesRegex(ValueError, given.error_regex)  # noqa: PT027
            with expected:
                self.built(name, **options)

        return test

    for name in BUILDERS:
        makes = schedules["SGD"] if name in ("muon", "sgd_momentum") else schedules["AdamW"]
        for number, make in enumerate(makes):
            constructors = make if isinstance(make, list | tuple) else [make]
            setattr(Optimizers, f"test_{name}_schedule_{number}", learns(name, constructors))
        for given in cases.get_error_inputs_for_all_optims("cpu", torch.float32):
            if given.error_regex == "Tensor lr must be 1-element":
                setattr(Optimizers, f"test_{name}_rate_of_two", refuses(name, given))
    return Optimizers


def reason(name: str, test: str) -> str:
    """Return why a test does not apply to a model; "" where it does."""
    kind = "ours" if name in OURS else "theirs" if name in THEIRS else name
    for of, pattern, why in NOT_APPLICABLE:
        if of in ("", kind, name) and re.search(pattern, test):
            return why
    return ""


def tests_of(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Yield the single tests of a suite."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from tests_of(test)
        else:
            yield test


def run(case: type[unittest.TestCase], pattern: str) -> tuple[Counter[str], dict[str, str]]:
    """Run a case; return the counts, and the last line of each failure."""
    counts: Counter[str] = Counter()
    failures: dict[str, str] = {}
    for test in tests_of(unittest.defaultTestLoader.loadTestsFromTestCase(case)):
        short = test.id().rpartition(".")[2]
        if not re.search(pattern, short):
            continue
        if reason(case.__name__, short):
            counts["not applicable"] += 1
            continue
        result = unittest.TestResult()
        with warnings.catch_warnings(record=True):  # not printed; tests that ask for them see them
            warnings.simplefilter("always")
            test.run(result)
        if result.failures or result.errors:
            counts["failed"] += 1
            trace = (result.failures + result.errors)[0][1]
            failures[short] = trace.strip().splitlines()[-1]
            print(f"  {case.__name__}.{short}: {failures[short][:300]}", flush=True)
        elif result.skipped:
            counts["skipped by itself"] += 1
        else:
            counts["passed"] += 1
    return counts, failures


class PeftSuite:
    """A plugin for pytest: gives PEFT's decoder suite our exported folder, and counts."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self.folder, self.pattern = folder, pattern
        self.counts: Counter[str] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for mark in metafunc.definition.iter_markers("parametrize"):
            if mark.args[0] == "model_id":
                mark.args[1][:] = [str(self.folder)]  # the list of the suite's own models

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if re.search(self.pattern, item.nodeid)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped or report.when == "call":
            self.counts[report.outcome] += 1


def run_peft(tree: Path, pattern: str) -> int:
    """Run PEFT's decoder suite over an export of our class; return the exit status."""
    suite = tree / "tests" / "test_decoder_models.py"
    if not suite.is_file():
        raise WakefulError(f"{tree} has no tests/test_decoder_models.py")
    tables: Any = importlib.import_module("peft.utils.constants")
    names = tables.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    names[WakefulConfig.model_type] = [
        "q_proj",
        "v_proj",
    ]  # no class of ours is in its table
    # The suite writes ids up to 1000 and adapters whose ranks need this width.
    sizes = {"vocab_size": 1024, "width": 64, "mlp_width": 64, "num_layers": 2, "num_heads": 4}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "exported"
        decoder = initialize(Decoder(ModelConfig(**sizes | OURS["stored"])), seed=0)
        export_decoder(decoder, folder, tokenizer=Tokenizer.train(["a b c"], 270))
        plugin = PeftSuite(folder, pattern or r"\[LoraConfig")
        sys.path.insert(0, str(tree))
        sys.modules.pop("tests", None)
        options = [
            "-q", "--tb=line", "-p", "no:cacheprovider", f"--rootdir={tree}",
            "-c", os.devnull,  # PEFT's own options need more packages
            "--import-mode=importlib", "-o", "consider_namespace_packages=true",  # as in an sdist
        ]  # fmt: skip
        pytest.main([str(suite), *options], plugins=[plugin])
    counts = plugin.counts
    print(f"all: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if counts["failed"] or not counts["passed"] else 0


def main(arguments: list[str]) -> int:
    """Run what is asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":\n")[0])
    parser.add_argument("tree", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--tests", default="", help="run those whose names match this pattern")
    parser.add_argument("--list", action="store_true", help="list what does not apply, and why")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        for of, pattern, why in NOT_APPLICABLE:
            print(f"{of or 'any'}: {pattern}: {why}")
        return 0
    if chosen.names == ["peft"]:
        return run_peft(chosen.tree.resolve(), chosen.tests)
    known = [*OURS, *THEIRS, "optimizers"]
    if unknown := set(chosen.names) - set(known):
        raise WakefulError(f"{min(unknown)} is none of {', '.join(known)}")
    if not (chosen.tree / "tests" / "test_modeling_common.py").is_file():
        raise WakefulError(f"{chosen.tree} has no tests/test_modeling_common.py")
    sys.path.insert(0, str(chosen.tree.resolve()))
    sys.modules.pop("tests", None)
    logging.disable_progress_bar()
    total: Counter[str] = Counter()
    for name in chosen.names or known:
        case = optimizer_case() if name == "optimizers" else model_case(name)
        case.__name__ = name
        counts, _ = run(case, chosen.tests)
        print(f"{name}: {dict(counts)}", flush=True)
        total += counts
    print(f"all: {total['passed']} passed, {total['failed']} failed, "
          f"{total['not applicable']} not applicable, {total['skipped by itself']} skipped by "
          "themselves")  # fmt: skip
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.stdout = io.TextIOWrapper(sys.stdout.buffer, "utf-8", line_buffering=True)
    sys.exit(main(sys.argv[1:]))
