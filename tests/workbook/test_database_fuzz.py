"""A seeded part of ``python -m tests.fuzz_database --count 20000``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_damaged_databases_give_database_errors_only() -> None:
    # A process of its own: the run limits its address space.
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz_database", "--count", "600", "--seed", "7"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failures" in done.stdout
