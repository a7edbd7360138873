"""Plans: the runs that an exhibit takes at a scale, and their cost."""

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
    EQUAL_TRAINING,
    EQUAL_TRAINING_LABELS,
    SCALES,
    Exhibit,
    Existing,
    Heirs,
    Scale,
)
from wakeful_papers.exhibits.rescaled import rescale_rows
from wakeful_papers.exhibits.size import (
    BYTES_PER_PARAMETER,
    BYTES_PER_WEIGHT,
    Size,
    run_size,
    tokens_of,
)
from wakeful_papers.exhibits.tuning import Tuning
from wakeful_papers.heirs import find_baseline


@dataclass(frozen=True)
class Job:
    """One training run: a row in its group; the seed is set when it is trained."""

    group: str
    row: str
    config: Config

    @cached_property
    def folder(self) -> str:
        """Name of the run's folder among all runs: equal configurations share one folder."""
        table = config_to_table(self.config)
        del table["name"]
        return f"{self.config.model.num_layers}x{self.config.model.width}-{json_digest(table)[:12]}"

    def config_with_seed(self, seed: int) -> Config:
        """Return the configuration with a seed, under the row's name."""
        train = dataclasses.replace(self.config.train, seed=seed)
        return dataclasses.replace(self.config, name=self.row, train=train)


@dataclass(frozen=True)
class RunCost:
    """The cost of runs, very roughly."""

    runs: int
    tokens: float
    operations: float
    """Floating-point operations: those of training as `operations_of` counts them; for a model of
    unknown shape 6 per parameter and token in training and 2 in inference."""
    disk: float
    """Bytes of the checkpoints."""


Stage = Literal["rows", "heirs", "reading"]
"""Stages of an exhibit, in order: a cluster trains rows, then heirs; then one process reads the
models that are not trained."""


@dataclass(frozen=True)
class FolderCost(RunCost):
    """The cost of one run, of a reference's heirs and baselines, or of reading a model."""

    stage: Stage


