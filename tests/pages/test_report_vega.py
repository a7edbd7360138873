"""The script that draws charts is bundled once and kept, and never taken damaged."""

from pathlib import Path

import pytest
import vl_convert

from wakeful.pages.page import vega_bundle


@pytest.fixture
def bundles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    made: list[int] = []

    def bundle() -> str:
        made.append(1)
        return "let a = 'é';\r\nlet b;\n"

    monkeypatch.setattr(vl_convert, "javascript_bundle", bundle)
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    vega_bundle.cache_clear()
    yield made
    vega_bundle.cache_clear()


def again() -> str:
    """As another process would ask."""
    vega_bundle.cache_clear()
    return vega_bundle()


def test_it_is_bundled_once(bundles: list[int]) -> None:
    assert again() == again() == again() == "let a = 'é';\r\nlet b;\n"
    assert len(bundles) == 1


@pytest.mark.parametrize("damage", [b"", b"let a;", b"\xff", b"// sha256 00\nlet evil;"])
def test_a_damaged_script_is_bundled_anew(
    bundles: list[int], tmp_path: Path, damage: bytes
) -> None:
    script = again()
    (file,) = (tmp_path / "cache" / "vega").iterdir()
    file.write_bytes(damage)
    assert again() == again() == script
    assert len(bundles) == 2


def test_a_cache_that_cannot_be_written_is_done_without(bundles: list[int], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert again() == again()
    assert len(bundles) == 2
