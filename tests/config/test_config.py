"""The configuration: what it reads and what it refuses."""

import dataclasses
import functools
import math
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wakeful.cli.command import parse_arguments
from wakeful.cli.verbs import VERBS
from wakeful.config.keywords import fill_options
from wakeful.config.model import ModelConfig
from wakeful.config.rules import check_rules
from wakeful.config.schema import (
    TRAINED,
    Config,
    DataConfig,
    config_from_table,
    config_to_table,
    config_to_toml,
    load_config,
)
from wakeful.config.tables import from_table, merge_tables, read_table, to_table
from wakeful.errors import WakefulError


def leaves(kind: type, prefix: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield every field below a dataclass: its dotted name, its type and its default."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        below = hints[field.name]
        if dataclasses.is_dataclass(below):
            yield from leaves(below, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, below, field.default


def nested(name: str, value: object) -> dict:
    """Return the table in which a dotted name has a value."""
    for key in reversed(name.split(".")):
        value = {key: value}
    return value  # pyright: ignore[reportReturnType]


KINDS = {name: kind for name, kind, _ in leaves(Config)}
DEFAULTS = {name: default for name, _, default in leaves(Config)}
FIELDS = [name for name in KINDS if name != "name"]


def test_a_model_made_in_python_has_numbers_of_its_fields_types() -> None:
    given = {"rope_theta": 500000, "logit_cap": 30, "norm_eps": 1, "local_theta": 2, "init_std": 0}
    config = ModelConfig(**given)
    floats = {field.name for field in dataclasses.fields(config) if field.type is float}
    assert floats == set(given)
    for name, value in given.items():
        assert type(getattr(config, name)) is float
        assert getattr(config, name) == value
    assert type(dataclasses.replace(config, rope_theta=10).rope_theta) is float
    assert {type(getattr(config, name)) for name in ("num_layers", "query_scalar")} == {int}


def test_every_field_survives_toml() -> None:
    config = config_from_table(
        {
            "name": 'a "b" \\ é\n',
            "model": {"route": 'on_layers(range(5, 8), resformer(mode="constant", scale=5.0))',
                      "num_kv_heads": 2, "bias": True, "norm": "layernorm"},
            "optimizer": {"lr": 1e-17, "beta2": 0.999},
            "train": {"dtype": "bfloat16", "compile": True},
        }
    )  # fmt: skip
    assert config_from_table(tomllib.loads(config_to_toml(config))) == config
    assert config_from_table(tomllib.loads(config_to_toml(Config()))) == Config()


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_of_another_type_is_refused_by_name(name: str) -> None:
    with pytest.raises(WakefulError, match=rf"{re.escape(name)} must be"):
        config_from_table(nested(name, {"no": "table"}))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"modle": {}}, r"unknown key 'modle' \(did you mean 'model'\?\)"),
        ({"train": {"step": 3}}, r"unknown key 'train.step' \(did you mean 'steps'\?\)"),
        ({"train": {"steps": 3.5}}, "train.steps must be a whole number, got 3.5"),
        ({"train": {"steps": True}}, "train.steps must be a whole number, got True"),
        ({"train": {"steps": 0}}, "train.steps must be at least 1"),
        ({"train": 7}, "train must be a table"),
        ({"train": {"dtype": "float8"}}, "train.dtype must be one of"),
        ({"model": {"num_heads": 3}}, "num_heads = 3 does not divide model.width = 128"),
        ({"model": {"num_kv_heads": 3}}, "num_kv_heads = 3 does not divide model.num_heads = 4"),
        ({"model": {"head_width": 5}}, "a head has 5"),
        ({"model": {"mlp": "relu"}}, "model.mlp must be one of"),
        ({"train": {"length": 4096}}, "longer than the model's context"),
        ({"train": {"micro_batch_size": 3}}, "does not divide"),
        ({"optimizer": {"beta1": 1.0}}, r"must be in \[0, 1\)"),
        (
            {"optimizer": {"lr": float("nan")}},
            r"optimizer\.lr must be finite, got nan",
        ),
        ({"optimizer": {"clip": float("inf")}}, r"optimizer\.clip must be finite, got inf"),
        ({"optimizer": {"lr": -1.0}}, r"optimizer\.lr must not be negative, got -1\.0"),
        ({"optimizer": {"eps": 0.0}}, r"optimizer\.eps must be above 0"),
        ({"model": {"norm_eps": float("nan")}}, r"model\.norm_eps must be finite"),
        (
            {"train": {"distill": {"alpha": math.inf}}},
            r"train\.distill\.alpha must be finite, got inf",
        ),
        ({"train": {"seed": -1}}, r"train\.seed must be in \[0, 2\*\*63\), got -1"),
        ({"name": ""}, "name must be fit for a folder"),
        ({"name": "a\0b"}, "name must be fit for a folder"),
        ({"two\nlines": 1}, r"unknown key 'two\\nlines'"),
        ({"data": {"validation_fraction": 1.0}}, r"must be in \(0, 1\)"),
        ({"train": {"diagnose": {"evry": 5}}}, r"unknown key 'train.diagnose.evry' \(did you mean"),
        ({"train": {"diagnose": {"every": -5}}}, "train.diagnose.every must not be negative"),
        ({"train": {"quantize": {"schemes": "w4"}}}, "schemes must be a list"),
    ],
)
def test_bad_configurations_are_refused_in_one_line(table: dict, message: str) -> None:
    with pytest.raises(WakefulError, match=message) as caught:
        config_from_table(table)
    assert "\n" not in str(caught.value)


