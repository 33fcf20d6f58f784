"""Energy of a run: counters that come round, GPUs with and without one, and reasons."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_training import parameters

from dlrm_core.train import train
from dlrm_workbook.evidence import power
from dlrm_workbook.evidence.power import (
    MOST_WATTS,
    PowerMeter,
    gpu_counter,
    power_meter,
    rapl,
    rapl_counters,
    sampled,
)
from dlrm_workbook.evidence.training import MeteredRun

CPU = torch.device("cpu")


def zone(
    root: Path, place: str, name: str, energy_uj: int, range_uj: int = 262_143_328_850
) -> Path:
    folder = root / place
    folder.mkdir(parents=True)
    (folder / "name").write_text(name + "\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return folder


@pytest.fixture
def powercap(tmp_path, monkeypatch) -> Path:
    zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 1_000_000)
    zone(tmp_path, "intel-rapl:0:1", "dram", 2_000_000)
    zone(tmp_path, "intel-rapl:1", "psys", 9_000_000)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 5_000_000)
    monkeypatch.setattr(power, "POWERCAP", tmp_path)
    return tmp_path


def test_packages_and_their_memory_are_counted_once(powercap):
    names = [counter.device for counter in rapl_counters()]
    assert names == ["package-0", "dram of package-0"]


def test_energy_and_power_are_those_between_start_and_stop(powercap):
    meter = power_meter(CPU).start()
    time.sleep(0.05)
    (powercap / "intel-rapl:0" / "energy_uj").write_text("7500000")
    (powercap / "intel-rapl:0:1" / "energy_uj").write_text("2500000")
    figures = meter.stop(600)
    found = figures["power"]
    assert found["energy_j"] == pytest.approx(3.0)
    assert [reading["energy_j"] for reading in found["readings"]] == pytest.approx([2.5, 0.5])
    assert figures["power_w"] == pytest.approx(3.0 / found["seconds"])
    assert found["seconds"] >= 0.05
    assert figures["samples_per_joule"] == pytest.approx(200.0)
    assert found["not_measured"] == {}
    # samples a joule are samples a second and watt
    rate = 600 / found["seconds"]
    assert rate / figures["power_w"] == pytest.approx(figures["samples_per_joule"])


def test_a_counter_that_came_round_goes_on(tmp_path):
    folder = zone(tmp_path, "intel-rapl:0", "package-0", 900, range_uj=999)
    counter = rapl(folder, "package-0")
    (folder / "energy_uj").write_text("100")
    assert counter.energy_j() == pytest.approx(200e-6)
    (folder / "energy_uj").write_text("50")
    assert counter.energy_j() == pytest.approx(1150e-6)


def test_a_counter_is_read_before_it_can_come_round_twice(tmp_path, monkeypatch):
    # a range that 1000 W would fill in 20 ms: it is read every 10 ms
    folder = zone(tmp_path, "intel-rapl:0", "package-0", 0, range_uj=int(0.02 * MOST_WATTS * 1e6))
    read = threading.Event()
    counter = rapl(folder, "package-0")
    count = counter.energy_j

    def watched() -> float:
        energy_j = count()
        read.set()
        return energy_j

    monkeypatch.setattr(counter, "energy_j", watched)
    assert counter.period_s == pytest.approx(0.01)
    meter = PowerMeter([counter], {}).start()
    value, range_uj = 0, int(0.02 * MOST_WATTS * 1e6) + 1
    spent = 0
    for _ in range(6):
        value = (value + range_uj * 2 // 3) % range_uj
        spent += range_uj * 2 // 3
        part = folder / "new"
        part.write_text(str(value))
        part.replace(folder / "energy_uj")
        for _ in range(2):  # the first may have begun before that
            read.clear()
            assert read.wait(120), "nobody reads it"
    assert meter.stop(0)["power"]["energy_j"] == pytest.approx(spent / 1e6)


def test_without_counters_the_reason_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(power, "POWERCAP", tmp_path)
    figures = power_meter(CPU).start().stop(100)
    assert figures["power"]["energy_j"] is None
    assert figures["power_w"] is None and figures["samples_per_joule"] is None
    assert "no intel-rapl zone" in figures["power"]["not_measured"]["processor"]


def test_counters_for_root_only_are_said(powercap, monkeypatch):
    real = Path.read_text

    def read_text(path, *args, **kwargs):
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    reasons = power_meter(CPU).start().stop(0)["power"]["not_measured"]
    assert "root only" in reasons["processor"]


def test_a_counter_that_vanishes_is_no_zero(powercap):
    meter = power_meter(CPU).start()
    (powercap / "intel-rapl:0" / "energy_uj").unlink()
    found = meter.stop(0)["power"]
    assert [reading["device"] for reading in found["readings"]] == ["dram of package-0"]
    assert "package-0" in found["not_measured"]


class NvmlError(Exception):
    pass


class Nvml:
    """As much of pynvml as is called."""

    NVMLError = NvmlError

    def __init__(self, counts: bool) -> None:
        self.counts = counts
        self.energy_mj = 10_000
        self.power_mw = 300_000

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-1":
            raise NvmlError("Not Found")
        return "handle"

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA H100"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if not self.counts:
            raise NvmlError("Not Supported")
        return self.energy_mj

    def nvmlDeviceGetPowerUsage(self, handle):
        return self.power_mw


def counter_of(nvml: Nvml, uuid: str, monkeypatch: pytest.MonkeyPatch) -> power.Counter:
    """The counter of a GPU of this identity, as torch tells it."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    known = SimpleNamespace(uuid=uuid)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)
    return gpu_counter(torch.device("cuda:0"))


def test_a_gpu_counts_its_own_energy(monkeypatch):
    nvml = Nvml(counts=True)
    counter = counter_of(nvml, "1", monkeypatch)
    assert counter.method == "NVML energy counter" and counter.device == "gpu 0 (NVIDIA H100)"
    meter = PowerMeter([counter], {}).start()
    nvml.energy_mj += 45_000
    assert meter.stop(0)["power"]["energy_j"] == pytest.approx(45.0)


def test_an_old_gpus_power_is_sampled(monkeypatch):
    now = [5.0]
    monkeypatch.setattr(power, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    counter = counter_of(Nvml(counts=False), "1", monkeypatch)
    assert "NVML power, sampled" in counter.method and counter.period_s == power.SAMPLE_S
    meter = PowerMeter([counter], {}).start()
    now[0] = 7.0
    assert meter.stop(0)["power_w"] == pytest.approx(300.0)


def test_the_trapezoidal_rule_follows_a_change_of_power(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watts = [100_000]
    used_j = sampled(lambda: watts[0])
    now[0], watts[0] = 2.0, 300_000
    assert used_j() == pytest.approx(400.0)


def test_a_gpu_that_nvml_does_not_know_is_said(monkeypatch):
    with pytest.raises(OSError, match="NVML: Not Found"):
        counter_of(Nvml(True), "2", monkeypatch)


def test_a_run_says_its_power_or_why_not():
    result = train(parameters(batches=2), observer=MeteredRun(shown=False))
    if result.power_w is None:
        assert result.samples_per_joule is None
        assert result.power["not_measured"]
    else:
        assert result.power["energy_j"] > 0
