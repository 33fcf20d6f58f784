"""Where the real recordings lie, which no file of is copied into the project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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


def expected(name: str) -> Any:
    """The raw truth about a recording."""
    return json.loads((recording("expected") / f"{name}.json").read_text())
