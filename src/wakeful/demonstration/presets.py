"""The catalogue of presets: what each is, how large, and what it costs to train."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from wakeful.config.schema import config_from_table, read_seeds, split_variants
from wakeful.config.tables import preset_names, read_preset, read_table
from wakeful.device import H100, choose_device, estimate_seconds
from wakeful.terminal.display import format_duration
from wakeful.training import run_size

MIN_H100_PARAMETERS = 20e6
"""Parameters from which on an H100 is busy with arithmetic, so that its time can be estimated."""


@dataclass(frozen=True)
class PresetFacts:
    """Size and cost of a preset; for a comparison, the largest variant and the cost of all runs."""

    name: str
    summary: str
    variants: int
    seeds: int
    parameters: int
    tokens: int
    """Of all runs."""
    memory: int
    """Bytes that training the largest variant takes, very roughly."""
    operations: float
    """Floating-point operations of all runs, as `operations_of` counts them."""

    @property
    def runs(self) -> str:
        """Number of runs as "4 × 3": variants times seeds."""
        return f"{self.variants} × {self.seeds}" if self.variants > 1 else "1"


def compute_preset_facts(name: str) -> PresetFacts:
    """Return the size and the training cost of a preset, computed from its TOML file."""
    table = read_table(name)
    seeds = len(read_seeds(table))
    configs = [config_from_table(variant) for variant in split_variants(name, table).values()]
    sizes = [run_size(config) for config in configs]
    tokens = [c.train.steps * c.train.batch_size * c.train.length for c in configs]
    # A size's operations are those of one token.
    variant_operations = [
        size.operations * num_tokens for size, num_tokens in zip(sizes, tokens, strict=True)
    ]
    return PresetFacts(
        name,
        read_preset(name).splitlines()[0].removeprefix("# "),
        variants=len(configs),
        seeds=seeds,
        parameters=max(size.parameters for size in sizes),
        tokens=seeds * sum(tokens),
        memory=max(size.memory for size in sizes),
        operations=seeds * sum(variant_operations),
    )


def sort_presets() -> tuple[list[PresetFacts], list[PresetFacts]]:
    """Return (presets of one variant, presets that compare several), cheapest first in both."""
    presets = sorted(
        map(compute_preset_facts, preset_names()), key=lambda preset: preset.operations
    )
    single = [preset for preset in presets if preset.variants == 1]
    several = [preset for preset in presets if preset.variants > 1]
    return single, several


def render_presets() -> RenderableType:
    """Return a table of the presets with their estimated cost on this machine and on an H100."""
    seconds_per_operation = estimate_seconds(1.0, choose_device("auto"))
    grid = Grid(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    grid.add_column("preset")
    for column in ("runs", "size", "tokens", "memory", "here", "H100"):
        grid.add_column(column, justify="right", no_wrap=True)
    single, several = sort_presets()
    for title, rows in (("wakeful train", single), ("wakeful compare", several)):
        grid.add_row(Text(title, style="bold"))
        for preset in rows:
            seconds = preset.operations * seconds_per_operation
            grid.add_row(f"  {preset.name}", *format_preset_row(preset, seconds))
    footer = (
        "Size: parameters of the largest variant. Tokens and time: of all runs, variants\n"
        "times seeds. Times are rough estimates: 6 operations per token and multiplying\n"
        "parameter, plus attention, at two fifths of this machine's measured matrix speed\n"
        "and of an H100's peak. On a GPU, small models are slower.\n"
        "wakeful presets NAME prints one."
    )
    return Group(grid, Text(), Text(footer, style="dim"))


def format_preset_row(preset: PresetFacts, seconds: float) -> Sequence[str]:
    """Return the cells of a preset's row: runs, size, tokens, memory, and the time of all runs in
    `seconds` on one machine and as estimated for an H100.
    """
    return (
        preset.runs,
        _format_count(preset.parameters),
        _format_count(preset.tokens),
        _format_bytes(preset.memory),
        _format_time(seconds),
        _format_time(preset.operations / H100) if preset.parameters >= MIN_H100_PARAMETERS else "–",
    )


def _format_count(number: float) -> str:
    """Format a count in thousands, millions, billions or trillions: "1.5M"."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{_format_two_digits(number / scale)}{unit}"
    return f"{_format_two_digits(number / 1e3)}k"


def _format_bytes(count: float) -> str:
    """Format a number of bytes in MB or GB: "1.2 GB"."""
    return (
        f"{_format_two_digits(count / 1e9)} GB"
        if count >= 1e9
        else f"{_format_two_digits(count / 1e6)} MB"
    )


def _format_two_digits(number: float) -> str:
    """Format a number with one decimal below 10, and without decimals from 10 on."""
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.1f}"


def _format_time(seconds: float) -> str:
    years = seconds / (365.25 * 86_400)
    return f"{years:,.0f} years" if years >= 2 else format_duration(seconds)
