"""An exhibit at a scale: which runs it takes, and what they cost."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from wakeful.config.reading import LENGTH
from wakeful.config.rules import check_rules
from wakeful.config.schema import (
    COMPARISON_KEYS,
    TRAINED,
    Config,
    config_from_table,
    config_to_table,
    read_seeds,
    split_variants,
)
from wakeful.config.tables import (
    TomlTable,
    from_table,
    merge_over_preset,
    merge_tables,
    nest_value,
    read_preset_table,
    to_table,
)
from wakeful.digests import joined_sha256, json_digest
from wakeful.errors import WakefulError
from wakeful_papers import depth, normalizers, norms, routes  # noqa: F401  # exhibits name their classes
from wakeful_papers.exhibits.exhibit import (
    ALIKE,
    ALIKE_LABELS,
    SCALES,
    Exhibit,
    Existing,
    Heirs,
    Scale,
)
from wakeful_papers.exhibits.rescaled import rescale_rows
from wakeful_papers.exhibits.size import (
    BYTES_A_PARAMETER,
    BYTES_A_WEIGHT,
    Size,
    run_size,
    tokens_of,
)
from wakeful_papers.exhibits.tuning import Tuning
from wakeful_papers.heirs import baseline_of


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
        return f"{self.config.model.num_layers}x{self.config.model.width}-{json_digest(table)[:12]}"

    def seeded(self, seed: int) -> Config:
        """Return the configuration with a seed, called by its row."""
        train = dataclasses.replace(self.config.train, seed=seed)
        return dataclasses.replace(self.config, name=self.row, train=train)


@dataclass(frozen=True)
class RunCost:
    """What runs take, very roughly."""

    runs: int
    tokens: float
    operations: float
    """Floating-point operations: of training as `operations_of` counts them; of a model whose shape
    is not known 6 a parameter and token in training, 2 in reading."""
    disk: float
    """Bytes of the checkpoints."""


Stage = Literal["rows", "heirs", "reading"]
"""The order within an exhibit: a cluster trains rows, then heirs; models are read where the command
runs."""


@dataclass(frozen=True)
class Piece(RunCost):
    """What one run takes, or one reference's heirs and baselines together."""

    stage: Stage


