"""Fixtures of all tests: a folder to work in, real ranks, the quickstart's data, one thread per process.

GPU tests are skipped without a GPU.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Generator, Iterator
from unittest import mock

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    # Read when Triton is imported, which importing the package may do: tests of kernels run in Triton's interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

import tests.kernels  # noqa: F401  # it changes Triton's interpreter
from megafp8.parallel.parallel_state import destroy_model_parallel
from tests.object_server import ObjectServer
from tests.quickstart_data import ROOT, QuickstartData, make_quickstart_data
from tests.training.presets import Preset
from tests.training.runs import Runs
from tests.world import Ranks, World

torch.set_num_threads(1)
CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
# On a busy machine any example may take a second.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude everything that is imported and collected from garbage collections: it stays until the end."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # extensions report what is left at the end
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests without a GPU; the longest files first, so that no worker is left with one at the end."""
    items.sort(key=lambda item: item.path.parent.name not in ("training", "tests"))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # `keywords` has the names of folders too
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_make_parametrize_id(val: object) -> str | None:
    """A preset's names are its part of a test's id."""
    return str(val) if isinstance(val, Preset) else None


@pytest.fixture(scope="session", autouse=True)
def _own_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Work in a new folder with the shipped configs, and without the data and runs that a checkout may have.

    Fails if the tests leave something in the checkout.
    """
    before, folder, work = set(os.listdir(ROOT)), os.getcwd(), tmp_path_factory.mktemp("work")
    (work / "configs").symlink_to(ROOT / "configs")
    modules = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.chdir(work)
    with mock.patch.dict(os.environ, PYTHONPATH=modules):
        yield
    os.chdir(folder)
    left = {name for name in os.listdir(ROOT) if not name.startswith(".")} - before
    assert not left, f"tests left {', '.join(sorted(left))} in the checkout"


@pytest.fixture(scope="module", autouse=True)
def _leave_groups() -> Iterator[None]:
    """Destroy the groups of a module that loads models in this process."""
    yield
    destroy_model_parallel()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Compute with one thread, on any core, also after a test whose command has bound this process to cores.

    Threads of several workers would wait for each other: that makes small models ten times as slow.
    """
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, CORES)


@pytest.fixture(scope="session")
def rank_processes() -> Iterator[Ranks]:
    processes = Ranks()
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def world2(rank_processes: Ranks) -> World:
    return World(rank_processes, 2)


@pytest.fixture(scope="session")
def world4(rank_processes: Ranks) -> World:
    return World(rank_processes, 4)


@pytest.fixture(scope="session")
def world8(rank_processes: Ranks) -> World:
    return World(rank_processes, 8)


@pytest.fixture(scope="session")
def s3() -> Iterator[ObjectServer]:
    server = ObjectServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def quickstart_data(tmp_path_factory: pytest.TempPathFactory) -> QuickstartData:
    return make_quickstart_data(tmp_path_factory.mktemp("quickstart"))


@pytest.fixture(scope="session")
def runs(world8: World, quickstart_data: QuickstartData, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(world8, quickstart_data, tmp_path_factory.mktemp("runs"))
