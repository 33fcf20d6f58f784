"""A small profile recorded with this package, shown where nothing was measured yet."""

from __future__ import annotations

from pathlib import Path

from dlrm_workbook.recordings.profile import Profile

SAMPLE = Path(__file__).parent / "seed-cpu"


def sample_profile() -> Profile:
    """The recorded sample; ``meta["sample"]`` says of what machine and when."""
    return Profile.load(SAMPLE)