@dataclass(frozen=True)
class Plan:
    """What an exhibit takes at a scale."""

    exhibit: Exhibit
    """With as many looks as there are at this scale."""
    scale: Scale
    seeds: tuple[int, ...]
    jobs: tuple[Job, ...]
    """Of an inheritance the references, a row `reference` each."""
    heirs: Mapping[str, Heirs]
    """The inheritance of each group; none where nothing is inherited."""
    existing: Mapping[str, Existing]
    """The models, by row, that are looked at and not trained."""
    references: Mapping[str, Existing]
    """The models that heirs are made of where the jobs do not train them, by group; `all` is of
    every group."""
    elsewhere: str
    """The text besides its own on which a trained model is looked at; empty where there is none."""
    tasks: tuple[str, ...]
    """lm-eval's tasks that the models are asked."""
    config: Config
    """The scale's own configuration: its text, device and arithmetic."""
    tuning: Tuning | None = None
    """How each row's learning rate is chosen first; None where the rates are as written."""

    @cached_property
    def models(self) -> tuple[Size, ...]:
        """The size of each job's model, or of the reference in its place."""
        found: list[Size] = []
        for job in self.jobs:
            given = self.reference_of(job.group)
            if given is None:
                found.append(run_size(job.config))
                continue
            count = int(given.parameters)
            # Nobody trains it: its weights are there while its heir is trained.
            a_weight = BYTES_A_WEIGHT + BYTES_A_PARAMETER * self.heirs[job.group].keep
            found.append(Size(count, 6.0 * count, round(a_weight * count)))
        return tuple(found)

    def reference_of(self, group: str) -> Existing | None:
        """Return the model that a group's heirs are made of, where no job trains it."""
        return self.references.get(group, self.references.get("all"))

    @property
    def parameters(self) -> int:
        """Parameters of the largest model."""
        given = (int(each.parameters) for each in self.existing.values())
        return max((*(size.parameters for size in self.models), *given), default=0)

    @property
    def tokens(self) -> int:
        """Tokens of the longest run."""
        return max((tokens_of(job.config) for job in self.jobs), default=0)

    @property
    def stretch(self) -> int:
        """Tokens of the text that an existing model reads with each seed."""
        return self.exhibit.looks * LENGTH

    @cached_property
    def pieces(self) -> Mapping[str, Piece]:
        """The runs, by where they lie among those of other exhibits: what is called alike is done
        once.
        """
        found: dict[str, Piece] = {}
        for job, size in zip(self.jobs, self.models, strict=True):
            tokens, kept = tokens_of(job.config), 2 if job.config.train.checkpoint_every else 1
            operations, disk = size.operations * tokens, 12.0 * size.parameters * kept
            for seed in self.seeds:
                if self.reference_of(job.group) is None:
                    found[f"{job.folder}/seed-{seed}"] = Piece(1, tokens, operations, disk, "rows")
                if heirs := self.heirs_of(job):
                    runs, arms = _heirs_runs(heirs, job.config.model.num_layers)
                    share = heirs.steps * arms
                    found[f"{self.heirs_folder(job, seed)}/seed-{seed}"] = Piece(
                        runs, share * tokens, share * operations, share * disk, "heirs"
                    )
        if self.tuning is not None:
            trials = (self.trial(job, each) for job in self.tunes for each in self.tuning.multiples)
            found |= self.of_trials(trials).pieces
        exhibit = self.exhibit
        facts = [self.config.data.source, exhibit.looks, exhibit.schemes, *exhibit.probes]
        for given in self.existing.values():
            for seed in self.seeds:
                name = f"{short(given.source)}-read-{json_digest(facts)[:12]}/seed-{seed}"
                operations = 2.0 * given.parameters * self.stretch
                found[name] = Piece(1, self.stretch, operations, 0.0, "reading")
        return found

    @property
    def tunes(self) -> tuple[Job, ...]:
        """The jobs whose rates are tried: all rows, or of an inheritance the references."""
        return tuple(job for job in self.jobs if self.tuned_as(job) == job.row)

    def tuned_as(self, job: Job) -> str:
        """Return the row whose rate a job has: what stands beside heirs has their reference's."""
        return "reference" if job.group in self.heirs else job.row

    def trial(self, job: Job, multiple: float) -> Job:
        """Return the trial of a multiple of a job's rate."""
        assert self.tuning is not None
        return Job(
            job.group, f"{job.row} at {multiple:g} times its rate",
            self.tuning.trial(job.config, multiple),
        )  # fmt: skip

    def of_trials(self, trials: Iterable[Job]) -> "Plan":
        """Return the plan of some trials alone."""
        assert self.tuning is not None
        return dataclasses.replace(
            self, jobs=tuple(trials), seeds=(self.tuning.seed,), heirs={}, existing={},
            references={}, tuning=None,
        )  # fmt: skip

    def heirs_of(self, job: Job) -> Heirs | None:
        """Return the inheritance from what a job trains; None where nothing is inherited."""
        return None if job.row == ALIKE["random"] else self.heirs.get(job.group)

    def heirs_folder(self, job: Job, seed: int) -> str:
        """Return what the inheritance from a job's reference is called among the runs."""
        facts = [heirs_table(self, job, seed), self.heirs[job.group].baseline]
        return f"{self.reference_name(job)}-heirs-{json_digest(facts)[:12]}"

    def reference_name(self, job: Job) -> str:
        """Return what a job's reference is called in the names of files."""
        given = self.reference_of(job.group)
        return f"{short(given.source)}-{job.folder}" if given else job.folder

    @property
    def memory(self) -> int:
        """Bytes that the largest run takes, very roughly."""
        return self.memory_of(1)

    def memory_of(self, at_once: int) -> int:
        """Return the bytes that the largest runs take, `at_once` together, very roughly.

        None at a time leaves the largest model that is read and not trained.
        """
        read = (int(BYTES_A_WEIGHT * each.parameters) for each in self.existing.values())
        sizes = sorted((size.memory for size in self.models for _ in self.seeds), reverse=True)
        return max(sum(sizes[:at_once]), *read, 0)

    @property
    def text(self) -> str:
        """The text that is trained on, or read, in words."""
        sources = (job.config.data.source for job in self.jobs)
        return ", ".join(dict.fromkeys(sources)) or self.config.data.source

    @property
    def needs(self) -> tuple[str, ...]:
        """The texts, models and tasks that it reads, without who published them."""
        of_hub = r"hf:(?:[^\s?\"',/]+/)?([^\s?\"',]+)"
        texts = re.findall(of_hub, f"{self.text} {self.elsewhere}") or [self.text]
        models = (*self.existing.values(), *self.references.values())
        names = (each.source.rpartition("/")[2] for each in models)
        return tuple(dict.fromkeys([*texts, *names, *self.tasks]))

    @property
    def _others(self) -> dict[str, str]:
        """The sources that are not the paper's models, by the rows they stand in."""
        theirs = self.exhibit.scales["paper"].get("models", {})
        return {
            row: each.source
            for row, each in self.existing.items()
            if each.source != theirs.get(row, {}).get("source")
        }

    @property
    def shown(self) -> Exhibit:
        """The exhibit with the words of this plan's rows: one of another model names that too."""
        table = self.exhibit.table
        labels = ALIKE_LABELS | {row: f"{Path(source).name}, for {table.labels.get(row, row)}"
                   for row, source in self._others.items()}  # fmt: skip
        table = dataclasses.replace(table, labels={**table.labels, **labels})
        return dataclasses.replace(self.exhibit, table=table)

    @property
    def _other_references(self) -> dict[str, str]:
        """Of the groups of heirs whose reference is not the paper's, which one, in words."""
        theirs, found = self.exhibit.scales["paper"].get("references", {}), dict[str, str]()
        for group in self.heirs:
            ours, given = self.reference_of(group), theirs.get(group, theirs.get("all"))
            if given and (ours is None or ours.source != given["source"]):
                what = ours.source if ours else "a model trained here"
                found[group] = f"{what} in place of {given['source'].rpartition('/')[2]}"
        return found

    @property
    def stood_in(self) -> frozenset[str]:
        """The rows, and the groups of heirs, that are of other models than the paper's."""
        return frozenset([*self._others, *self._other_references])

    @property
    def stand_ins(self) -> tuple[str, ...]:
        """What stands in for the paper's models and tasks, in words."""
        labels = self.exhibit.table.labels
        found = [
            f"{source} in place of {labels.get(row, row)}" for row, source in self._others.items()
        ]
        found += self._other_references.values()
        if self.exhibit.tasks and not self.tasks:
            found.append(f"validation loss in place of accuracy on {', '.join(self.exhibit.tasks)}")
        return tuple(dict.fromkeys(found))


