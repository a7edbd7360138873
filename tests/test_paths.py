"""A cache folder that is made several times at once is complete and left once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from wakeful.paths import free_folder, install_folder, temporary_path_beside

MAKERS = 8


def test_the_first_to_finish_gives_the_folder_and_the_others_take_it(tmp_path: Path) -> None:
    folder, together = tmp_path / "model", Barrier(MAKERS)

    def make(number: int) -> None:
        part = tmp_path / f".part-{number}"
        part.mkdir()
        for name in ("config.json", "weights"):
            (part / name).write_text(str(number))
        together.wait()
        install_folder(part, folder, "config.json")

    with ThreadPoolExecutor(MAKERS) as pool:
        list(pool.map(make, range(MAKERS)))  # an error of any is raised here
    first = (folder / "config.json").read_text()
    assert (folder / "weights").read_text() == first
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"model"} | {f".part-{n}" for n in range(MAKERS) if str(n) != first}


def test_an_unfinished_folder_in_the_way_is_an_error(tmp_path: Path) -> None:
    part, folder = tmp_path / "part", tmp_path / "model"
    for each in (part, folder):
        each.mkdir()
        (each / "weights").write_text("1")
    with pytest.raises(OSError, match="not empty"):
        install_folder(part, folder, "config.json")
    assert (part / "weights").is_file()


def test_a_path_beside_is_hidden_and_new(tmp_path: Path) -> None:
    parts = {temporary_path_beside(tmp_path / "model") for _ in range(99)}
    assert len(parts) == 99
    assert all(part.parent == tmp_path and part.match(".model.*.part") for part in parts)


def test_a_folder_that_nothing_has_is_found(tmp_path: Path) -> None:
    place = tmp_path / "cure-a"
    for name in ("cure-a", "cure-a-2", "cure-a-3"):
        assert free_folder(place) == tmp_path / name
        (tmp_path / name).mkdir()
