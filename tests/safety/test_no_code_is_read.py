"""Nothing in the package runs, unpickles or unpacks what it reads."""

import ast
from pathlib import Path

import pytest

import wakeful

SOURCES = sorted(Path(wakeful.__file__).parent.rglob("*.py"))
FORBIDDEN_MODULES = {
    "pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "tarfile",
    "zipfile", "gzip", "bz2", "lzma", "subprocess", "ctypes", "xml",
}  # fmt: skip
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen",
                   "shutil.unpack_archive", "torch.hub.load"}  # fmt: skip
ALLOWED = {"paged.py": {"ctypes"}, "template.py": {"subprocess"}}
"""madvise; and templates, rendered in a process of this Python with limits (see the test below)."""
REQUIRED = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "np.save": ("allow_pickle", False),
}
"""Calls that unpickle, unless an option says otherwise."""
FOREIGN = {"from_pretrained", "from_config"}
"""Calls of Transformers that ask whether to run a folder's code, unless they are told."""


def dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    tree = ast.parse(path.read_text("utf-8"))
    return [(dotted(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def check_calls(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        forbidden = FORBIDDEN_MODULES - ALLOWED.get(path.name, set())
        assert not {name.split(".")[0] for name in names} & forbidden, path
    for name, call in calls(path):
        assert name not in FORBIDDEN_CALLS, f"{path}:{call.lineno}"
        if name in REQUIRED:
            option, value = REQUIRED[name]
            given = {word.arg: ast.unparse(word.value) for word in call.keywords}
            assert given.get(option) == str(value), f"{path}:{call.lineno}"


def check_transformers(path: Path) -> None:
    for name, call in calls(path):
        owner, _, method = name.rpartition(".")
        if method not in FOREIGN or not owner.startswith("Auto"):
            continue
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        told = given.get("trust_remote_code") in ("False", "trust_remote_code")
        # Or among the options that are passed on as a whole.
        whole = None in given and '"trust_remote_code": ' in path.read_text("utf-8")
        assert told or whole, f"{path}:{call.lineno}"


@pytest.mark.slow
def test_nothing_is_run_unpickled_or_unpacked() -> None:
    assert len(SOURCES) > 100
    for path in SOURCES:
        check_calls(path)


def test_the_only_program_that_is_started_is_this_python_with_our_own_file() -> None:
    [path] = [path for path in SOURCES if path.name == "template.py"]
    [run] = [call for name, call in calls(path) if name.startswith("subprocess.")]
    assert ast.unparse(run.args[0]) == "[sys.executable, '-P', __file__]"
    assert not any(word.arg == "shell" for word in run.keywords)


@pytest.mark.slow
def test_transformers_is_told_whether_to_run_code() -> None:
    for path in SOURCES:
        check_transformers(path)


def test_the_rules_find_what_they_forbid(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    for bad in ("import pickle", "from zipfile import ZipFile", "eval('1')", "torch.load(f)",
                "np.load(f, allow_pickle=True)", "os.system('x')"):  # fmt: skip
        path.write_text(bad)
        with pytest.raises(AssertionError):
            check_calls(path)
    path.write_text("AutoConfig.from_pretrained(folder)")
    with pytest.raises(AssertionError):
        check_transformers(path)