@dataclass(frozen=True)
class Plan:
    """The runs that an exhibit takes at a scale."""

    exhibit: Exhibit
    """The exhibit, with this scale's `looks`."""
    scale: Scale
    seeds: tuple[int, ...]
    jobs: tuple[Job, ...]
    """The training runs; in a group of `references`, row `reference` stands for that model."""
    heirs: Mapping[str, Heirs]
    """The inheritance of each group; empty if nothing is inherited."""
    existing: Mapping[str, Existing]
    """The models, by row, that are measured and not trained."""
    references: Mapping[str, Existing]
    """The models that heirs are made of and no job trains, by group; `all` is for every group."""
    elsewhere: str
    """A second text on which trained models are measured; empty for none."""
    tasks: tuple[str, ...]
    """lm-eval's tasks on which the models are evaluated."""
    config: Config
    """The scale's configuration: its text, device and arithmetic."""
    tuning: Tuning | None = None
    """The rule for each row's learning rate; None if the rates stay as the exhibit has them."""

    @cached_property
    def model_sizes(self) -> tuple[Size, ...]:
        """The size of each job's model, or of the reference in its place."""
        sizes: list[Size] = []
        for job in self.jobs:
            reference = self.reference_of(job.group)
            if reference is None:
                sizes.append(run_size(job.config))
                continue
            count = int(reference.parameters)
            # It is not trained: its weights are in memory while its heir is trained.
            bytes_per_weight = BYTES_PER_WEIGHT + BYTES_PER_PARAMETER * self.heirs[job.group].keep
            sizes.append(Size(count, 6.0 * count, round(bytes_per_weight * count)))
        return tuple(sizes)

    def reference_of(self, group: str) -> Existing | None:
        """Return the model that a group's heirs are made of; None if a job trains it."""
        return self.references.get(group, self.references.get("all"))

    @property
    def parameters(self) -> int:
        """Parameters of the largest model."""
        existing = (int(model.parameters) for model in self.existing.values())
        return max((*(size.parameters for size in self.model_sizes), *existing), default=0)

    @property
    def tokens(self) -> int:
        """Tokens of the longest run."""
        return max((tokens_of(job.config) for job in self.jobs), default=0)

    @property
    def tokens_per_seed(self) -> int:
        """Tokens of the text that an existing model reads with each seed."""
        return self.exhibit.looks * LENGTH

    @cached_property
    def costs_by_folder(self) -> Mapping[str, FolderCost]:
        """The cost of each folder among all exhibits' runs; readings have names of no folder."""
        costs: dict[str, FolderCost] = {}
        for job, size in zip(self.jobs, self.model_sizes, strict=True):
            tokens = tokens_of(job.config)
            checkpoints = 2 if job.config.train.checkpoint_every else 1
            operations, disk = size.operations * tokens, 12.0 * size.parameters * checkpoints
            for seed in self.seeds:
                if self.reference_of(job.group) is None:
                    path = f"{job.folder}/seed-{seed}"
                    costs[path] = FolderCost(1, tokens, operations, disk, "rows")
                if heirs := self.heirs_of(job):
                    runs, cost = _count_heir_runs(heirs, job.config.model.num_layers)
                    share = heirs.steps * cost
                    costs[f"{self.heirs_folder(job, seed)}/seed-{seed}"] = FolderCost(
                        runs, share * tokens, share * operations, share * disk, "heirs"
                    )
        if self.tuning is not None:
            jobs, multiples = self.tuned_jobs, self.tuning.multiples
            trials = (self.trial_job(job, multiple) for job in jobs for multiple in multiples)
            costs |= self.trial_plan(trials).costs_by_folder
        exhibit = self.exhibit
        facts = [self.config.data.source, exhibit.looks, exhibit.schemes, *exhibit.probes]
        for model in self.existing.values():
            for seed in self.seeds:
                name = f"{file_label(model.source)}-read-{json_digest(facts)[:12]}/seed-{seed}"
                operations = 2.0 * model.parameters * self.tokens_per_seed
                costs[name] = FolderCost(1, self.tokens_per_seed, operations, 0.0, "reading")
        return costs

    @property
    def tuned_jobs(self) -> tuple[Job, ...]:
        """The jobs whose learning rates are tuned: all rows, or an inheritance's references."""
        return tuple(job for job in self.jobs if self.rate_row(job) == job.row)

    def rate_row(self, job: Job) -> str:
        """Return the row whose learning rate a job uses: beside heirs, their reference's."""
        return "reference" if job.group in self.heirs else job.row

    def trial_job(self, job: Job, multiple: float) -> Job:
        """Return the trial of a multiple of a job's learning rate."""
        assert self.tuning is not None
        return Job(
            job.group, f"{job.row} at {multiple:g} times its rate",
            self.tuning.trial_config(job.config, multiple),
        )  # fmt: skip

    def trial_plan(self, trials: Iterable[Job]) -> "Plan":
        """Return a plan of these trials alone."""
        assert self.tuning is not None
        return dataclasses.replace(
            self, jobs=tuple(trials), seeds=(self.tuning.seed,), heirs={}, existing={},
            references={}, tuning=None,
        )  # fmt: skip

    def heirs_of(self, job: Job) -> Heirs | None:
        """Return the inheritance from a job's model; None if nothing is inherited from it."""
        return None if job.row == EQUAL_TRAINING["random"] else self.heirs.get(job.group)

    def heirs_folder(self, job: Job, seed: int) -> str:
        """Return the folder's name, among all runs, of the inheritance from a job's reference."""
        facts = [heirs_table(self, job, seed), self.heirs[job.group].baseline]
        return f"{self.reference_name(job)}-heirs-{json_digest(facts)[:12]}"

    def reference_name(self, job: Job) -> str:
        """Return the name of a job's reference in the names of files."""
        model = self.reference_of(job.group)
        return f"{file_label(model.source)}-{job.folder}" if model else job.folder

    @property
    def memory(self) -> int:
        """Bytes that the largest run takes, very roughly."""
        return self.memory_of(1)

    def memory_of(self, parallel_runs: int) -> int:
        """Return the bytes of this many of the largest runs together, very roughly, but at least
        those of the largest model that is read and not trained.
        """
        existing = (int(BYTES_PER_WEIGHT * model.parameters) for model in self.existing.values())
        sizes = sorted((size.memory for size in self.model_sizes for _ in self.seeds), reverse=True)
        return max(sum(sizes[:parallel_runs]), *existing, 0)

    @property
    def text(self) -> str:
        """The text that is trained on, or read, in words."""
        sources = (job.config.data.source for job in self.jobs)
        return ", ".join(dict.fromkeys(sources)) or self.config.data.source

    @property
    def needs(self) -> tuple[str, ...]:
        """The texts, models and tasks that it reads, without their publishers' names."""
        of_hub = r"hf:(?:[^\s?\"',/]+/)?([^\s?\"',]+)"
        texts = re.findall(of_hub, f"{self.text} {self.elsewhere}") or [self.text]
        models = (*self.existing.values(), *self.references.values())
        names = (model.source.rpartition("/")[2] for model in models)
        return tuple(dict.fromkeys([*texts, *names, *self.tasks]))

    @property
    def _replacements(self) -> dict[str, str]:
        """The sources, by row, of models that replace the paper's."""
        published_models = self.exhibit.scales["paper"].get("models", {})
        return {
            row: model.source
            for row, model in self.existing.items()
            if model.source != published_models.get(row, {}).get("source")
        }

    @property
    def labeled_exhibit(self) -> Exhibit:
        """The exhibit with labels also for rows of equal training and for replaced models."""
        table = self.exhibit.table
        labels = {row: f"{Path(source).name}, for {table.labels.get(row, row)}"
                  for row, source in self._replacements.items()}  # fmt: skip
        labels = {**table.labels, **EQUAL_TRAINING_LABELS, **labels}
        table = dataclasses.replace(table, labels=labels)
        return dataclasses.replace(self.exhibit, table=table)

    @property
    def _reference_notes(self) -> dict[str, str]:
        """A note for each group of heirs whose reference is not the paper's."""
        table, notes = self.exhibit.scales["paper"].get("references", {}), dict[str, str]()
        for group in self.heirs:
            model, published = self.reference_of(group), table.get(group, table.get("all"))
            if published and (model is None or model.source != published["source"]):
                source = model.source if model else "a model trained here"
                notes[group] = f"{source} in place of {published['source'].rpartition('/')[2]}"
        return notes

    @property
    def stand_in_rows(self) -> frozenset[str]:
        """The rows, and the groups of heirs, whose models are not the paper's."""
        return frozenset([*self._replacements, *self._reference_notes])

    @property
    def stand_in_notes(self) -> tuple[str, ...]:
        """A note for each replacement of the paper's models and tasks."""
        labels = self.exhibit.table.labels
        notes = [f"{source} in place of {labels.get(row, row)}"
                 for row, source in self._replacements.items()]  # fmt: skip
        notes += self._reference_notes.values()
        if self.exhibit.tasks and not self.tasks:
            notes.append(f"validation loss in place of accuracy on {', '.join(self.exhibit.tasks)}")
        return tuple(dict.fromkeys(notes))