MADE_UP = [
    b"[train]\nsteps = " + b"1" * 5000,
    b"[optimizer]\nlr = 1e999",
    b"[train]\nsteps = 1979-05-27",
    b"preset = 3",
    b"preset = [[]]",
    b"[model]\nwidth = 0x" + b"f" * 3000,
    b"a = " + b"[" * 5000,
    b"a" + b".a" * 3000 + b" = 1",
    b"\xff\xfe",
    b"name = '\x00'",
]
"""What random bytes would hardly hit: none is a configuration."""
READABLE = [
    b"",
    b"[train]\nsteps = 30",
    b"\xef\xbb\xbf[train]",
    b"# a comment\nname = 'mine'\r\noptimizer.lr = 1e-2\n",
    b'preset = "cpu-tiny"\n[model]\nroute = "svformer"',
    '[train.quantize]\nschemes = ["é", \'"\']'.encode(),
]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def any_value(kind: object) -> st.SearchStrategy[object]:
    """Draw what a field of some type may hold, extremes included."""
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is tuple:
        return st.lists(any_value(get_args(kind)[0]), max_size=3)
    plain: dict[object, st.SearchStrategy[object]] = {
        bool: st.booleans(),
        int: st.integers(-2, 40) | st.integers(),
        float: st.floats(0, 1) | st.floats() | st.integers(-3, 3),
        str: TEXT,
    }
    return plain[kind]


@st.composite
def any_table(draw: st.DrawFn) -> dict[str, dict[str, object]]:
    """Draw a table of a few fields with values of their types."""
    table: dict = {}
    for name in draw(st.lists(st.sampled_from(list(KINDS)), max_size=4, unique=True)):
        table = merge_tables(table, nested(name, draw(any_value(KINDS[name]))))
    return table


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(any_table())
def test_every_configuration_survives_toml_and_the_rest_is_refused(table: dict) -> None:
    refusal, config = "", Config()
    try:
        config = config_from_table(table)
    except WakefulError as error:
        refusal = str(error)
    assert "\n" not in refusal
    written = tomllib.loads(config_to_toml(config))
    assert config_from_table(written) == config
    assert config_to_table(config) == written


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_survives_toml_alone(name: str) -> None:
    default = DEFAULTS[name]
    others: dict[type, object] = {
        bool: not default,
        int: 16,
        float: 0.25,
        str: 'resformer(mode="learnable")',
        tuple: ['é\n"', "\t'"],
    }
    other = CHOICES.get(name, others[type(default)])
    table = merge_tables(nested(name, other), NEEDS.get(name, {}))
    config = config_from_table(table)
    read = functools.reduce(getattr, name.split("."), config)
    assert (list(read) if isinstance(read, tuple) else read) == other
    assert read != default
    assert config_from_table(tomllib.loads(config_to_toml(config))) == config
    # Nothing else has changed.
    alone = config_from_table(merge_tables(config_to_table(Config()), table))
    assert config_to_table(config) == config_to_table(alone)


