"""The verb report: finished runs in, one page out."""

from collections.abc import Sequence
from pathlib import Path

from wakeful.config.reading import FigureFormat
from wakeful.errors import WakefulError
from wakeful.inheritance import Inheritance, inheritance_report
from wakeful.reports.html import write_page
from wakeful.reports.result import StoredResult
from wakeful.runs.run import Run
from wakeful.training import report_comparison
from wakeful.variants.plugins import load_plugin_verb

_KINDS = {
    "train": "a training run", "compare": "a comparison", "inherit": "an inheritance",
    "diagnose": "a diagnosis", "evaluate": "an evaluation", "quantize": "a damage report",
}  # fmt: skip


def report(
    *folders: str | Path,
    out: str | Path = "",
    baseline: str = "",
    only: Sequence[str] = (),
    title: str = "",
    figures: Sequence[FigureFormat] = (),
) -> StoredResult:
    """Write one offline page about training runs, a comparison or an inheritance.

        wakeful.report("runs/first", "runs/second", out="both.html")
        wakeful.report("runs/compare-routes", baseline="svformer", only=["resformer"])

    Args:
        folders: run directories.
        out: HTML file to write; empty is report.html in the first folder.
        baseline: variant that the others are compared with; empty is the comparison's own, or the
            first of several training runs.
        only: variants to compare with it; empty is all.
        title: heading of the page.
        figures: formats to write the charts in too, into the folder figures beside the page.

    Raises:
        WakefulError: a run is damaged, or the folders cannot be reported on one page.
    """
    if not folders:
        raise WakefulError("name a comparison, or one or more run directories")
    paths = [Path(folder) for folder in folders]
    kinds = [Run.open(path).header.kind for path in paths]
    are_alike = len(set(kinds)) == 1
    has_variants = are_alike and kinds[0] in ("train", "compare")
    if (baseline or only) and not has_variants:
        raise WakefulError("--baseline and --only are for training runs and comparisons")
    # Another installed package may have made the runs, and report on them itself.
    verb = load_plugin_verb(kinds[0]) if are_alike else None
    if verb is not None and verb.report is not None:
        return verb.report(*paths, out=out, title=title, figures=figures)
    page = Path(out or paths[0] / "report.html")
    if kinds == ["inherit"]:
        if title:
            raise WakefulError("the page of an inheritance has its own title: leave out --title")
        return Inheritance(paths[0], write_page(inheritance_report(paths[0]), page, figures))
    if kinds != ["compare"] and set(kinds) != {"train"}:
        descriptions = ", ".join(
            f"{folder} is {_KINDS.get(kind, f'of wakeful {kind}')}"
            for folder, kind in zip(paths, kinds, strict=True)
        )
        raise WakefulError(
            f"no page can be written of these: {descriptions}. A page is about training runs, "
            "about one comparison or about one inheritance; the other verbs write report.html "
            "themselves"
        )
    return report_comparison(paths, page, title, baseline=baseline, only=only, figures=figures)
