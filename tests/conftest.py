"""Settings of the whole test run."""

import os

# Two test processes that share two cores must not burn them in OpenMP's spin loops.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from pathlib import Path

import pytest
import torch
from fake_hpctoolkit import FakeHPCToolkit
from hypothesis import settings

from dlrm_core.profiling import hpctoolkit_process

# GPU kernels have CPU tests: Triton's interpreter must be chosen before triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

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
