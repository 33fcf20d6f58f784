"""What every test of the kernels leaves as it was."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