def plan_of(
    exhibit: Exhibit,
    scale: Scale,
    *,
    seeds: Sequence[int] = (),
    changes: Mapping[str, Any] | None = None,
    models: Sequence[str] = (),
    tasks: bool = False,
) -> Plan:
    """Return what an exhibit takes at a scale.

    An exhibit is written in the paper's own numbers. At another scale every row is the same
    variation of that scale's model: a number in which a row differs keeps its ratio (`rescaled`).
    `changes` are fields by their dotted names, in place of the scale's; `models` are pretrained
    ones in place of its own; with `tasks` the models are asked the paper's tasks at any scale.

    Raises:
        WakefulError: the exhibit has nothing to run, or a row is not a whole configuration there.
    """
    if exhibit.settings:
        raise WakefulError(
            f"{exhibit.name} lists settings and has nothing to measure: {exhibit.settings}"
        )
    own = exhibit.compare or {}
    own = read_preset_table(own) if isinstance(own, str) else own
    common = {key: value for key, value in own.items() if key not in (*COMPARISON_KEYS, "preset")}
    settings: TomlTable = dict(exhibit.scales[scale])
    by_group, by_row = settings.pop("groups", {}), settings.pop("variants", {})
    existing = from_table(dict[str, Existing], settings.pop("models", {}))
    references = from_table(dict[str, Existing], settings.pop("references", {}))
    if models:
        existing, references = _instead(exhibit, models, existing, references)
    elsewhere = settings.pop("elsewhere", "")
    without = settings.pop("without", ())
    rule = settings.pop("tune", None)
    tuning = None if rule is None else from_table(Tuning, rule)
    exhibit = dataclasses.replace(exhibit, looks=settings.pop("looks", exhibit.looks))
    asks = tuple(settings.pop("tasks", exhibit.tasks if tasks else ()))
    asked = tuple(seeds or read_seeds(settings))
    if len(set(asked)) < len(asked) or not all(0 <= seed < 2**63 for seed in asked):
        raise WakefulError(f"seeds are different numbers in [0, 2**63), got {list(asked)}")
    start = {"preset": own["preset"]} if "preset" in own else {}
    target = merge_tables(merge_tables(start, common), settings)
    for name, value in (changes or {}).items():
        target = merge_tables(target, nest_value(name, value))
    to = config_from_table(_plain(target, exhibit.name))
    table = _plain({**start, **common}, exhibit.name)
    native = config_from_table(table)
    if not exhibit.compare:
        return Plan(exhibit, scale, asked, (), {}, existing, references, elsewhere, asks, to)
    jobs: list[Job] = []
    heirs: dict[str, Heirs] = {}
    groups = {
        key: each.fields
        for key, each in exhibit.groups.items()
        if scale in (each.scales or SCALES)
    } or {"": {}}  # fmt: skip
    variants = {"variants": own.get("variants", {"reference": {}})}
    for group, fields in groups.items():
        if exhibit.inherit is not None:
            own_heirs = exhibit.groups[group].inherit if group in exhibit.groups else {}
            heirs[group] = from_table(Heirs, merge_tables(to_table(exhibit.inherit), own_heirs))
        rows = split_variants("reference", {**merge_tables(table, fields), **variants})
        # A group's own fields are laid over the scale's, those of its rows over both.
        configs = {
            name: config_from_table(entry) for name, entry in rows.items() if name not in without
        }
        for name, config in rescale_rows(configs, native, to).items():
            over = merge_tables(by_group.get(group, {}), by_row.get(name, {}))
            whole = config
            if over:
                whole = config_from_table(merge_tables(config_to_table(config), over))
            check_rules(whole.data, TRAINED)
            jobs.append(Job(group, name, whole))
    plan = Plan(
        exhibit, scale, asked, tuple(jobs), heirs, existing, references, elsewhere, asks, to,
        tuning,
    )  # fmt: skip
    return _with_rows_alike(plan)


