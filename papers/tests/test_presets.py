"""The presets: the papers' sizes and settings."""

import dataclasses
import tomllib

import pytest
import torch

from wakeful.config.model import VARIANTS
from wakeful.config.rows import read_rows
from wakeful.config.schema import (
    Config,
    config_from_table,
    config_to_toml,
    read_layouts,
    read_seeds,
    select_variants,
    split_variants,
)
from wakeful.config.tables import merge_tables, preset_names, read_table
from wakeful.data.mixture import mixture_of
from wakeful.model.decoder import Decoder
from wakeful.optim.build import BUILDERS
from wakeful.training.watching import DIAGNOSED_METRICS
from wakeful.variants import variants_by_name
from wakeful_papers.exhibits.exhibit import exhibit_names, read_exhibit

MILLIONS = {
    # Value Residual Learning, Table 4: the sizes the paper's names round.
    "value-residual-2m": (1.6, 0.02),
    "value-residual-82m": (81.9, 0.001),
    "value-residual-180m": (179.9, 0.001),
    "value-residual-468m": (467.8, 0.001),
    # From Attention to Activation gives approximate sizes and no layer counts.
    "activation-gpt2-60m": (60, 0.1),
    "activation-gpt2-130m": (130, 0.1),
    "activation-gpt2-350m": (350, 0.1),
    "activation-gpt2-1.4b": (1400, 0.1),
    "activation-llama2-130m": (130, 0.1),
    # GPT-2 without biases; the paper writes 355M, 770M, 680M (large†) and 1.5B.
    "gpt2-small": (124, 0.005),
    "gpt2-medium": (355, 0.005),
    "gpt2-large": (774, 0.005),
    "gpt2-large-dagger": (687, 0.015),
    "gpt2-xl": (1558, 0.005),
}
CURES = {
    # Two layers' table of values with a gate of twelve channels a head; each head's XSA and sink.
    "wakeful-best": 2 * (4096 * 64 + 4 * 12) + 2 * 4 * 4,
}
"""Parameters that a preset's cures add."""
PAPERS = [name for name in preset_names() if name in MILLIONS]
COMPARISONS = [name for name in preset_names() if "variants" in read_table(name)]
SINGLE = [name for name in preset_names() if name not in COMPARISONS]


def preset(name: str) -> Config:
    return config_from_table(read_table(name))


def num_parameters(config: Config) -> int:
    with torch.device("meta"):
        return Decoder(config.model).num_parameters()["total"]


def test_there_are_the_presets_of_the_papers_and_small_ones() -> None:
    tables = {f"activation-table{table}" for table in ("2", "2-llama", "3", "4", "5", "6")}
    tables.add("activation-rmsprop-lr")
    small = {"cpu-tiny", "cpu-small", "activation-small", "combination", "demo"}
    small |= {"patient", "patient-rotary", "patient-deep", "backcopy", "small-sinks"}
    arena = {"arena", "arena-combined", "arena-patient", "arena-text"}
    arena |= {"arena-optimizers", "arena-124m", "wakeful-best"}
    arena |= {"arena-best", "arena-patient-best", "arena-text-best"}
    assert set(preset_names()) == {*MILLIONS, *tables, *small, *arena}


def test_every_published_table_has_a_preset_with_all_its_rows() -> None:
    for found in map(read_exhibit, exhibit_names()):
        if isinstance(found.compare, str) and found.compare:
            trained = set(read_table(found.compare)["variants"])
            looked_at = set(found.scales["paper"].get("models", {}))
            assert set(found.table.labels) <= trained | looked_at, found.name


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_is_of_whole_configurations(name: str) -> None:
    table = read_table(name)
    rows = split_variants(name, table)
    configs = {variant: config_from_table(entry) for variant, entry in rows.items()}
    assert len(configs) >= 2
    assert all(config.name == variant for variant, config in configs.items())
    different = {config_to_toml(dataclasses.replace(c, name="x")) for c in configs.values()}
    assert len(different) == len(configs)
    for layout in (read_exhibit(each).table for each in read_layouts(table)):
        # Every row that the published table has is trained, and what its columns show is measured.
        rows = set(layout.labels or configs) & set(configs)
        if layout.labels:  # else it has the comparison's rows, and its baseline
            assert layout.baseline == next(iter(configs))
        assert len(rows) >= 2
        figures = {column.figure for column in layout.columns}
        for config in configs.values():
            schemes = {
                f"{kind}_{scheme}"
                for scheme in config.train.quantize.schemes
                for kind in ("increase", "damage")
            }
            known = {"loss", "perplexity", "excess_loss", "steps_per_second", "training_megabytes",
                     "parameters", "cache_bytes", "step_milliseconds"}  # fmt: skip
            diagnosed = set(DIAGNOSED_METRICS) if config.train.diagnose.every else set()
            assert figures <= schemes | known | diagnosed


