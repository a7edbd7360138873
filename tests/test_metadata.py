"""What the package, its citation and its code say of it agrees."""

import re
import tomllib
from pathlib import Path

import wakeful

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CITATION = (ROOT / "CITATION.cff").read_text("utf-8")


def test_the_citation_is_of_this_version_by_these_authors() -> None:
    assert PROJECT["version"] == wakeful.__version__
    assert f"\nversion: {PROJECT['version']}\n" in CITATION
    assert f"\nlicense: {PROJECT['license']}\n" in CITATION
    released = f"\n## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert bool(re.search(r"\ndate-released: \d{4}-\d\d-\d\d\n", CITATION)) == released
    names = [author["name"] for author in PROJECT["authors"]]
    own = CITATION.partition("\nreferences:")[0]
    assert re.findall(r"^  - name: (.+)$", own, re.M) == names


def test_the_citation_describes_what_the_package_does() -> None:
    (abstract,) = re.findall(r"\nabstract: >-\n((?:  .+\n)+)", CITATION)
    assert " ".join(abstract.split()) == PROJECT["description"]


def test_the_classifiers_are_those_that_the_package_needs() -> None:
    named = PROJECT["classifiers"]
    assert "Typing :: Typed" in named
    assert not [each for each in named if each.startswith("License ::")]
    oldest = PROJECT["requires-python"].removeprefix(">=")
    versions = [each.rpartition(" ")[2] for each in named if "Python :: 3." in each]
    assert versions[0] == oldest
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    assert re.findall(r'"(3\.\d+)"', workflow.partition("python: ")[2].split("\n")[0]) == versions


def test_the_projects_address_is_given_everywhere_or_nowhere() -> None:
    urls = PROJECT.get("urls", {})
    site = (ROOT / "mkdocs.yml").read_text("utf-8")
    named = {
        urls.get("Repository"),
        *(re.findall(r"^repository-code: (\S+)$", CITATION, re.M) or [None]),
        *(re.findall(r"^repo_url: (\S+)$", site, re.M) or [None]),
    }
    assert len(named) == 1, named