def _with_rows_alike(plan: Plan) -> Plan:
    """Return a plan with the rows that its heirs are judged beside (`ALIKE`), where it claims so.

    Of a model that is not trained here nobody knows the steps: there are none beside its heirs.
    """
    jobs, heirs = list(plan.jobs), dict(plan.heirs)
    claims = plan.exhibit.claims_at(plan.scale, plan.tasks)
    for job in plan.jobs:
        if job.group not in heirs or plan.reference_of(job.group):
            continue
        beside = {claim.than for claim in claims if claim.group in ("", job.group)}
        own = heirs[job.group]
        if ALIKE["reference"] in beside:
            heirs[job.group] = dataclasses.replace(own, baseline=(*own.baseline, "reference"))
        if ALIKE["random"] in beside:
            model = dataclasses.replace(job.config.model, num_layers=_depth(own, job))
            steps = job.config.train.steps + _steps(own, job)
            train = dataclasses.replace(job.config.train, steps=steps)
            config = dataclasses.replace(job.config, model=model, train=train)
            jobs.append(Job(job.group, ALIKE["random"], config))
    return dataclasses.replace(plan, jobs=tuple(jobs), heirs=heirs)


def _depth(heirs: Heirs, job: Job) -> int:
    return max(1, round(heirs.keep * job.config.model.num_layers))


def _steps(heirs: Heirs, job: Job) -> int:
    return max(2, round(heirs.steps * job.config.train.steps))


