"""The damage of each scheme on the terminal."""

from rich.table import Table as Grid
from rich.text import Text

from wakeful.pages.quantization import Damage, scheme_figures, summary, with_digits


def damage_grid(damage: Damage) -> Grid:
    """Return one row a scheme, the full-precision model first; layer errors are medians."""
    grid = Grid(box=None, pad_edge=False, header_style="bold")
    grid.add_column("scheme", no_wrap=True)
    for column in ("perplexity", "increase", "KL (nats)", "error", "worst", "MB"):
        grid.add_column(column, justify="right")
    full = summary(damage)
    before = with_digits(full["perplexity"], full["perplexity_standard_error"], least=4)
    grid.add_row("full", before, "", "", "", "", f"{damage.full_bytes / 1e6:,.2f}")
    for name in damage.schemes:
        figures = scheme_figures(damage, name)
        grid.add_row(
            Text(name),
            *(
                with_digits(figures[key], figures[f"{key}_standard_error"], least=least)
                for key, least in (("perplexity", 4), ("increase", 2), ("kl", 2))
            ),
            _share(figures["layer_error_median"]),
            _share(figures["layer_error_worst"]),
            f"{figures['bytes'] / 1e6:,.2f}",
        )
    return grid


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