def plan_exhibit(
    exhibit: Exhibit,
    scale: Scale,
    *,
    seeds: Sequence[int] = (),
    changes: Mapping[str, Any] | None = None,
    models: Sequence[str] = (),
    tasks: bool = False,
) -> Plan:
    """Return the plan of an exhibit at a scale.

    An exhibit is written in the paper's own numbers. At another scale every row is the same
    variation of that scale's model: a number in which a row differs keeps its ratio (`rescaled`).
    `seeds` are in place of the scale's, and so are `changes`, fields by their dotted names, and
    `models`, pretrained ones; with `tasks` the paper's tasks are evaluated at any scale.

    Raises:
        WakefulError: the exhibit has nothing to run, or an argument or a row is not valid for it.
    """
    if exhibit.settings:
        raise WakefulError(
            f"{exhibit.name} lists settings and has nothing to measure: {exhibit.settings}"
        )
    compare = exhibit.compare or {}
    compare = read_preset_table(compare) if isinstance(compare, str) else compare
    common = {k: v for k, v in compare.items() if k not in (*COMPARISON_KEYS, "preset")}
    settings: TomlTable = dict(exhibit.scales[scale])
    group_fields, row_fields = settings.pop("groups", {}), settings.pop("variants", {})
    existing = from_table(dict[str, Existing], settings.pop("models", {}))
    references = from_table(dict[str, Existing], settings.pop("references", {}))
    if models:
        existing, references = _replace_models(exhibit, models, existing, references)
    elsewhere = settings.pop("elsewhere", "")
    without = settings.pop("without", ())
    rule = settings.pop("tune", None)
    tuning = None if rule is None else from_table(Tuning, rule)
    exhibit = dataclasses.replace(exhibit, looks=settings.pop("looks", exhibit.looks))
    task_names = tuple(settings.pop("tasks", exhibit.tasks if tasks else ()))
    seeds = tuple(seeds or read_seeds(settings))
    if len(set(seeds)) < len(seeds) or not all(0 <= seed < 2**63 for seed in seeds):
        raise WakefulError(f"seeds are different numbers in [0, 2**63), got {list(seeds)}")
    start = {"preset": compare["preset"]} if "preset" in compare else {}
    target = merge_tables(merge_tables(start, common), settings)
    for name, value in (changes or {}).items():
        target = merge_tables(target, nest_value(name, value))
    scale_config = config_from_table(_config_table(target, exhibit.name))
    table = _config_table({**start, **common}, exhibit.name)
    paper_config = config_from_table(table)
    if not exhibit.compare:
        return Plan(
            exhibit, scale, seeds, (), {}, existing, references, elsewhere, task_names, scale_config
        )  # fmt: skip
    jobs: list[Job] = []
    heirs: dict[str, Heirs] = {}
    groups = {
        key: group.fields
        for key, group in exhibit.groups.items()
        if scale in (group.scales or SCALES)
    } or {"": {}}  # fmt: skip
    variants = {"variants": compare.get("variants", {"reference": {}})}
    for group, fields in groups.items():
        if exhibit.inherit is not None:
            group_heirs = exhibit.groups[group].inherit if group in exhibit.groups else {}
            heirs[group] = from_table(Heirs, merge_tables(to_table(exhibit.inherit), group_heirs))
        rows = split_variants("reference", {**merge_tables(table, fields), **variants})
        configs = {
            name: config_from_table(entry) for name, entry in rows.items() if name not in without
        }
        for name, rescaled in rescale_rows(configs, paper_config, scale_config).items():
            config = rescaled
            # The scale's fields of a row override those of a group, and both what was rescaled.
            overrides = merge_tables(group_fields.get(group, {}), row_fields.get(name, {}))
            if overrides:
                config = config_from_table(merge_tables(config_to_table(config), overrides))
            check_rules(config.data, TRAINED)
            jobs.append(Job(group, name, config))
    plan = Plan(
        exhibit, scale, seeds, tuple(jobs), heirs, existing, references, elsewhere, task_names,
        scale_config, tuning,
    )  # fmt: skip
    return _add_equal_training_rows(plan)


