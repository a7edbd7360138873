"""The core has floors: a package imports from those below it, never from those above."""

from dataclasses import replace
from pathlib import Path

import pytest

from floors import House

FLOORS = (
    (
        "version",
        "errors",
        "shape",
        "paths",
        "digests",
        "estimates",
        "roles",
        "hub",
        "finding",
        "tracing",
        "switches",
    ),
    ("discovery", "plugins", "plain_text", "guard"),
    ("display", "variants", "families", "implementations", "paged"),
    ("config", "device"),
    (
        "catalog",
        "routes",
        "depth",
        "normalizers",
        "norms",
        "placements",
        "ropes",
        "embeddings",
        "optim",
        "data",
    ),
    ("model",),
    ("probes",),
    ("quant",),
    ("surgery", "runs"),
    ("hf",),
    ("loading",),
    ("training",),
    ("evaluation", "heirs"),
    ("comparison",),
    ("reports",),
    ("verbs",),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
CORE = House(Path(__file__).parent.parent / "src" / "wakeful", FLOORS, above=("wakeful_papers",))


def test_imports_lead_down() -> None:
    CORE.check()


@pytest.mark.parametrize(
    "statement",
    [
        "import wakeful.cli",
        "from wakeful.reports import charts",
        "from wakeful import verbs",
        "import wakeful",
        "from wakeful import __version__",
        "import wakeful_papers",
        "from wakeful_papers.exhibits import exhibit",
    ],
)
@pytest.mark.parametrize("place", ["{}", "def f():\n    {}", "if TYPE_CHECKING:\n    {}"])
def test_an_import_that_leads_up_is_found(statement: str, place: str, tmp_path: Path) -> None:
    house = replace(CORE, folder=tmp_path / "wakeful")
    file = house.folder / "quant" / "grids.py"
    file.parent.mkdir(parents=True)
    file.write_text(place.format(statement))
    assert len(house.upward_imports(file)) == 1
