"""Results of all tools, and their progress display."""

import contextlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from rich.console import RenderableType

from wakeful.config.reading import FigureFormat
from wakeful.reports.charts import Drawing, Titled, save_figures
from wakeful.reports.html import notebook_html, write_page
from wakeful.reports.terminal import render_terminal
from wakeful.reports.value import Report
from wakeful.runs.distributed import World
from wakeful.runs.run import Environment, Run, disk_errors
from wakeful.terminal.display import Display, DisplayFactory, default_display


class Result(ABC):
    """Result of a tool: a tidy table, figures and sentences; saved as the command line does."""

    @property
    @abstractmethod
    def frame(self) -> pl.DataFrame:
        """The tidy table of everything that was measured."""

    @property
    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """The figures, as summary.json has them."""

    @property
    @abstractmethod
    def report(self) -> Report:
        """The report that the page, the terminal and a notebook draw."""

    @property
    def verdicts(self) -> list[str]:
        """The findings in sentences."""
        return self.report.sentences

    @abstractmethod
    def save(self, folder: str | Path) -> Path:
        """Write the run directory with its page to `folder`, which must not exist; return it."""

    def __rich__(self) -> RenderableType:
        return render_terminal(self.report)

    def __repr__(self) -> str:
        return "\n".join([f"<{type(self).__name__}>", *(f"  {line}" for line in self.verdicts)])

    def _repr_html_(self) -> str:
        return notebook_html(self.report)

    def picture(self) -> Drawing | None:
        """Return the one chart that a notebook shows."""
        return self.report.picture

    def charts(self) -> Titled:
        """Return every chart of the page with a title of its own."""
        return self.report.charts()

    def save_figures(self, folder: str | Path, formats: Sequence[FigureFormat] = ("svg",)) -> None:
        """Write every chart of the page for a paper into a folder, each named after its title.

        Raises:
            WakefulError: a format is none of svg, png, pdf, or a file cannot be written.
        """
        if formats:  # all charts of a page take seconds to draw
            save_figures(self.charts(), folder, formats)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MeasuredResult(Result):
    """A result that is written when all of it is known."""

    figures: tuple[FigureFormat, ...] = ()
    """Formats of charts that are saved beside the page."""

    def write_run(
        self,
        folder: str | Path,
        verb: str,
        machine: Environment,
        files: Mapping[str, pl.DataFrame | Mapping[str, Any]],
        **fields: Any,
    ) -> Path:
        """Write a new run directory with `files`, summary.json, the page and its charts; return the
        folder.

        `files` are frames (parquet) and tables (JSON) by file name; `machine` becomes
        environment.json, and `fields` are entries of run.json, beside `verb`.
        """
        with Run.create(folder, verb, {**fields, "status": "done"}) as run:
            run.write_json("environment.json", machine)
            run.write_json("summary.json", self.summary)
            for name, content in files.items():
                if isinstance(content, pl.DataFrame):
                    run.write_frame(name, content)
                else:
                    run.write_json(name, content)
        # Last: if a chart cannot be drawn, the figures are saved all the same.
        write_page(self.report, Path(folder) / "report.html", self.figures)
        return Path(folder)


@contextlib.contextmanager
def first_process_display(
    display: DisplayFactory | None, name: str, world: World
) -> Iterator[Display]:
    """Open the display of the work called `name`: `display`, by default a bar on a terminal. Of
    several processes only the first shows it; the others get one that shows nothing.
    """
    if not world.first:
        yield Display()
        return
    with (display or default_display)(name) as show:
        yield show


def same_or_each(descriptions: Mapping[str, str]) -> str:
    """Return the description that all models share or, if they differ, "NAME description; ..." with
    that of each. `descriptions` holds them by the model's name.
    """
    if len(set(descriptions.values())) == 1:
        return next(iter(descriptions.values()))
    return "; ".join(f"{name} {description}" for name, description in descriptions.items())


@dataclass(frozen=True, eq=False, repr=False)
class StoredResult(Result):
    """A result whose run directory was written while the work went on."""

    path: Path
    """The run directory."""
    page: Path
    """Its page."""

    def save(self, folder: str | Path) -> Path:
        """Copy the run directory to `folder`, which must not exist or be empty; return its path.

        Raises:
            WakefulError: there is something in `folder`, or the disk refuses it.
        """
        Run(folder).refuse_existing("copy")  # no kind of run: the error suggests no --resume
        with disk_errors(Path(folder)):
            shutil.copytree(self.path, folder, dirs_exist_ok=True)  # an empty folder may exist
        return Path(folder)
