"""What every test starts from: checked shapes and types, a fixed number of threads, one seed."""

import os
from collections.abc import Iterator

import jaxtyping

# Before anything imports `wakeful`: every annotated function checks its shapes and types. Dynamo
# cannot trace the checks, so tests of compiled models run those in a process of their own.
jaxtyping.install_import_hook("wakeful", "typechecker.check")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


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
        if "gpu" in item.keywords:
            item.add_marker(skip)
