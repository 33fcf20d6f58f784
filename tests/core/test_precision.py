"""What is said about a precision that a machine lacks."""

import pytest
import torch

from dlrm_core import precision as module
from dlrm_core.base.machine import cpu_flags
from dlrm_core.config import Parameters, TrainingConfig
from dlrm_core.precision import CPU_FLAGS, DensePrecision
from dlrm_kernels import products
from dlrm_kernels.products import set_fp32_matmul, set_tf32

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_emulation_on_a_cpu_is_announced(name, monkeypatch):
    config = TrainingConfig(precision=name)
    monkeypatch.setattr(module, "cpu_flags", lambda: {"sse2", CPU_FLAGS[name][0]})
    assert DensePrecision(config, CPU).notices == []
    monkeypatch.setattr(module, "cpu_flags", lambda: {"sse2", "avx2"})
    (notice,) = DensePrecision(config, CPU).notices
    assert "emulated" in notice and CPU_FLAGS[name][0] in notice
    # where the system does not say, nothing is claimed
    monkeypatch.setattr(module, "cpu_flags", set)
    assert DensePrecision(config, CPU).notices == []


def test_an_old_gpu_is_announced(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    gpu = torch.device("cuda")
    (notice,) = DensePrecision(TrainingConfig(precision="bf16"), gpu).notices
    assert "7.5" in notice and "8.0" in notice
    assert DensePrecision(TrainingConfig(precision="fp16"), gpu).notices == []
    (notice,) = set_tf32(True, gpu)
    assert "7.5" in notice
    assert set_tf32(False, gpu) == [] and not torch.backends.cuda.matmul.allow_tf32


def test_settings_of_fp32_products_are_idle_in_bf16(monkeypatch):
    monkeypatch.setattr(module, "cpu_flags", set)
    config = TrainingConfig(precision="bf16", fp32_matmul="onednn", tf32=True)
    notices = DensePrecision(config, CPU).notices
    assert [notice.split(":")[0] for notice in notices] == ["training.fp32_matmul", "training.tf32"]


def test_flags_are_those_of_the_kernel():
    flags = cpu_flags()
    assert flags == set() or {"fpu", "fp"} & flags


def test_a_cpu_that_rounds_large_products_only_is_found_out(monkeypatch):
    """Small layers may be computed exactly where larger ones are rounded."""
    monkeypatch.setattr(products, "_relative_error", lambda n, m: 1e-7 if n < 512 else 2e-3)
    model = Parameters().model.__class__(
        bottom_mlp=(8, 4), embedding_dim=4, top_mlp=(8, 1), table_rows=(3,), tables=1
    )
    (notice,) = set_fp32_matmul("onednn", model, CPU)
    assert "2.0e-03" in notice


def test_gradients_are_divided_by_the_scale_or_the_step_is_skipped():
    precision = DensePrecision(TrainingConfig(precision="fp16", loss_scale=1024.0), CPU)
    gradients = [torch.tensor([1024.0, -2048.0]), torch.tensor([[512.0]])]
    assert not precision.skips(precision.overflowed(gradients)) and precision.skipped == 0
    precision.unscale(gradients)
    assert [g.flatten().tolist() for g in gradients] == [[1.0, -2.0], [0.5]]
    for bad in (float("inf"), float("-inf"), float("nan")):
        assert precision.skips(
            precision.overflowed([torch.tensor([1.0]), torch.tensor([0.0, bad])])
        )
    assert precision.skipped == 3
    (notice,) = precision.skipped_notice(10)
    assert "3 of 10 steps" in notice and "65504" in notice


def test_a_scale_that_never_skips_takes_every_step():
    config = TrainingConfig(precision="fp16", loss_scale=1024.0, skip_overflow=False)
    precision = DensePrecision(config, CPU)
    assert not precision.skips(torch.tensor(True)) and precision.skipped_notice(10) == []
