"""Draw docs/architecture.svg from the source's imports: `python tools/architecture.py`.

The floors are those of tests/test_floors.py, the ground at the bottom; each tool names the tools
that it imports from.
"""

import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from floors import imports  # noqa: E402
from test_floors import CORE, TOOLS  # noqa: E402

PICTURE = ROOT / "docs" / "architecture.svg"
CAPTIONS = (
    "errors, paths, estimates",
    "expressions, devices, terminal",
    "options and configurations",
    "parts of a model, data",
    "the decoder",
    "measurements, run directories",
    "surgery, Transformers, pages",
    "a path or a name as a Model",
    "the tools and their functions",
    "the command line",
)
"""What lies on each floor, from the ground up."""
WIDTH, LEFT, GAP, LINE = 900, 214, 8, 26
"""Pixels: of the picture, left of the rooms, between boxes, and of a room's height."""
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328; }
  .page { fill: #ffffff; } .floor { fill: #f3f4f8; } .room { fill: #ffffff; stroke: #9aa3b2; }
  .tool { fill: #e4e8fb; stroke: #5c6bc0; } .note { fill: #59636e; font-size: 11px; }
  .name { font-weight: 600; } .papers { fill: none; stroke: #9aa3b2; stroke-dasharray: 4 3; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e9ef; } .page { fill: #16181d; } .floor { fill: #20242c; }
    .room { fill: #16181d; stroke: #5d6675; } .tool { fill: #2b3157; stroke: #8c9eff; }
    .note { fill: #a5adba; } .papers { stroke: #5d6675; }
  }
"""


def imported_tools() -> dict[str, list[str]]:
    """Return the tools that each tool imports from."""
    found: dict[str, list[str]] = {}
    for tool in TOOLS:
        files = (CORE.folder / tool).rglob("*.py")
        targets = {str(CORE.target_of(name)) for file in files for _, name in imports(file)}
        found[tool] = sorted(targets & {*TOOLS} - {tool})
    return found


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return a line of text whose baseline begins at (x, y)."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a rectangle with round corners."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>'
    )


def rooms_of(names: list[str], y: float) -> tuple[list[str], float]:
    """Return the boxes of rooms in lines from y down, and their height."""
    parts: list[str] = []
    x, top = float(LEFT), y
    for name in names:
        width = 7 * len(name) + 18
        if x + width > WIDTH - GAP - 8:
            x, y = float(LEFT), y + LINE + GAP
        parts += [box(x, y, width, LINE, "room"), text(x + 9, y + 17, name)]
        x += width + GAP
    return parts, y + LINE - top


def tools_of(y: float) -> tuple[list[str], float]:
    """Return the boxes of the tools with what each imports from, five to a line, and the height."""
    parts: list[str] = []
    uses = imported_tools()
    width = (WIDTH - LEFT - 8 - 5 * GAP) / 5
    height = 26 + 15 * max(1, *map(len, uses.values()))
    for number, (tool, targets) in enumerate(sorted(uses.items())):
        x = LEFT + number % 5 * (width + GAP)
        top = y + number // 5 * (height + GAP)
        parts += [box(x, top, width, height, "tool"), text(x + 9, top + 18, tool, "name")]
        parts += [
            text(x + 9, top + 35 + 15 * line, f"→ {target}", "note")
            for line, target in enumerate(targets)
        ]
    return parts, 2 * height + GAP


def picture() -> str:
    """Return the whole picture as SVG."""
    parts = [box(8, 8, WIDTH - 16, LINE + 16, "papers"), text(20, 34, "papers/", "name")]
    parts.append(text(LEFT, 34, "wakeful_papers, a project of its own: exhibits and reproduce"))
    y = 8 + LINE + 16 + GAP
    floors = list(zip(CORE.floors, CAPTIONS, strict=True))
    for number, (rooms, caption) in reversed(list(enumerate(floors, 1))):
        is_tools = {*TOOLS} <= {*rooms}
        others = sorted({*rooms} - {*TOOLS} - {"__init__"})
        inside, height = tools_of(y + 8) if is_tools else rooms_of(others, y + 8)
        parts.append(box(8, y, WIDTH - 16, height + 16, "floor"))
        parts += [text(20, y + 19, f"floor {number}", "name"), text(20, y + 34, caption, "note")]
        parts += inside
        y += height + 16 + GAP
    parts.append(text(20, y + 12, "Imports lead down, never up or sideways. Only tools import from "
                      "each other (→), what the other's __init__ exports.", "note"))  # fmt: skip
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 24:g}" role="img">'
    label = "<title>The floors of wakeful and what lies on each</title>"
    page = f'<rect width="{WIDTH}" height="{y + 24:g}" class="page"/>'
    return "\n".join((head, label, f"<style>{STYLE}</style>", page, *parts, "</svg>", ""))


if __name__ == "__main__":
    PICTURE.write_text(picture(), "utf-8")
