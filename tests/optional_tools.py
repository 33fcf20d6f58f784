"""Marks of tests that need a package which is not everywhere."""

import importlib.util

import pytest
import torch

from dlrm_core.base.errors import MissingToolError
from dlrm_kernels.embeddings.fbgemm import load_fbgemm


def _fbgemm_absent() -> str:
    try:
        load_fbgemm(torch.device("cpu"))
    except MissingToolError as error:
        return str(error)
    return ""


ABSENT = _fbgemm_absent()
"""Why FBGEMM cannot be used; empty where it can."""

needs_fbgemm = pytest.mark.skipif(bool(ABSENT), reason=ABSENT or "is installed")

needs_torchrec = pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None,
    reason="TorchRec is not installed (make setup does it)",
)
