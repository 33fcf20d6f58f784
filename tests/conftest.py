"""Settings of the whole test run."""

import os

# Test processes that share two cores must not burn them in OpenMP's spin loops.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from browser import open_browser, require_browser
from fake_hpctoolkit import FakeHPCToolkit
from hypothesis import settings

from dlrm_workbook.cli import _without_grammars
from dlrm_workbook.ground import processes

with _without_grammars():
    import nbformat  # noqa: F401 (as `dlrm` does: a second less of every test process)

# GPU kernels have CPU tests: Triton's interpreter must be chosen before triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell's background jobs ignore Ctrl-C, and so would the processes that tests send it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadlines: the machines that run this are shared. Same examples every time.
settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")


REPOSITORY = Path(__file__).parents[1]

MEASURE = ("test_findings_program", "test_own_program", "test_trials")
"""Files that measure programs for long: one test process has them all, so that no two measure at
the same time."""

SLOW = (
    *("measure", "quick_chain", "test_workbook"),
    *("test_distributed", "test_attacks", "test_charts", "test_package", "test_wings"),
    *("test_capacity", "test_distributed_failures", "test_benchmark", "test_hpctoolkit_traps"),
    *("test_narrow_rows", "test_bench_embeddings", "test_whatif", "test_evaluation"),
    *("test_hpctoolkit", "test_sweep", "test_training", "test_embedding_backends"),
    *("test_foreign_traces", "test_facebook_losses", "test_gpu_embeddings", "test_datasets"),
    *("test_run_resume", "test_disk", "test_checkpoints", "test_scaling_page"),
    *("test_findings_gpu", "test_verdict_gpu", "test_compare_turns", "test_gpu_faults"),
    *("test_gpu_check", "test_embeddings", "test_schedules", "test_part_probes"),
    *("test_explore", "test_columns", "test_wukong"),
)
"""Groups of tests that take about 10 s or more of a processor, roughly the longest first."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one test process; all that share ``quick_chain``, and all that measure, to
    the same.

    The slowest go first: a long file that begins last keeps one process busy while the others
    have nothing left to do.

    pytest-xdist's marks for groups (``loadgroup``) change an attribute of tests that pytest 9
    does not read any more, so the groups are told from the files.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if Path(file).stem in MEASURE:
                return "measure"
            shared = "quick_chain"
            return shared if shared in (config.rootpath / file).read_text() else file

        def _assign_work_unit(self, node: Any) -> None:
            def rank(scope: str) -> int:
                name = Path(scope).stem
                return SLOW.index(name) if name in SLOW else len(SLOW)

            # of equal rank, the file with more tests comes first, as xdist has sorted them
            self.workqueue.move_to_end(min(self.workqueue, key=rank), last=False)
            super()._assign_work_unit(node)

    return ByFile(config, log)


class Chain(NamedTuple):
    """Where ``dlrm run all`` left its runs: the last one's folder, and the output root."""

    last: Path
    root: Path


@pytest.fixture(scope="session")
def quick_chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """``dlrm run all -f parameters/quick.yaml`` as one types it, once for all tests: a minute."""
    root = tmp_path_factory.mktemp("all") / "outputs"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "dlrm_workbook", "run", "all"),
            *("-f", str(REPOSITORY / "parameters" / "quick.yaml"), "--output-root", str(root)),
        ],
        cwd=root.parent,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return Chain(Path(done.stdout.splitlines()[-1]), root)


@pytest.fixture(scope="module")
def browser() -> Iterator[None]:
    """One browser for all pages of a file: each test opens them in contexts of its own."""
    require_browser()
    with open_browser():
        yield


@pytest.fixture(scope="session")
def small_data_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set, 3000 and 700 samples; who spoils it takes a copy."""
    from small_data_set import SMALL

    from dlrm_workbook.datasets.generate import generate

    folder = tmp_path_factory.mktemp("data") / "set"
    generate(SMALL, {"train": 3000, "test": 700}, folder, threads=2)
    return folder


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHPCToolkit:
    monkeypatch.delenv("HPCTOOLKIT_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    monkeypatch.setattr(processes, "POLL_S", 0.02)
    return FakeHPCToolkit(tmp_path / "hpctoolkit")