def test_the_arena_has_every_variant_and_its_grounds_the_same_rows() -> None:
    rows = {name: split_variants(name, read_table(name)) for name in ("arena", "arena-patient")}
    assert list(rows["arena"]) == list(split_variants("arena-text", read_table("arena-text")))
    assert list(rows["arena"]) == list(rows["arena-patient"])
    configs = [config_from_table(entry).model for entry in rows["arena"].values()]
    references = {"on_layers", "then"}
    references |= {"softcap", "reordered", "scaled"}  # of architectures that are read, no cures
    for field, folder in VARIANTS.items():
        if field == "rope":
            continue
        known = {name for name, found in variants_by_name(folder).items()
                 if found.__module__.startswith("wakeful.")}  # fmt: skip
        used = {getattr(model, field).partition("(")[0] for model in configs}
        assert known - references == {name for name in used if ":" not in name}, field
    ground, *others = (
        config_from_table(split_variants(name, read_table(name))["vanilla"])
        for name in ("arena", "arena-combined", "arena-optimizers", "arena-best")
    )
    assert others == [ground] * 3
    patients = (
        config_from_table(split_variants(name, read_table(name))["vanilla"])
        for name in ("arena-patient", "arena-patient-best")
    )
    assert len(set(map(config_to_toml, patients))) == 1
    eight = split_variants("", read_table("arena-124m"))
    assert len(eight) == 10  # beside vanilla and wakeful-best
    eight.pop("wakeful-best")
    assert eight.keys() < rows["arena"].keys()
    cures = ("route", "normalizer", "norm", "placement", "depth", "embedding")
    for name, entry in eight.items():
        large, small = (config_from_table(each) for each in (entry, rows["arena"][name]))
        assert [getattr(large.model, k) for k in cures] == [getattr(small.model, k) for k in cures]
        assert large.optimizer.name == small.optimizer.name


@pytest.mark.parametrize("name", SINGLE)
def test_a_preset_is_a_whole_configuration(name: str) -> None:
    config = preset(name)
    assert config.name == name
    assert config.optimizer.name in BUILDERS
    assert config_from_table(tomllib.loads(config_to_toml(config))) == config


@pytest.mark.parametrize("name", PAPERS)
def test_presets_have_the_papers_sizes(name: str) -> None:
    expected, tolerance = MILLIONS[name]
    assert num_parameters(preset(name)) / 1e6 == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("name", SINGLE)
def test_sizes_are_those_of_the_arithmetic(name: str) -> None:
    model = preset(name).model
    width, bias = model.width, int(model.bias)
    up = 2 if model.mlp == "swiglu" else 1
    attention = 4 * width * width + bias * 4 * width
    mlp = (up + 1) * width * model.mlp_width + bias * (up * model.mlp_width + width)
    norm = {"layernorm": (1 + bias) * width, "rmsnorm": width, "rmsnorm_single": 1}[model.norm]
    ends = model.vocab_size * width * (1 if model.tied else 2)
    positions = model.max_length * width if model.positions == "learned" else 0
    layers = model.num_layers * (attention + mlp + 2 * norm)
    assert num_parameters(preset(name)) == (ends + positions + layers + norm + CURES.get(name, 0))


def test_gpt2_small_with_biases_is_openais() -> None:
    config = config_from_table(merge_tables(read_table("gpt2-small"), {"model": {"bias": True}}))
    assert num_parameters(config) == 124_439_808


@pytest.mark.parametrize("name", [name for name in PAPERS if name.startswith("value-residual")])
def test_value_residual_learning_trains_on_two_million_tokens_a_step(name: str) -> None:
    config = preset(name)
    assert config.train.batch_size * config.train.length == 2**21
    assert config.train.steps * 2**21 == pytest.approx(20e9, rel=0.05)
    rates = config.optimizer
    assert (rates.lr, rates.final_lr, rates.initial_lr) == (6e-4, 6e-5, 1e-7)
    assert (rates.beta1, rates.beta2, rates.weight_decay, rates.clip) == (0.9, 0.95, 0.1, 1.0)
    # 1e-5 is RMSNorm's.
    assert (rates.eps, config.model.norm_eps) == (1e-8, 1e-5)
    assert (config.model.norm, config.model.mlp) == ("rmsnorm", "swiglu")


