"""Write the tables of docs/presets.md from the presets; with --check, say if they are stale."""

import sys
from pathlib import Path

from wakeful.demonstration.presets import catalogue, figures_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "presets.md"
FROM = "<!-- python tools/presets.py writes what follows -->\n"
TWO_CORES = 40e9
"""Operations a second that training reaches on two cores of a server, in float32, roughly."""


def page_table() -> str:
    """Return the catalogue as docs/presets.md has it, in Markdown."""
    lines: list[str] = []
    one, several = catalogue()
    for title, found in (("One run", one), ("Comparisons", several)):
        lines += [f"## {title}", ""]
        lines += ["| preset | runs | parameters | tokens | memory | two cores | H100 |"]
        lines += ["|---|--:|--:|--:|--:|--:|--:|"]
        for each in found:
            figures = " | ".join(figures_of(each, each.operations / TWO_CORES))
            lines.append(f"| `{each.name}`<br>{each.summary} | {figures} |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Return 0 where the page is as the presets are, or has become so."""
    text = PAGE.read_text("utf-8")
    whole = text.partition(FROM)[0] + FROM + "\n" + page_table()
    if "--check" in arguments:
        if whole != text:
            print("docs/presets.md is stale: run python tools/presets.py")
        return int(whole != text)
    PAGE.write_text(whole, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
