"""The recipes for clusters: what they start is torchrun's command and wakeful's."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from wakeful.cli import main

FOLDER = Path(__file__).parent.parent / "examples" / "cluster"
NUMBERS = {"NNODES": "2", "NUM_NODES": "2", "GPUS_PER_NODE": "8", "ID": "7"}


def script_of(file: Path) -> str:
    """Return the shell script that a recipe runs."""
    if file.suffix == ".sh":
        return file.read_text("utf-8")
    parts = list(yaml.safe_load_all(file.read_text("utf-8")))
    if "run" in parts[0]:
        return parts[0]["run"]
    service, job = parts
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    return pod["containers"][0]["args"][0]


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_a_recipe_starts_torchrun(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of(file)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    line = re.sub(r"\\\n\s*", "", script).split("torchrun ")[1].splitlines()[0]
    for name, number in NUMBERS.items():
        line = re.sub(rf"\$\w*{name}\b", number, line)
    asked = get_args_parser().parse_args(shlex.split(line))
    assert (asked.nproc_per_node, asked.rdzv_backend) == ("8", "c10d")
    assert asked.rdzv_endpoint.endswith(":29500")
    assert asked.module
    assert [asked.training_script, *asked.training_script_args] == ["wakeful", "train", "$what"]
    for what in re.findall(r'what="(.*)"', script):
        assert "$run" in what
        capsys.readouterr()
        assert main(["train", *what.replace("$run", "nowhere").split()]) == 1  # it parses
        assert re.search(r"my\.toml|nowhere", capsys.readouterr().err)
