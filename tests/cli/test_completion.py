"""What the tab key gives: in a real bash, and in the other shells as far as they are here."""

import shutil
import subprocess
from pathlib import Path

import pytest

from wakeful.cli import all_verbs, main, verbs
from wakeful.cli.help import offered
from wakeful.plugins import added, verb_of

OTHERS = {name: verb.options for name in added("verbs") if (verb := verb_of(name))}
KINDS = verbs.KINDS | OTHERS


def printed(capsys: pytest.CaptureFixture[str], shell: str) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.fixture
def bash(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Path:
    file = tmp_path / "wakeful.bash"
    file.write_text(printed(capsys, "bash"))
    return file


def completed(file: Path, *words: str) -> list[str]:
    """Return what bash offers for the last of these words."""
    program = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _wakeful; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    ended = subprocess.run(
        ["bash", "--norc", "-u", "-c", program, "bash", str(file), "wakeful", *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ended.stderr == ""
    return ended.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_verbs_options_and_values(bash: Path) -> None:
    assert completed(bash, "di") == ["diagnose"]
    assert completed(bash, "") == list(all_verbs())
    assert completed(bash, "diagnose", "smollm2", "--le") == ["--length"]
    assert completed(bash, "diagnose", "--bos", "") == ["auto", "on", "off"]
    assert completed(bash, "diagnose", "x", "--figures", "svg", "p") == ["png", "pdf"]
    assert completed(bash, "train", "cpu-") == ["cpu-small", "cpu-tiny"]
    assert completed(bash, "train", "cpu-tiny", "--model.route", "resf") == ["resformer"]
    assert completed(bash, "train", "cpu-tiny", "--data.no_c") == ["--data.no_cross_documents"]
    assert completed(bash, "compare", "aren")[0] == "arena"
    assert completed(bash, "reproduce", "value-residual/fig6") == ["value-residual/fig6"]
    assert completed(bash, "inherit", "smollm2", "--st") == ["--steps"]
    assert completed(bash, "data", "") == ["prepare", "generate"]
    assert completed(bash, "data", "generate", "x", "--tok") == ["--tokens"]
    assert completed(bash, "data", "generate", "x", "--chat", "") == ["auto", "on", "off"]
    assert completed(bash, "data", "prepare", "x", "--tok") == ["--tokenizer"]
    assert completed(bash, "generate", "x", "--num") == ["--num_tokens"]
    # Files: bash's own completion, which begins where ours has nothing.
    assert completed(bash, "train", "cpu-tiny", "--out", "") == []
    assert completed(bash, "diagnose", "") == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_falls_back_on_files(bash: Path) -> None:
    ended = subprocess.run(
        ["bash", "--norc", "-c", f"source {bash}; complete -p wakeful"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ended.stdout.split() == ["complete", "-o", "default", "-F", "_wakeful", "wakeful"]


def test_zsh_runs_the_script_of_bash(capsys: pytest.CaptureFixture[str], bash: Path) -> None:
    lines = printed(capsys, "zsh").splitlines()
    assert lines[:2] == ["autoload -U +X compinit && compinit",
                         "autoload -U +X bashcompinit && bashcompinit"]  # fmt: skip
    assert lines[2:] == bash.read_text().splitlines()
    if zsh := shutil.which("zsh"):
        subprocess.run([zsh, "-n"], input="\n".join(lines), text=True, check=True)


def test_fish_has_every_verb_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "fish")
    for verb in all_verbs():
        assert f"-n __fish_use_subcommand --no-files -a {verb} " in text
    for words, kind in KINDS.items():
        verb = "; and __fish_seen_subcommand_from ".join(words.split())
        assert f'__fish_seen_subcommand_from {verb}" -l help-all ' in text
        for option in offered(kind):
            assert f'__fish_seen_subcommand_from {verb}" -l {option.flag[2:]} ' in text
    two = "__fish_seen_subcommand_from data; and __fish_seen_subcommand_from generate"
    assert f'-n "{two}" -l tokens ' in text
    assert (
        '-n "not __fish_seen_subcommand_from data; and __fish_seen_subcommand_from generate" '
        "-l num_tokens " in text
    )
    if fish := shutil.which("fish"):
        subprocess.run([fish, "-n"], input=text, text=True, check=True)


def test_another_shell_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zhs"]) == 1
    assert "did you mean 'zsh'" in capsys.readouterr().err
    assert main(["completion"]) == 1
    assert "name one shell" in capsys.readouterr().err
