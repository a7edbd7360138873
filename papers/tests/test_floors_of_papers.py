"""The papers' package has floors as the core has."""

from pathlib import Path

from floors import House

PAPERS = House(
    Path(__file__).parent.parent / "src" / "wakeful_papers",
    (
        ("depth", "heirs", "normalizers", "norms", "probes", "routes"),
        ("options", "exhibits"),
        ("reports",),
        ("verbs",),
        ("__init__",),
        ("cli",),
    ),
)


def test_imports_lead_down() -> None:
    PAPERS.check()