def _add_equal_training_rows(plan: Plan) -> Plan:
    """Return a plan with the rows of equal training that its claims name (`EQUAL_TRAINING`).

    The steps of a reference that is not trained here are unknown: its heirs get no such rows.
    """
    jobs, heirs = list(plan.jobs), dict(plan.heirs)
    claims = plan.exhibit.claims_at(plan.scale, plan.tasks)
    for job in plan.jobs:
        if job.group not in heirs or plan.reference_of(job.group):
            continue
        compared_rows = {claim.than for claim in claims if claim.group in ("", job.group)}
        options = heirs[job.group]
        if EQUAL_TRAINING["reference"] in compared_rows:
            baselines = (*options.baseline, "reference")
            heirs[job.group] = dataclasses.replace(options, baseline=baselines)
        if EQUAL_TRAINING["random"] in compared_rows:
            model = dataclasses.replace(job.config.model, num_layers=_heir_depth(options, job))
            steps = job.config.train.steps + _heir_steps(options, job)
            train = dataclasses.replace(job.config.train, steps=steps)
            config = dataclasses.replace(job.config, model=model, train=train)
            jobs.append(Job(job.group, EQUAL_TRAINING["random"], config))
    return dataclasses.replace(plan, jobs=tuple(jobs), heirs=heirs)


def _heir_depth(heirs: Heirs, job: Job) -> int:
    return max(1, round(heirs.keep * job.config.model.num_layers))


def _heir_steps(heirs: Heirs, job: Job) -> int:
    return max(2, round(heirs.steps * job.config.train.steps))


