"""Settings of the whole test run."""

import os

# Two test processes that share two cores must not burn them in OpenMP's spin loops.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from pathlib import Path

import pytest
from fake_hpctoolkit import FakeHPCToolkit
from hypothesis import settings

from dlrm_core.profiling import hpctoolkit_process

# No deadlines: the machines that run this are shared. Same examples every time.
settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHPCToolkit:
    monkeypatch.delenv("HPCTOOLKIT_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hpctoolkit_process, "GRACE_S", 0.5)
    monkeypatch.setattr(hpctoolkit_process, "POLL_S", 0.02)
    return FakeHPCToolkit(tmp_path / "hpctoolkit")
