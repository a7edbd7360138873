"""Completion: what a real bash offers, and scripts that the other shells can read."""

import shutil
import subprocess
from pathlib import Path

import pytest

from wakeful.cli import main


def script(capsys: pytest.CaptureFixture[str], shell: str) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(file: Path, *words: str) -> list[str]:
    """Return what bash offers for the last of these words."""
    program = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _wakeful; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    ended = subprocess.run(
        ["bash", "--norc", "-c", program, "bash", str(file), "wakeful", *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ended.stderr == ""
    return ended.stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_verbs_options_and_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wakeful.bash"
    file.write_text(script(capsys, "bash"))
    assert completed(file, "diag") == ["diagnose"]
    assert completed(file, "diagnose", "smollm2", "--le") == ["--length"]
    assert completed(file, "diagnose", "--bos", "") == ["auto", "on", "off"]
    assert completed(file, "inherit", "smollm2", "--ste") == ["--steps"]
    assert completed(file, "prepare", "x", "--tok") == ["--tokenizer"]
    assert completed(file, "generate", "x", "--num") == ["--num_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(("shell", "check"), [("zsh", "zsh -n"), ("fish", "fish -n")])
def test_other_shells_can_read_their_scripts(
    shell: str, check: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script(capsys, shell)
    assert "num_tokens" in text
    if shutil.which(shell):
        subprocess.run(check.split(), input=text, text=True, check=True)


def test_another_shell_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zhs"]) == 1
    assert "did you mean 'zsh'" in capsys.readouterr().err
    assert main(["completion"]) == 1
    assert "name one shell" in capsys.readouterr().err