def _replace_models(
    exhibit: Exhibit, models: Sequence[str], existing: dict[str, Existing],
    references: dict[str, Existing],
) -> tuple[dict[str, Existing], dict[str, Existing]]:  # fmt: skip
    """Return the existing models and references with the user's models in place of the paper's.

    Their sizes are unknown. A place is a row or a group for which the paper has a model. Names of
    models alone fill the places in order; a row that gets none is not measured, but all references
    need one. PLACE=MODEL fills that place and leaves the scale's models in the others.
    """
    published_models = [
        from_table(dict[str, Existing], exhibit.scales["paper"].get(name, {}))
        for name in ("models", "references")
    ]
    places = {name: index for index, table in enumerate(published_models) for name in table}
    if not places:
        raise WakefulError(f"{exhibit.name} looks at no pretrained model: leave out --models")
    by_place = dict(model.split("=", 1) for model in models if model.partition("=")[0] in places)
    if by_place and len(by_place) < len(models):
        raise WakefulError(
            f"--models names {len(by_place)} of {len(models)} models as PLACE=MODEL, each place "
            f"once: name all so, or none; the places are {', '.join(places)}"
        )
    if len(models) > len(places) or (not by_place and len(models) < len(published_models[1])):
        raise WakefulError(
            f"{exhibit.name} looks at {len(places)} pretrained model"
            f"{'s' if len(places) > 1 else ''}, and --models names {len(models)}"
            + (f"; PLACE=MODEL names some of {', '.join(places)}" if len(places) > 1 else "")
        )
    tables = (dict(existing), dict(references)) if by_place else ({}, {})
    for name, source in (by_place or dict(zip(places, models, strict=False))).items():
        tables[places[name]][name] = Existing(source, 0.0)
    return tables


def file_label(source: str) -> str:
    """Return a model's label in the names of files."""
    last = re.sub(r"[^A-Za-z0-9.]+", "-", Path(source).name).strip("-.") or "model"
    return f"{last}-{joined_sha256(source)[:6]}"


def heirs_table(plan: Plan, job: Job, seed: int) -> TomlTable:
    """Return the options of the inheritance from a reference, as tables; see `InheritOptions`.

    The heir is that of When Attention Collapses, algorithm 1: the first layers, with nothing solved
    in place of the others, trained on the text. It is evaluated ten times, or a hundred times if
    its reference is evaluated as often or more. Its warmup is its reference's, but at most a fifth
    of its own steps, as for the paper's shortest heirs: the smaller scales shorten the warmup less
    than the rest, so an heir of a tenth of the steps would not get past it.
    """
    heirs, config = plan.heirs[job.group], job.config_with_seed(seed)
    steps = _heir_steps(heirs, job)
    table = config_to_table(config)
    train = table["train"] | {"steps": steps}
    is_evaluated_often = 0 < 100 * config.train.eval_every <= config.train.steps
    train["eval_every"] = max(1, steps // (100 if is_evaluated_often else 10))
    reference_keys = ("tokenizer", "vocab_size", "max_tokens", "first_batch")
    data = {key: value for key, value in table["data"].items() if key not in reference_keys}
    if heirs.epochs:
        tokens = steps * config.train.batch_size * config.train.length
        data["max_tokens"] = max(config.train.length + 1, round(tokens / heirs.epochs))
    optimizer = table["optimizer"]
    optimizer["warmup_steps"] = min(optimizer["warmup_steps"], steps // 5)
    layers = {"layers": _heir_depth(heirs, job)}
    return {
        **({"keep": heirs.keep} if plan.reference_of(job.group) else layers),
        "choose": "first",
        "bridge": {"map": "none"},
        "heal": {"by": "text"},
        "grow": round(heirs.grow * config.model.num_layers),
        "data": data,
        "optimizer": optimizer,
        "train": train,
    }


def _count_heir_runs(heirs: Heirs, num_layers: int) -> tuple[int, float]:
    """Return the number of an inheritance's runs, and their cost over the reference's for as many
    steps as the heir's. Per step a run costs, roughly, the share of the layers that it has.
    """
    added = round(heirs.grow * num_layers)
    missing = num_layers - round(heirs.keep * num_layers)
    rounds = 1 + math.ceil(missing / added) if added else 1
    depths = [min(1.0, heirs.keep + number * added / num_layers) for number in range(rounds)]
    has_reference = "reference" in heirs.baseline
    baselines = [find_baseline(name) for name in heirs.baseline if name != "reference"]
    times = sum(line.times * (rounds if line.all_rounds else 1) for line in baselines)
    return rounds + len(heirs.baseline), sum(depths) + depths[-1] * times + has_reference


def _config_table(table: TomlTable, name: str) -> TomlTable:
    """Return a table merged over its preset, without the keys of a comparison."""
    merged = merge_over_preset(table, name)
    return {key: value for key, value in merged.items() if key not in COMPARISON_KEYS}