NEEDS = {
    "model.qk_norm_whole": {"model": {"qk_norm": True}},
    "data.tokenizer": {"data": {"vocab_size": DEFAULTS["data.vocab_size"]}},
}
"""What a field is refused without, or takes away."""
CHOICES: dict[str, object] = {
    "model.local_layers": [0, 2],
    "model.norm": "rmsnorm_single",
    "model.attention_bias": "qkv",
    "model.positions": "learned",
    "model.mlp": "gelu",
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.rope": "linear(factor=2.0)",
    "model.max_length": 1024,
    "train.dtype": "float64",
    "train.parallel": "ddp",
    "train.batch_size": 32,
    "train.steps": 100,
    "train.eval_batch_size": 4,
    "train.distill.over": "mean",
}


def bytes_are_accepted(content: bytes) -> bool:
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(content)
        file.flush()
        try:
            config_from_table(read_table(file.name))
        except WakefulError:
            return False
    return True


@pytest.mark.slow
@given(st.binary(max_size=200) | st.sampled_from(MADE_UP))
def test_bytes_are_a_configuration_or_refused(content: bytes) -> None:
    bytes_are_accepted(content)


def test_bytes_of_a_configuration_are_accepted_and_made_up_ones_refused() -> None:
    assert all(map(bytes_are_accepted, READABLE))
    assert not any(map(bytes_are_accepted, MADE_UP))


def table_is_accepted(value: object) -> bool:
    try:
        config_from_table(value if isinstance(value, dict) else {"model": value})
    except WakefulError:
        return False
    return True


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["model", "train", "steps", "width", "x"]), inner)
        ),
        max_leaves=8,
    )
)
def test_tables_are_a_configuration_or_refused(value: object) -> None:
    table_is_accepted(value)


def test_tables_of_a_configuration_are_accepted() -> None:
    tables = ({}, {"model": {}}, {"model": {"width": 64}, "train": {"steps": 30}})
    assert all(map(table_is_accepted, tables))
    assert not any(map(table_is_accepted, (None, [], 3.0, {"x": {}}, {"model": {"steps": 3}})))


def test_a_file_may_start_from_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('preset = "cpu-tiny"\n[model]\nroute = "svformer"\n')
    config = config_from_table(read_table(file))
    assert config.model.route == "svformer"
    assert config.model.num_layers == config_from_table(read_table("cpu-tiny")).model.num_layers
    file.write_text('preset = "cpu-tinny"\n')
    with pytest.raises(WakefulError, match="did you mean 'cpu-tiny'"):
        read_table(file)
    with pytest.raises(WakefulError, match="neither a file nor a preset"):
        read_table("nowhere")


