"""An exhibit at a scale: which runs it takes, and what they cost."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from wakeful.config.model import ModelConfig
from wakeful.config.rows import nested, rescaled
from wakeful.config.schema import (
    OWN_KEYS,
    Config,
    config_from_table,
    config_to_table,
    seeds_of,
    variants_of,
)
from wakeful.config.tables import Table, merged, on_preset, own_table
from wakeful.errors import WakefulError
from wakeful.exhibits.exhibit import Exhibit, Heirs, Scale

H100 = 989e12 * 0.4
"""Operations a second of one H100 in bfloat16, at two fifths of its peak."""
_LATER = {"embedding": "plain"}
"""Fields of `[model]` that older runs lack, and what they had."""
_BYTES_A_PARAMETER = 16
"""In training: weight, gradient and two moments in float32."""


@dataclass(frozen=True)
class Job:
    """One training run: a row in its group; the seed is set when it is trained."""

    group: str
    row: str
    config: Config

    @cached_property
    def folder(self) -> str:
        """What the run is called among others: equal configurations share one folder."""
        table = config_to_table(self.config)
        del table["name"]
        for field, usual in _LATER.items():  # runs from before the field was there keep their name
            if table["model"].get(field) == usual:
                del table["model"][field]
        digest = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.config.model.num_layers}x{self.config.model.width}-{digest}"

    def seeded(self, seed: int) -> Config:
        """Return the configuration with a seed, called by its row."""
        train = dataclasses.replace(self.config.train, seed=seed)
        return dataclasses.replace(self.config, name=self.row, train=train)


@dataclass(frozen=True)
class Plan:
    """What an exhibit takes at a scale."""

    exhibit: Exhibit
    scale: Scale
    seeds: tuple[int, ...]
    jobs: tuple[Job, ...]
    """Of an inheritance the references, a row `reference` each."""
    heirs: Heirs | None

    @cached_property
    def models(self) -> tuple["Size", ...]:
        """The size of each job's model."""
        return tuple(size_of(job.config) for job in self.jobs)

    @property
    def parameters(self) -> int:
        """Parameters of the largest model."""
        return max((size.parameters for size in self.models), default=0)

    @property
    def tokens(self) -> int:
        """Tokens of the longest run."""
        return max((_tokens(job.config) for job in self.jobs), default=0)

    @property
    def all_tokens(self) -> float:
        """Tokens of every run and seed together."""
        each = {job.folder: _tokens(job.config) for job in self.jobs}
        return len(self.seeds) * sum(each.values()) * self._with_heirs

    @property
    def operations(self) -> float:
        """Floating-point operations of all training: 6 a parameter and token."""
        each = {
            job.folder: 6.0 * size.parameters * _tokens(job.config)
            for job, size in zip(self.jobs, self.models, strict=True)
        }
        return len(self.seeds) * sum(each.values()) * self._with_heirs

    @property
    def _with_heirs(self) -> float:
        if self.heirs is None:
            return 1.0
        # The heir and each arm: the reference's shape with a share of its layers.
        return 1.0 + self.heirs.keep * self.heirs.steps * (1 + len(self.heirs.baseline))

    @property
    def memory(self) -> int:
        """Bytes that the largest run takes, very roughly."""
        return max((size.memory for size in self.models), default=0)

    @property
    def disk(self) -> int:
        """Bytes of all runs' checkpoints and of the tokens, very roughly."""
        kept = {
            job.folder: 12 * size.parameters * (2 if job.config.train.checkpoint_every else 1)
            for job, size in zip(self.jobs, self.models, strict=True)
        }
        tokens = {job.config.data: 4 * _tokens(job.config) for job in self.jobs}
        return int(len(self.seeds) * sum(kept.values()) * self._with_heirs + sum(tokens.values()))

    @property
    def text(self) -> str:
        """The text that is trained on, in words."""
        return ", ".join(dict.fromkeys(job.config.data.source for job in self.jobs))


@dataclass(frozen=True)
class Size:
    """A model's parameters, and the bytes that training it takes."""

    parameters: int
    memory: int


def size_of(config: Config) -> Size:
    """Return a configuration's size, without making its weights."""
    model, train, data = config.model, config.train, config.data
    if not data.tokenizer:  # then a tokenizer of this size is trained, and gives the model its own
        model = dataclasses.replace(model, vocab_size=data.vocab_size)
    parameters = parameters_of(model)
    sequences = train.micro_batch_size or train.batch_size
    short = 2 if train.dtype == "bfloat16" else 4
    # What a block keeps for its backward pass: about 17 numbers a channel; and the logits twice.
    layers = model.num_layers * model.width * 17 * short
    activations = sequences * train.length * (layers + 8 * model.vocab_size)
    return Size(parameters, _BYTES_A_PARAMETER * parameters + activations)