def _instead(
    exhibit: Exhibit,
    models: Sequence[str],
    existing: dict[str, Existing],
    references: dict[str, Existing],
) -> tuple[dict[str, Existing], dict[str, Existing]]:
    """Return the models that a user names, in place of the paper's; nobody knows their sizes.

    A name alone takes the next of the paper's places, and models that nobody names are not looked
    at; but heirs need every reference. PLACE=MODEL takes that place, a row or a group of the
    exhibit, and leaves those of the scale, `existing` and `references`, in the others.
    """
    theirs = [
        from_table(dict[str, Existing], exhibit.scales["paper"].get(name, {}))
        for name in ("models", "references")
    ]
    places = {name: table for table, given in enumerate(theirs) for name in given}
    if not places:
        raise WakefulError(f"{exhibit.name} looks at no pretrained model: leave out --models")
    named = dict(one.split("=", 1) for one in models if one.partition("=")[0] in places)
    if named and len(named) < len(models):
        raise WakefulError(
            f"--models names {len(named)} of {len(models)} models as PLACE=MODEL, each place once: "
            f"name all so, or none; the places are {', '.join(places)}"
        )
    if len(models) > len(places) or (not named and len(models) < len(theirs[1])):
        raise WakefulError(
            f"{exhibit.name} looks at {len(places)} pretrained model"
            f"{'s' if len(places) > 1 else ''}, and --models names {len(models)}"
            + (f"; PLACE=MODEL names some of {', '.join(places)}" if len(places) > 1 else "")
        )
    found = (dict(existing), dict(references)) if named else ({}, {})
    for name, source in (named or dict(zip(places, models, strict=False))).items():
        found[places[name]][name] = Existing(source, 0.0)
    return found


def short(source: str) -> str:
    """Return what a model is called in the names of files."""
    last = re.sub(r"[^A-Za-z0-9.]+", "-", Path(source).name).strip("-.") or "model"
    return f"{last}-{joined_sha256(source)[:6]}"


def heirs_table(plan: Plan, job: Job, seed: int) -> TomlTable:
    """Return the options of the inheritance from a reference, as tables; see `InheritOptions`.

    The heir is that of When Attention Collapses, algorithm 1: the first layers, nothing solved in
    place of the others, trained on the text. An arm is evaluated ten times, or a hundred where its
    reference is as often. Its warmup is its reference's, but at most a fifth of its own steps, as
    the paper's shortest arms have: at the smaller scales, which shorten the warmup less than the
    rest, an arm of a tenth of the steps would not get past it.
    """
    heirs, config = plan.heirs[job.group], job.seeded(seed)
    steps = _steps(heirs, job)
    table = config_to_table(config)
    train = table["train"] | {"steps": steps}
    often = 0 < 100 * config.train.eval_every <= config.train.steps
    train["eval_every"] = max(1, steps // (100 if often else 10))
    theirs = ("tokenizer", "vocab_size", "max_tokens", "first_batch")
    data = {key: value for key, value in table["data"].items() if key not in theirs}
    if heirs.epochs:
        trained = steps * config.train.batch_size * config.train.length
        data["max_tokens"] = max(config.train.length + 1, round(trained / heirs.epochs))
    optimizer = table["optimizer"]
    optimizer["warmup_steps"] = min(optimizer["warmup_steps"], steps // 5)
    return {
        **(
            {"keep": heirs.keep} if plan.reference_of(job.group) else {"layers": _depth(heirs, job)}
        ),
        "choose": "first",
        "bridge": {"map": "none"},
        "heal": {"by": "text"},
        "grow": round(heirs.grow * config.model.num_layers),
        "data": data,
        "optimizer": optimizer,
        "train": train,
    }


def _heirs_runs(heirs: Heirs, num_layers: int) -> tuple[int, float]:
    """Return the runs of an inheritance and what they cost over as many steps of its reference.

    Each has the reference's shape with a share of its layers, but for the reference trained on;
    growing ends with the last round.
    """
    added = round(heirs.grow * num_layers)
    missing = num_layers - round(heirs.keep * num_layers)
    rounds = 1 + math.ceil(missing / added) if added else 1
    depths = [min(1.0, heirs.keep + number * added / num_layers) for number in range(rounds)]
    whole = "reference" in heirs.baseline
    others = [baseline_of(name) for name in heirs.baseline if name != "reference"]
    times = sum(each.times * (rounds if each.all_rounds else 1) for each in others)
    return rounds + len(heirs.baseline), sum(depths) + depths[-1] * times + whole


def _plain(table: TomlTable, name: str) -> TomlTable:
    """Return a table on top of its preset, without what is said of a comparison."""
    whole = merge_over_preset(table, name)
    return {key: value for key, value in whole.items() if key not in COMPARISON_KEYS}
