"""The test suites of Transformers, torch and PEFT over our classes, where their source tree is.

WAKEFUL_TRANSFORMERS_TREE names the folder of the source tree of the Transformers that is installed,
WAKEFUL_PEFT_TREE that of PEFT.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from wakeful.errors import WakefulError

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import foreign_suites  # noqa: E402

TREE = os.environ.get("WAKEFUL_TRANSFORMERS_TREE", "")
PEFT_TREE = os.environ.get("WAKEFUL_PEFT_TREE", "")
NAMES = [*foreign_suites.OURS, *foreign_suites.THEIRS, "optimizers"]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_no_test_of_theirs_fails(name: str) -> None:
    if not TREE:
        pytest.skip("WAKEFUL_TRANSFORMERS_TREE names no source tree of Transformers")
    pytest.importorskip("parameterized")
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "foreign_suites.py"), TREE, name],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert re.search(r"all: [1-9]\d* passed, 0 failed", ran.stdout)


@pytest.mark.long
def test_no_test_of_peft_fails() -> None:
    if not PEFT_TREE:
        pytest.skip("WAKEFUL_PEFT_TREE names no source tree of PEFT")
    pytest.importorskip("peft")
    pytest.importorskip("diffusers")
    assert foreign_suites.main([PEFT_TREE, "peft"]) == 0


def test_a_folder_without_their_tests_and_an_unknown_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WakefulError, match=r"has no tests/test_modeling_common\.py"):
        foreign_suites.main([str(tmp_path), "vanilla"])
    with pytest.raises(WakefulError, match=r"has no tests/test_decoder_models\.py"):
        foreign_suites.main([str(tmp_path), "peft"])
    with pytest.raises(WakefulError, match="nobody is none of vanilla"):
        foreign_suites.main([str(tmp_path), "nobody"])


def test_what_does_not_apply_has_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert foreign_suites.main(["anywhere", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(foreign_suites.NOT_APPLICABLE)
    assert foreign_suites.reason("svformer", "test_eager_matches_sdpa_inference")
    assert not foreign_suites.reason("svformer", "test_torch_export")
    assert not foreign_suites.reason("llama", "test_training")
    kinds = {"", "ours", "theirs", *NAMES}
    assert all(of in kinds and why for of, _, why in foreign_suites.NOT_APPLICABLE)