@pytest.mark.parametrize("name", [name for name in PAPERS if name.startswith("gpt2")])
def test_the_gpt2_presets_are_gpt2_without_biases(name: str) -> None:
    model = preset(name).model
    assert (model.max_length, model.vocab_size, model.tied) == (1024, 50_257, True)
    assert (model.mlp_width, model.width // model.num_heads) == (4 * model.width, 64)
    assert model.scale_logits_by_layer
    assert not model.bias


def test_gpt2_trains_as_each_size_does_in_when_attention_collapses() -> None:
    rates = {"gpt2-medium": 3e-4, "gpt2-large": 2e-4, "gpt2-xl": 1.5e-4}
    for name, rate in rates.items():
        config = preset(name)
        assert (config.optimizer.lr, config.optimizer.final_lr) == (rate, 1e-5)
        tokens = 50_000 if name == "gpt2-medium" else 16_000
        assert config.train.batch_size * config.train.length == pytest.approx(tokens, rel=0.03)
        assert config.data.validation_fraction * 9e9 == pytest.approx(4.4e6, rel=0.03)


@pytest.mark.parametrize("name", PAPERS)
def test_paper_sizes_name_the_papers_text_and_tokenizer(name: str) -> None:
    data = preset(name).data
    sources = [part.source for part in mixture_of(data.source) or ()] or [data.source]
    assert all(source.startswith("hf:") for source in sources)
    assert data.tokenizer.startswith("hf:")


@pytest.mark.parametrize("name", ["table2", "table2-llama", "table3", "table4", "table6"])
def test_rows_of_the_activation_tables_differ_in_softmax_and_optimizer_alone(name: str) -> None:
    table = read_table(f"activation-{name}")
    rows = {key: config_from_table(entry) for key, entry in split_variants("", table).items()}
    base = rows["vanilla"]
    for config in rows.values():
        assert (config.model.norm, config.model.bias) == ("rmsnorm_single", False)
        model = dataclasses.replace(config.model, normalizer=base.model.normalizer)
        optimizer = dataclasses.replace(
            config.optimizer, name=base.optimizer.name, rotation=base.optimizer.rotation
        )
        same = dataclasses.replace(config, name="vanilla", model=model, optimizer=optimizer)
        assert same == base


def test_rmsprops_learning_rates_are_tried_on_table_5s_row() -> None:
    table5 = read_rows(["activation-table5"]).variants
    rows = read_rows(["activation-rmsprop-lr"]).variants
    rates = [row.optimizer.lr for name, row in rows.items() if name != "vanilla"]
    assert rates == [1e-4, 3e-4, 1e-3, 3e-3]
    for name, row in rows.items():
        twin = table5["softmax1-rmsnorm-s" if name == "vanilla" else "rmsprop"]
        rate = {"lr": row.optimizer.lr, "final_lr": row.optimizer.final_lr}
        optimizer = dataclasses.replace(twin.optimizer, **rate)
        assert row == dataclasses.replace(twin, name=row.name, optimizer=optimizer)
        assert row.optimizer.final_lr == pytest.approx(row.optimizer.lr / 10)


def test_wakeful_best_stands_beside_every_row_of_its_larger_ground() -> None:
    rows = read_rows(["arena-text"])
    best = read_rows(["arena-text-best"])
    assert list(best.variants) == [*rows.variants, "wakeful-best", "rotary"]
    assert all(best.variants[name] == row for name, row in rows.variants.items())
    assert (best.layouts, best.seed_sets) == (rows.layouts, rows.seed_sets)
    vanilla, alone = rows.variants["vanilla"], preset("wakeful-best")
    cures = {key: getattr(alone.model, key) for key in ("route", "normalizer", "positions")}
    own = dataclasses.replace(
        vanilla,
        model=dataclasses.replace(vanilla.model, **cures),
        optimizer=dataclasses.replace(vanilla.optimizer, name=alone.optimizer.name),
    )
    assert best.variants["wakeful-best"] == dataclasses.replace(own, name="wakeful-best")
    rotary = dataclasses.replace(vanilla.model, positions="rotary")
    assert best.variants["rotary"] == dataclasses.replace(vanilla, name="rotary", model=rotary)
    chosen = select_variants(best.variants, ["vanilla", "muon", "wakeful-best"])
    assert list(chosen) == ["vanilla", "muon", "wakeful-best"]


@pytest.mark.parametrize("name", ["arena", "arena-patient", "arena-text"])
def test_layernorm_scaling_is_trained_without_scaled_initialization(name: str) -> None:
    """Its authors: combining the two diminishes its effectiveness (2502.05795)."""
    table = read_table(name)
    rows = {key: config_from_table(entry) for key, entry in split_variants("", table).items()}
    assert rows["layernorm-scaling"].model.norm == "layernorm_scaling"
    assert not rows["layernorm-scaling"].model.scale_residual_init


@pytest.mark.parametrize("name", [name for name in PAPERS if name.startswith("activation")])
def test_from_attention_to_activation_has_its_batch_and_context(name: str) -> None:
    config = preset(name)
    assert (config.train.batch_size, config.train.length, config.model.max_length) == (512,) * 3
    assert config.model.normalizer == "softmax"
    assert config.optimizer.name == "adamw"
    assert (config.model.norm, config.model.bias) == ("rmsnorm_single", False)


def test_the_demonstration_compares_twins() -> None:
    table = read_table("demo")
    assert read_seeds(table) == [0]
    twins = {
        name: config_from_table(entry) for name, entry in split_variants("demo", table).items()
    }
    assert list(twins) == ["vanilla", "resformer", "svformer", "softmax1"]
    vanilla = twins["vanilla"]
    for name, config in twins.items():
        assert config.name == name
        # Twins differ in the route or the normalizer, and in nothing else.
        same = dataclasses.replace(
            config.model, route=vanilla.model.route, normalizer=vanilla.model.normalizer
        )
        assert dataclasses.replace(config, name="vanilla", model=same) == vanilla
        assert num_parameters(config) < 4e6
    assert twins["svformer"].model.route == "svformer"
    assert twins["softmax1"].model.normalizer == "softmax1"
    assert twins["resformer"].model.route == 'resformer(mode="learnable")'