def parameters_of(model: ModelConfig) -> int:
    """Return a model's parameters to some percent, from its description alone.

    The embedding and a head of its own, learned positions, and each layer's matrices; norms,
    biases and what routes add or leave out are not counted.
    """
    shape = model.shape
    projections = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_width
    network = (3 if model.mlp == "swiglu" else 2) * model.mlp_width
    table = model.vocab_size * (1 if model.tied else 2)
    table += model.max_length if model.positions == "learned" else 0
    return model.width * (table + model.num_layers * (projections + network))


def plan_of(
    exhibit: Exhibit,
    scale: Scale,
    *,
    seeds: Sequence[int] = (),
    changes: Mapping[str, Any] | None = None,
) -> Plan:
    """Return what an exhibit takes at a scale.

    An exhibit is written in the paper's own numbers. At another scale every row is the same
    variation of that scale's model: a number in which a row differs keeps its ratio (`rescaled`).
    `changes` are fields by their dotted names, in place of the scale's.

    Raises:
        WakefulError: the exhibit cannot be run yet, or a row is no whole configuration there.
    """
    if exhibit.needs:
        raise WakefulError(f"{exhibit.name} cannot be run yet: it needs {exhibit.needs}")
    own = own_table(exhibit.compare) if isinstance(exhibit.compare, str) else exhibit.compare
    common = {key: value for key, value in own.items() if key not in (*OWN_KEYS, "preset")}
    settings: Table = dict(exhibit.scales[scale])
    by_group, by_row = settings.pop("groups", {}), settings.pop("variants", {})
    asked = tuple(seeds or seeds_of(settings))
    if len(set(asked)) < len(asked) or not all(0 <= seed < 2**63 for seed in asked):
        raise WakefulError(f"seeds are different numbers in [0, 2**63), got {list(asked)}")
    start = {"preset": own["preset"]} if "preset" in own else {}
    target = merged(merged(start, common), settings)
    for name, value in (changes or {}).items():
        target = merged(target, nested(name, value))
    to = config_from_table(_plain(target, exhibit.name))
    table = _plain({**start, **common}, exhibit.name)
    native = config_from_table(table)
    jobs: list[Job] = []
    groups = {key: each.fields for key, each in exhibit.groups.items()} or {"": {}}
    variants = {"variants": own.get("variants", {"reference": {}})}
    for group, fields in groups.items():
        rows = variants_of("reference", {**merged(table, fields), **variants})
        # A group's own fields are laid over the scale's, those of its rows over both.
        configs = {name: config_from_table(entry) for name, entry in rows.items()}
        for name, config in rescaled(configs, native, to).items():
            over = merged(by_group.get(group, {}), by_row.get(name, {}))
            whole = config
            if over:
                whole = config_from_table(merged(config_to_table(config), over))
            whole.data.check()
            jobs.append(Job(group, name, whole))
    return Plan(exhibit, scale, asked, tuple(jobs), exhibit.inherit)


def heirs_table(plan: Plan, job: Job, seed: int) -> Table:
    """Return the options of the inheritance from a reference, as tables; see `InheritOptions`."""
    assert plan.heirs is not None
    heirs, config = plan.heirs, job.seeded(seed)
    layers = max(1, round(heirs.keep * config.model.num_layers))
    steps = max(2, round(heirs.steps * config.train.steps))
    train = config_to_table(config)["train"] | {"steps": steps}
    train["eval_every"] = max(1, steps // 10)
    data = config_to_table(config)["data"]
    data = {key: value for key, value in data.items() if key not in ("tokenizer", "vocab_size")}
    return {
        "layers": layers,
        "baseline": list(heirs.baseline),
        "grow": round(heirs.grow * config.model.num_layers),
        "data": data,
        "optimizer": config_to_table(config)["optimizer"],
        "train": train,
        "sample": {"prompts": ["def "], "num_tokens": 16},
    }


def _plain(table: Table, name: str) -> Table:
    """Return a table on top of its preset, without what is said of a comparison."""
    whole = on_preset(table, name)
    return {key: value for key, value in whole.items() if key not in OWN_KEYS}


def _tokens(config: Config) -> int:
    return config.train.steps * config.train.batch_size * config.train.length
