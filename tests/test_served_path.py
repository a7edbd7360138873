"""README's path from a model on disk to a served one, to the engines' own sentences.

The engines stand in an environment of their own, whose Python `WAKEFUL_ENGINES` names: vLLM and
xllamacpp, each of which is enough for its part.
"""

import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from wakeful.cli import main
from wakeful.errors import WakefulError
from wakeful.hf.checkpoint_reader import smollm2_folder
from wakeful.quantization.compressed import file_bytes

README = Path(__file__).parents[1] / "README.md"
HEADING = "## From a model on disk to a served one\n"
ENGINES = os.environ.get("WAKEFUL_ENGINES", sys.executable)
PROMPT = "The capital of France is"
VLLM = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model = LLM(sys.argv[1], enforce_eager=True, max_model_len=64, max_num_seqs=1)
    (reply,) = model.generate([sys.argv[2]], SamplingParams(temperature=0, max_tokens=8))
    print("SAID", reply.outputs[0].text.replace("\\n", " "))
"""
LLAMA_CPP = """
import sys
import xllamacpp

options = xllamacpp.CommonParams()
options.model.path, options.n_ctx, options.n_parallel, options.verbosity = sys.argv[1], 64, 1, 0
asked = {"prompt": sys.argv[2], "n_predict": 8, "temperature": 0}
reply = xllamacpp.Server(options).handle_completions(asked)
print("SAID", reply["choices"][0]["text"].replace("\\n", " "))
"""

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("as_users_run_it")]


def commands() -> list[list[str]]:
    """Return the commands that README shows under the heading, before its next one."""
    section = README.read_text("utf-8").partition(HEADING)[2].partition("\n## ")[0]
    lines = re.findall(r"^    (\w.*?)(?:\s+#.*)?$", section, re.MULTILINE)
    return [shlex.split(line) for line in lines]


@functools.cache
def lacks(package: str) -> bool:
    found = subprocess.run([ENGINES, "-c", f"import {package}"], capture_output=True, check=False)
    return bool(found.returncode)


def said(program: str, package: str, model: Path) -> str:
    """Return what an engine writes after the prompt."""
    if lacks(package):
        pytest.skip(f"{ENGINES} has no {package}: name a Python that has it by WAKEFUL_ENGINES")
    place = model.parent / f"ask_{package}.py"  # the package's own name would hide it
    place.write_text(program, "utf-8")
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    alone |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    alone |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [ENGINES, str(place), str(model), PROMPT], capture_output=True, text=True, env=alone,
        timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return next(line for line in done.stdout.splitlines() if line.startswith("SAID"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder in which every command of ours has been run."""
    try:
        smollm2_folder()
    except WakefulError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for program, *words in commands():
            if program == "wakeful":
                assert main(words) == 0
    return folder


def test_vllm_writes_a_sentence(place: Path) -> None:
    (folder,) = (words[-1] for words in commands() if words[0] == "vllm")
    assert file_bytes(place / folder) < 0.75 * file_bytes(place / "cured")
    assert "Paris" in said(VLLM, "vllm", place / folder)


def test_llama_cpp_writes_a_sentence(place: Path) -> None:
    (file,) = (words[-1] for words in commands() if words[0] == "llama-server")
    assert "Paris" in said(LLAMA_CPP, "xllamacpp", place / file)