def test_a_file_called_like_the_preset_it_starts_from_starts_from_the_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = read_table("cpu-tiny")
    Path("cpu-tiny").write_text('preset = "cpu-tiny"\n[train]\nsteps = 3\n')
    found = read_table("cpu-tiny")
    assert found["train"].pop("steps") == 3
    assert whole["train"].pop("steps") != 3
    assert found == whole


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in (tmp_path, "x" * 5000, "a\0b"):
        with pytest.raises(WakefulError, match="neither a file nor a preset"):
            read_table(source)
    file = tmp_path / "mine.toml"
    file.write_text("")

    def forbidden(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with pytest.raises(WakefulError, match=r"mine\.toml cannot be read: Permission denied"):
        read_table(file)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    n: int
    x: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One of everything that a file may hold."""

    source: str | tuple[str, ...]
    inner: Inner
    many: tuple[Inner, ...] = ()
    named: Mapping[str, Inner] = dataclasses.field(default_factory=dict)
    rest: Any = None


FULL = {
    "source": ["a", "b"], "inner": {"n": 1}, "many": [{"n": 2, "x": 3}], "named": {"k": {"n": 4}},
    "rest": [{}],
}  # fmt: skip


def test_a_record_is_read_as_it_is_typed() -> None:
    found = from_table(Record, {**FULL, "later": 1, "inner": {"n": 1, "later": 2}}, record="x.json")
    assert found == Record(
        source=("a", "b"), inner=Inner(n=1), many=(Inner(n=2, x=3.0),), named={"k": Inner(n=4)},
        rest=[{}],
    )  # fmt: skip
    assert type(found.many[0].x) is float
    assert from_table(Record, to_table(found), record="x.json") == found
    assert to_table(found)["named"] == {"k": {"n": 4, "x": None}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": {}}, r"inner\.n is missing"),
        ({"inner": None}, "inner must be a table, got None"),
        ({"source": 3}, "source must be a string or a list, got 3"),
        ({"source": ["a", 3]}, "source must be a string or a list"),
        ({"many": {}}, "many must be a list"),
        ({"many": [{"n": 1}, {"n": True}]}, r"many\[1\]\.n must be a whole number, got True"),
        ({"named": {"k": {"n": 1.5}}}, r"named\.k\.n must be a whole number"),
        ({"inner": {"n": 1, "x": "3"}}, r"inner\.x must be a number"),
        ({"inner": {"n": 1, "x": math.inf}}, r"inner\.x must be finite"),
        ({"inner": {"n": 10**400}}, r"inner\.n must be finite"),
    ],
)
def test_a_record_of_other_types_is_refused_by_its_field(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(WakefulError, match=rf"^x\.json: {message}") as caught:
        from_table(Record, FULL | change, record="x.json")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_what_a_user_writes_has_no_fields_but_the_known() -> None:
    with pytest.raises(WakefulError, match=r"unknown key 'inner\.later'"):
        from_table(Record, {**FULL, "inner": {"n": 1, "later": 2}})


def test_merging_keeps_what_is_not_named() -> None:
    assert merge_tables({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}}) == {
        "a": {"b": 1, "c": 4},
        "d": 3,
    }


def test_a_tokenizer_that_is_given_leaves_out_the_size_of_one_to_train() -> None:
    base = {"data": {"vocab_size": 512, "source": "x"}, "model": {"vocab_size": 9}}
    over = merge_tables(base, {"data": {"tokenizer": "mine"}, "model": {"width": 8}})
    assert over == {"data": {"tokenizer": "mine", "source": "x"},
                    "model": {"vocab_size": 9, "width": 8}}  # fmt: skip
    assert merge_tables(base, {"data": {"tokenizer": ""}})["data"]["vocab_size"] == 512
    both = merge_tables(base, {"data": {"tokenizer": "mine", "vocab_size": 99}})
    assert both["data"]["vocab_size"] == 99
    found = load_config("activation-small", data={"tokenizer": "mine"}).data
    assert (found.tokenizer, found.vocab_size) == ("mine", DataConfig.vocab_size)
    _, table = parse_arguments("train", VERBS["train"], ["--data.tokenizer", "mine"])
    data = fill_options(Config, table, load_config(base)).data
    assert (data.tokenizer, data.vocab_size) == ("mine", DataConfig.vocab_size)
    with pytest.raises(WakefulError, match="is for a tokenizer that is trained"):
        check_rules(load_config(base, data={"tokenizer": "mine", "vocab_size": 99}).data, TRAINED)
