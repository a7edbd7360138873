"""The core has floors: a package imports from those below it, never from those above."""

from dataclasses import replace
from pathlib import Path

import pytest

from floors import House
from tool import tool_of

TOOLS = (
    "diagnosis", "curing", "evaluation", "quantization", "inheritance", "training", "generation",
    "exporting", "reporting",
)  # fmt: skip
FLOORS = (
    (
        "errors", "version", "paths", "digests", "hub", "estimates", "finding", "layer_ranges",
        "parts", "switches", "tracing",
    ),
    ("variants", "terminal", "guard", "device", "paged", "scores"),
    ("config",),
    (
        "catalog", "routes", "depth", "normalizers", "norms", "placements", "ropes", "embeddings",
        "optim", "data",
    ),
    ("model",),
    ("probes", "runs"),
    ("surgery", "hf", "reports"),
    ("loading",),
    (*TOOLS, "__init__"),
    ("cli",),
)  # fmt: skip
CORE = House(
    Path(__file__).parent.parent / "src" / "wakeful",
    FLOORS,
    above=("wakeful_papers",),
    entries={"__main__": "cli"},
    tools=TOOLS,
)


def test_imports_lead_down() -> None:
    CORE.check()


@pytest.mark.slow
def test_the_picture_of_the_architecture_is_that_of_the_imports() -> None:
    tool = tool_of("architecture")
    assert tool.picture() == tool.PICTURE.read_text("utf-8"), "run python tools/architecture.py"


@pytest.mark.parametrize(
    "statement",
    [
        "import wakeful.cli",
        "from wakeful.training.charts import curves",
        "from wakeful import cli",
        "import wakeful",
        "from wakeful import __version__",
        "import wakeful_papers",
        "from wakeful_papers.exhibits import exhibit",
    ],
)
@pytest.mark.parametrize("place", ["{}", "def f():\n    {}", "if TYPE_CHECKING:\n    {}"])
def test_an_import_that_leads_up_is_found(statement: str, place: str, tmp_path: Path) -> None:
    house = replace(CORE, folder=tmp_path / "wakeful")
    file = house.folder / "quantization" / "grids.py"
    file.parent.mkdir(parents=True)
    file.write_text(place.format(statement))
    assert len(house.upward_imports(file)) == 1
