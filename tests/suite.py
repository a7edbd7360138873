"""A pytest plugin, the start of every test: checked shapes and types, few threads, one seed."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import jaxtyping
from jaxtyping import _import_hook as hook

from typechecker import decorator


def run_module(loader: hook._JaxtypingLoader, module: ModuleType) -> None:
    """Find a checked module's bytecode by a name of its own, and then only run it.

    jaxtyping's way has the other name while the module runs too, and with it everything that the
    module imports: half of Transformers would be compiled anew in every process.
    """
    other_name = partial(hook._optimized_cache_from_source, loader._typechecker.get_hash())
    with patch("importlib._bootstrap_external.cache_from_source", other_name):
        code = loader.get_code(module.__name__)
    assert code is not None
    exec(code, vars(module))


# Before anything imports `wakeful`: every annotated function checks its shapes and types. Dynamo
# cannot trace the checks, so tests of compiled models run those in a process of their own.
hook._JaxtypingLoader.exec_module = run_module
hook.Typechecker.get_ast = decorator
jaxtyping.install_import_hook(["wakeful", "wakeful_papers"], "typechecker.checked")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


CORE = Path(__file__).parent
WHOLE = ("cli", "examples", "pages", "safety", "verbs")
"""Folders whose tests run whole verbs, as users do: without the checks, which take a fifth of the
time. Every function is checked where its own room is tested. So do the tests of the papers."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Settle the checks before any fixture runs, those of a whole module too."""
    path = item.path
    room = path.relative_to(CORE).parts[0] if path.is_relative_to(CORE) else WHOLE[0]
    whole = room in WHOLE or (room.endswith(".py") and room != "test_typechecker.py")
    jaxtyping.config.update("jaxtyping_disable", whole)


@pytest.fixture
def as_users_run_it() -> Iterator[None]:
    """Switch the shape and type checks off: what is refused then, the code itself refuses."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
