"""`compare`: variants and seeds in, paired differences and a page out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from wakeful.config.reading import FigureFormat
from wakeful.config.rows import read_rows
from wakeful.config.rules import check_rules
from wakeful.config.schema import TRAINED, Config, select_variants
from wakeful.errors import WakefulError, did_you_mean
from wakeful.reports.html import write_page
from wakeful.reports.result import StoredResult
from wakeful.reports.value import Report
from wakeful.switches import default_torch_state
from wakeful.terminal.display import DisplayFactory, default_display
from wakeful.training.compared import ComparedRuns as Compared
from wakeful.training.compared import read_comparison
from wakeful.training.layouts import layout_of
from wakeful.training.report import comparison_report
from wakeful.training.rows import train_variants
from wakeful.training.tables import summary_table


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(StoredResult):
    """Variants trained under the same conditions, with their differences."""

    compared: Compared

    @property
    def frame(self) -> pl.DataFrame:
        """One row per variant: losses, paired differences, size, cache and speed."""
        return summary_table(self.compared)

    @property
    def summary(self) -> dict[str, Any]:
        """Figures of each variant, the baseline, what each variant's differences are paired over
        (seeds or windows), and unfinished runs.
        """
        return {
            "variants": self.frame.to_dicts(),
            "baseline": self.compared.baseline,
            "paired_over": {
                name: self.compared.paired_over(name) for name in self.compared.variants
            },
            "unfinished": list(self.compared.unfinished),
        }

    @property
    def report(self) -> Report:
        """Each variant's paired difference in loss from the baseline's, with intervals."""
        return comparison_report(self.compared)


@default_torch_state()
def compare(
    *configs: Config | Mapping[str, Any] | str | Path,
    seeds: Sequence[int] = (),
    only: Sequence[str] = (),
    out: str | Path = "",
    layouts: Sequence[str] = (),
    baseline: str = "",
    resume: bool = False,
    cluster: str = "",
    figures: Sequence[FigureFormat] = (),
    display: DisplayFactory | None = None,
) -> Comparison:
    """Train variants with several seeds and report their paired differences.

        wakeful.compare("my.toml", seeds=[0, 1, 2])
        wakeful.compare({"name": "a", "preset": "cpu-tiny"}, {"name": "b", ...})

    Args:
        configs: `Config`s, names of presets, TOML files or tables, each with one variant or a table
            of variants.
        seeds: by default those of the files, or 0.
        only: names of the variants to train; by default all.
        out: folder to create; by default runs/compare-NAME.
        layouts: names of layouts that add to the page, such as a paper's table.
        baseline: variant that the others are compared with; by default the first.
        resume: continue an interrupted comparison in `out`.
        cluster: where runs are trained, such as "local(workers=2)" or "slurm(...)"; by default
            here, one after another.
        figures: formats in which the charts are written too, to the folder figures.
        display: shows progress; None is a bar where there is a terminal.

    Raises:
        WakefulError: a configuration, a variant's name or a layout does not exist or cannot be
            trained, a text cannot be read, `out` exists (or, with `resume`, holds other variants),
            or a run fails. What can be checked is checked before anything is written.
    """
    rows = read_rows(configs)
    variants, seeds = select_variants(rows.variants, only), rows.choose_seeds(seeds)
    layouts = list(dict.fromkeys([*layouts, *rows.layouts]))
    # What is resumed has variants already, to which one alone may be added.
    if len(variants) < 2 and not (variants and resume):
        variant = repr(next(iter(variants))) if variants else "nothing"
        raise WakefulError(f"nothing to compare {variant} with: name two variants")
    if baseline and baseline not in variants:
        raise WakefulError(
            f"baseline = {baseline!r} is none of the variants {', '.join(variants)}"
            f"{did_you_mean(baseline, variants)}"
        )
    for seed in seeds:
        if not 0 <= seed < 2**63:
            raise WakefulError(f"seeds has {seed}: a seed lies in [0, 2**63)")
    for name in layouts:
        layout_of(name)
    for config in variants.values():
        check_rules(config.data, TRAINED)
        if config.train.seed != 0:
            raise WakefulError(
                f"train.seed = {config.train.seed}, but a comparison sets the seed of each run "
                "itself: use seeds = [...] or --seeds"
            )
    if baseline:  # the first variant is the baseline
        variants = {baseline: variants[baseline], **variants}
    run = train_variants(
        variants, Path(out or f"runs/compare-{rows.name}"), seeds=seeds,
        display=display or default_display, layouts=layouts, resume=resume, cluster=cluster,
    )  # fmt: skip
    page = run.path / "report.html"
    return report_comparison([run.path], page, "", baseline=baseline, figures=figures)


def report_comparison(
    folders: Sequence[Path],
    page: Path,
    title: str,
    *,
    baseline: str = "",
    only: Sequence[str] = (),
    figures: Sequence[FigureFormat],
) -> Comparison:
    """Write the page about finished runs, or about one comparison's folder, to the file `page`;
    return the comparison.

    The charts are also written as files of the formats `figures`. The page's title is `title`, or
    if that is empty the first folder's name. For `baseline` see `read_comparison`; `only` names the
    variants to show beside the baseline, by default all.
    """
    compared = read_comparison(folders[0] if len(folders) == 1 else list(folders), baseline)
    if only:
        compared = compared.select_variants(only)
    content = comparison_report(compared, title=title or f"wakeful: {folders[0].name}")
    return Comparison(folders[0], write_page(content, page, figures), compared)
