"""GPUs by name and by what their driver calls them."""

import pytest

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis.devices import DEVICES, device, device_of, device_of_driver, name_device
from dlrm_workbook.analysis.roofline import Limits


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla V100-PCIE-16GB", "V100-PCIe"),
        ("Tesla V100-DGXS-32GB", "V100-32GB"),
        ("NVIDIA A100-PG509-200", "A100-40GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA H800", "H800"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI250X", "MI250X"),
    ],
)
def test_a_driver_name_has_one_device(driver, name):
    found = device_of_driver(driver)
    assert found is not None and found.name == name


def test_unknown_names_are_refused_with_a_hint():
    assert device_of_driver("NVIDIA GeForce GTX 1050") is None
    assert device("a100-80gb").memory_gb == 80
    with pytest.raises(InputError, match=r"'H10-SXM' is not listed; did you mean H100-SXM\?"):
        device("H10-SXM")


def test_rates_are_dense_and_sourced():
    known = {gpu.name: gpu for gpu in DEVICES}
    assert all(gpu.source.startswith("https://") for gpu in DEVICES)
    assert all(("amd.com" in gpu.source) == gpu.name.startswith("MI") for gpu in DEVICES)
    assert all(gpu.units and gpu.achieved.keys() <= gpu.tflops.keys() for gpu in DEVICES)
    # NVIDIA prints 989 (TF32) and 1979 (bf16) TFLOPS for H100 SXM, with sparsity
    assert known["H100-SXM"].tflops["tf32"] == 494.5
    assert known["H100-SXM"].tflops["bf16"] == 989.5
    assert known["A100-40GB"].memory_gb_per_s == 1555
    for gpu in DEVICES:
        assert ("bf16" in gpu.tflops) != gpu.name.startswith(("V100", "T4", "P100", "RTX-2080"))


@pytest.mark.parametrize("known", DEVICES, ids=lambda known: known.name)
def test_a_data_sheet_serves_as_ceilings_and_says_so(known):
    limits = Limits(known.ceilings())
    assert not limits.measured
    assert limits.peak_gflops(["fp32"]) == 1e3 * known.tflops["fp32"]
    assert limits.memory_ms(known.memory_gb_per_s * 1e9, 0) == pytest.approx(1e3)
    assert limits.copy_ms(known.link_gb_per_s * 1e9) == pytest.approx(1e3)
    assert limits.gather_ms(1.0, 256.0, 1e6) is None
    assert limits.overhead_ms(on_gpu=True) is None
    shape = (1, 1000, 1000, 500)
    name = "fp16" if "fp16" in known.tflops else "fp32"  # a P100 has no tensor cores
    ms, timed = limits.gemm_ms("top_mlp", "forward", 0, shape, [name])
    assert ms == pytest.approx(1e9 / (1e12 * known.tflops[name]) * 1e3) and not timed
    assert (limits.gemm_ms("top_mlp", "forward", 0, shape, ["bf16"]) is None) == (
        "bf16" not in known.tflops
    )


def test_a_recording_that_names_no_gpu_can_be_told_which_it_is():
    for name, short in (("NVIDIA H100 80GB HBM3", "H100-SXM"), ("h100-sxm", "H100-SXM")):
        meta = {"cautions": ["another"]}
        name_device(meta, name)
        assert device_of(meta).name == short
        assert meta["cautions"][0] == "another" and "whoever opened it" in meta["cautions"][1]


def test_a_gpu_that_nobody_lists_or_that_contradicts_the_recording_is_refused():
    with pytest.raises(InputError, match=r"profiling.device_name: device 'H1000' .*known: .*T4"):
        name_device({}, "H1000")
    meta = {"device_name": "Tesla V100-SXM2-16GB"}
    with pytest.raises(InputError, match="names its own device, 'Tesla V100-SXM2-16GB'"):
        name_device(meta, "H100-SXM")
    assert meta == {"device_name": "Tesla V100-SXM2-16GB"}


def test_every_short_name_is_a_name_of_its_own_gpu():
    for known in DEVICES:
        assert device_of({"device_name": known.name}) is known
