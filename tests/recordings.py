"""Where the real recordings lie, which no file of is copied into the project."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dlrm_workbook.recordings.hpctoolkit.database import read_database
from dlrm_workbook.recordings.hpctoolkit.to_profile import profile_from_database
from dlrm_workbook.recordings.profile import Profile

RECORDINGS = Path(__file__).parents[2] / "shared" / "recordings"

TRACES = {
    "bert-small-h100": "traces/bert-small-h100.json.gz",
    "meta-dlrm-a100x8-rank3": "traces/meta-dlrm-a100x8-rank3.json.gz",
    "resnet50-v100-2021": "traces/resnet50-v100-2021.json.gz",
    "torchrec-cuda-graphs-a100x16-rank0": "traces/torchrec-cuda-graphs-a100x16-rank0.json.gz",
}

SEVERAL = "traces/torchrec-dlrm-v100x8.tar.gz"


def recording(name: str) -> Path:
    """A recording's path; the test is skipped where the recordings are not."""
    if not RECORDINGS.is_dir():
        pytest.skip(f"the real recordings are not here ({RECORDINGS})")
    return RECORDINGS / name


@cache
def database_profile(name: str) -> Profile:
    """The profile of a real HPCToolkit database; nobody changes it."""
    folder = RECORDINGS.parent / "hpctoolkit-databases" / f"{name}.d"
    if not folder.is_dir():
        pytest.skip(f"the real database {name}.d is not beside this checkout")
    return profile_from_database(read_database(folder))


def expected(name: str) -> Any:
    """The raw truth about a recording."""
    return json.loads((recording("expected") / f"{name}.json").read_text())
