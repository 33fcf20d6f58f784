"""The HPCToolkit driver against recorded behaviour, and against the real one where it is."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_hpctoolkit import FakeHPCToolkit
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.config import ProfilingConfig
from dlrm_core.errors import InputError, MissingToolError
from dlrm_core.profiling import hpctoolkit_process
from dlrm_core.profiling.hpctoolkit import (
    Capabilities,
    HPCToolkitSettings,
    Measurement,
    MeasurementError,
    Progress,
    find_tools,
    measure,
    plan_passes,
    probe,
)
from dlrm_core.profiling.hpctoolkit_database import oversized_binaries
from dlrm_core.profiling.hpctoolkit_logical import (
    MAGIC,
    STAND_IN,
    _mend,
    name_unnamed_modules,
)
from dlrm_core.profiling.hpctoolkit_passes import ALLOCATOR, Pass, make_safe
from dlrm_core.profiling.hpctoolkit_process import fresh_path, run_stage
from dlrm_core.profiling.hpctoolkit_tools import SPACK, parse_events, torch_cuda_version

REAL = shutil.which("hpcrun") or os.environ.get("HPCTOOLKIT_HOME")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHPCToolkit:
    monkeypatch.delenv("HPCTOOLKIT_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hpctoolkit_process, "GRACE_S", 0.5)
    monkeypatch.setattr(hpctoolkit_process, "POLL_S", 0.02)
    return FakeHPCToolkit(tmp_path / "hpctoolkit")


def run(fake: FakeHPCToolkit, *workload: str, device: str = "cpu", **settings) -> Measurement:
    """Measure the fake workload into a fresh folder beside the tools."""
    tools = find_tools(str(fake.home))
    return measure(
        fake.workload(*workload),
        fake.home.parent / "run",
        device=device,
        settings=HPCToolkitSettings(**settings),
        tools=tools,
        capabilities=capabilities(fake),
    )


def capabilities(fake: FakeHPCToolkit, cuda_version: str = "12.4") -> Capabilities:
    return probe(
        find_tools(str(fake.home)),
        nvidia_smi=str(fake.bin / "nvidia-smi"),
        driver_parameters=fake.home / "params",
        cuda_version=cuda_version,
    )


# --- finding and probing --------------------------------------------------------------


def test_missing_tools_name_the_spack_command(tmp_path, monkeypatch):
    monkeypatch.delenv("HPCTOOLKIT_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingToolError, match="hpcrun was not found on PATH") as error:
        find_tools()
    assert SPACK in str(error.value)
    assert SPACK == "spack install hpctoolkit +cuda +python"
    assert "\n" not in str(error.value)


def test_a_wrong_home_is_named_even_if_path_has_the_tools(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    with pytest.raises(MissingToolError, match="nowhere"):
        find_tools(str(tmp_path / "nowhere"))
    monkeypatch.setenv("HPCTOOLKIT_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(MissingToolError, match="elsewhere"):
        find_tools()


@pytest.mark.parametrize("where", ["PATH", "HPCTOOLKIT_HOME", "home", "home/bin"])
def test_finds_the_tools_and_reads_what_they_offer(fake, monkeypatch, where):
    home = None
    if where == "PATH":
        monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    elif where == "HPCTOOLKIT_HOME":
        monkeypatch.setenv("HPCTOOLKIT_HOME", str(fake.home))
    else:
        home = str(fake.home if where == "home" else fake.bin)
    tools = find_tools(home)
    assert tools.hpcrun == fake.bin / "hpcrun"
    assert tools.hpcstruct == fake.bin / "hpcstruct"
    assert tools.version == "2024.01.99-next"
    assert tools.cuda == "12.4"
    assert {"CPUTIME", "gpu=nvidia", "gpu=nvidia,pc"} <= tools.events
    assert tools.python_frames
    assert tools.no_source == "--no-source"


def test_tools_that_do_not_run(fake):
    fake.behave(version_exit=1)
    with pytest.raises(MissingToolError, match=r"hpcrun -V fails with exit code 1"):
        find_tools(str(fake.home))
    (fake.bin / "hpcrun").write_bytes(b"\x7fELF of another machine")
    with pytest.raises(MissingToolError, match="does not run here"):
        find_tools(str(fake.home))


def test_without_hpcstruct_or_python_the_rest_still_works(fake):
    (fake.bin / "hpcstruct").unlink()
    fake.behave(python=False, prof_help="no such option")
    found = capabilities(fake)
    assert "-a python" in found.not_measured["Python frames"]
    assert "hpcstruct" in found.not_measured["loops and inlined functions"]
    measured = run(fake)
    assert measured.passes[0].database.is_dir()
    assert not measured.passes[0].python_frames
    assert "--no-source" not in fake.calls("hpcprof")[0]["arguments"]


def test_events_are_the_first_words_of_the_listing():
    listing = (
        "=====\nAvailable Timer events\n----\nCPUTIME  \ttext\n\t\tmore gpu=nvidia\n\ngpu=cuda,pc\n"
    )
    assert parse_events(listing) == {"Available", "CPUTIME", "gpu=cuda,pc"}
    assert parse_events("") == frozenset()


def test_probe_of_a_machine_with_everything(fake):
    found = capabilities(fake)
    assert (found.gpu, found.gpu_event, found.pc_event) == (
        "NVIDIA H200", "gpu=nvidia", "gpu=nvidia,pc",
    )  # fmt: skip
    assert found.not_measured == {}


def test_newer_spelling_of_the_gpu_events(fake):
    fake.behave(events=["CPUTIME", "gpu=cuda", "gpu=cuda,pc"])
    found = capabilities(fake, cuda_version="13.0")
    # a release that says gpu=cuda may well sample with CUDA 13
    assert (found.gpu_event, found.pc_event) == ("gpu=cuda", "gpu=cuda,pc")


def test_probe_says_why_there_is_no_gpu(fake):
    fake.behave(gpus=[])
    assert "nvidia-smi finds none" in capabilities(fake).not_measured["GPU times"]
    (fake.bin / "nvidia-smi").unlink()
    found = capabilities(fake)
    assert "nvidia-smi is not installed" in found.not_measured["GPU times"]
    assert found.not_measured["stall reasons"] == found.not_measured["GPU times"]


def test_probe_of_an_hpctoolkit_without_cuda(fake):
    fake.behave(events=["CPUTIME"], cuda="")
    found = capabilities(fake)
    assert found.gpu == "NVIDIA H200" and found.gpu_event is None
    assert "built without CUDA" in found.not_measured["GPU times"]


@pytest.mark.parametrize("torch, built", [("13.0", "12.4"), ("12.8", "13.0")])
def test_cuda_13_has_no_pc_sampling(fake, torch, built):
    fake.behave(cuda=built)
    found = capabilities(fake, cuda_version=torch)
    assert found.gpu_event == "gpu=nvidia" and found.pc_event is None
    assert "CUDA 13.0" in found.not_measured["stall reasons"]
    assert "GPU times" not in found.not_measured


def test_pc_sampling_needs_root_or_the_driver_option(fake, monkeypatch):
    (fake.home / "params").write_text("RmLogonRC: 1\nRmProfilingAdminOnly: 1\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "RestrictProfilingToAdminUsers=0" in capabilities(fake).not_measured["stall reasons"]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert capabilities(fake).pc_event == "gpu=nvidia,pc"


def test_old_release_with_a_new_c_library_gets_a_notice(fake, monkeypatch):
    fake.behave(version="2022.10.01")
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    assert "glibc 2.36" in capabilities(fake).notices[0]
    fake.behave(version="2023.08.1")
    assert capabilities(fake).notices == ()


def test_cuda_version_of_torch_is_read_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemError('imported')")
    (package / "version.py").write_text("debug = False\ncuda: Optional[str] = '13.0'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert torch_cuda_version() == "13.0"
    (package / "version.py").write_text("cuda: Optional[str] = None\n")
    assert torch_cuda_version() == ""


# --- planning -------------------------------------------------------------------------


def test_passes_by_device():
    gpu = Capabilities("H200", "gpu=nvidia", "gpu=nvidia,pc", python_frames=True)
    assert plan_passes(gpu, "cpu") == [
        Pass("times", ("CPUTIME",), True, False),
        Pass("frames", ("CPUTIME",), False, True),
    ]
    assert plan_passes(gpu, "cuda") == [
        Pass("times", ("CPUTIME", "gpu=nvidia"), True, True),
        Pass("stalls", ("gpu=nvidia,pc",), False, True),
    ]
    assert [p.name for p in plan_passes(gpu, "cuda", pc_sampling=False)] == ["times"]
    assert [p.name for p in plan_passes(gpu, "cpu", python=False)] == ["times"]
    assert not plan_passes(gpu, "cuda", python=False)[0].python
    blind = Capabilities("H200", None, None, python_frames=True)
    assert plan_passes(blind, "cuda") == [Pass("times", ("CPUTIME",), True, True)]
    none = Capabilities(None, None, None, python_frames=False)
    assert plan_passes(none, "cpu") == [Pass("times", ("CPUTIME",), True, False)]
    assert plan_passes(none, "cuda") == [Pass("times", ("CPUTIME",), True, False)]
    with pytest.raises(InputError, match="'tpu'"):
        plan_passes(gpu, "tpu")


def test_settings_come_from_the_parameters_file():
    config = ProfilingConfig(python_frames=False, structure_limit_mb=5, timeout_s=7)
    settings = HPCToolkitSettings.from_config(config)
    assert (settings.python_frames, settings.structure_limit_mb, settings.timeout_s) == (
        False, 5, 7.0,
    )  # fmt: skip


# --- measuring ------------------------------------------------------------------------


def test_measures_on_the_cpu(fake):
    fake.behave(slower=1.1)
    measured = run(fake)
    times, frames = measured.passes
    assert times.dilation == frames.dilation == pytest.approx(1.1)
    assert times.part_dilation == {"data": pytest.approx(1.1)}
    assert times.ms_per_iteration == pytest.approx(11.0)
    assert measured.unprofiled["ms_per_iteration"] == 10.0
    assert times.result["ms_per_iteration"] == times.ms_per_iteration
    assert times.exit_code == 0 and not times.python_frames and frames.python_frames
    assert times.database.is_absolute() and (times.database / "meta.db").is_file()
    assert measured.database() == times.database and measured.database("stalls") is None
    first, second = fake.calls("hpcrun")
    assert first["events"] == ["CPUTIME"] and first["trace"] and not first["python"]
    assert second["events"] == ["CPUTIME"] and not second["trace"] and second["python"]
    assert measured.database("frames") == frames.database != times.database
    assert "--no-source" in fake.calls("hpcprof")[0]["arguments"]
    assert "computes on the CPU" in measured.not_measured["GPU times"]
    assert "computes on the CPU" in measured.not_measured["stall reasons"]
    assert "ms_per_iteration" in (measured.logs / "times-hpcrun.out").read_text()
    assert json.loads(json.dumps(measured.to_dict()))["passes"][0]["database"] == str(
        times.database
    )


def test_both_sides_of_the_dilation_have_one_allocator(fake, monkeypatch):
    monkeypatch.setenv("PYTHONMALLOC", "debug")
    measured = run(fake)
    expected = {**ALLOCATOR, "PYTHONMALLOC": None}
    assert measured.unprofiled["environment"] == expected
    log = (measured.logs / "times-hpcrun.out").read_text().splitlines()[-1]
    assert json.loads(log)["environment"] == expected
    assert any("PYTHONMALLOC was removed" in notice for notice in measured.notices)


def test_measures_twice_on_a_gpu(fake):
    measured = run(fake, device="cuda")
    assert [p.name for p in measured.passes] == ["times", "stalls"]
    times, stalls = fake.calls("hpcrun")
    assert (times["events"], times["trace"]) == (["CPUTIME", "gpu=nvidia"], True)
    assert (stalls["events"], stalls["trace"]) == (["gpu=nvidia,pc"], False)
    assert measured.not_measured == {}


def test_existing_outputs_are_left_alone(fake):
    first = run(fake)
    second = run(fake)
    assert first.passes[0].database.name == "times.database"
    assert second.passes[0].database.name == "times-2.database"
    assert second.passes[0].measurements.name == "times-2.measurements"
    assert len(list(first.passes[0].measurements.glob("*.hpcrun"))) == 1


def test_a_slowed_pass_is_pointed_out(fake):
    fake.behave(slower=4.0)
    times, frames = run(fake).passes
    assert any("4.00x" in notice and "Python" not in notice for notice in times.notices)
    assert any("4.00x" in notice and "Python frames" in notice for notice in frames.notices)
    # advice for the pass whose times are read, not for the one that only names callers
    advice = "profiling.python_frames: false"
    assert not any(advice in notice for notice in times.notices + frames.notices)
    (times,) = run(fake, device="cuda", pc_sampling=False).passes
    assert any("4.00x" in notice and advice in notice for notice in times.notices)


def test_dropped_samples_are_counted_and_pointed_out(fake):
    assert run(fake).passes[0].lost_samples == 0
    fake.behave(lost=61)
    measured = run(fake)
    assert measured.passes[0].lost_samples == pytest.approx(0.61)
    assert "dropped 61% of its samples" in measured.passes[0].notices[-1]
    assert "Python calls" in measured.passes[1].notices[-1]
    # the times that are shown come from the pass without Python frames
    assert "Python calls" not in measured.not_measured["all CPU time"]
    measured = run(fake, device="cuda", pc_sampling=False)
    assert "Python calls" in measured.not_measured["all CPU time"]


def test_a_program_without_figures_has_no_dilation(fake):
    measured = run(fake, "silent")
    # the last interval line still counts as a figure
    assert measured.passes[0].dilation == pytest.approx(1.0)
    tools = find_tools(str(fake.home))
    mute = measure(["/bin/true"], fake.home.parent / "mute", tools=tools)
    assert mute.passes[0].dilation is None
    assert any("dilation is unknown" in notice for notice in mute.notices)


def test_progress_tells_stage_time_and_iteration(fake):
    seen: list[Progress] = []
    fake.behave(modules=["/lib/libone.so"], struct_sleep=0.3)
    measure(
        fake.workload(), fake.home.parent / "run", tools=find_tools(str(fake.home)),
        progress=seen.append,
    )  # fmt: skip
    assert list(dict.fromkeys(p.stage for p in seen)) == [
        "unprofiled", "times: hpcrun", "times: hpcstruct", "times: hpcprof",
        "frames: hpcrun", "frames: hpcstruct", "frames: hpcprof",
    ]  # fmt: skip
    assert any(p.stage == "times: hpcrun" and p.iteration == 2 for p in seen)
    assert any(p.detail == "libone.so" for p in seen)
    assert all(p.elapsed_s >= 0 for p in seen)


# --- traps ----------------------------------------------------------------------------


def test_exit_0_without_data(fake):
    fake.behave(unmeasured=True)
    with pytest.raises(MeasurementError, match="nothing was measured"):
        run(fake)


def test_a_program_that_fails_by_itself(fake):
    with pytest.raises(MeasurementError, match=r"exit code 3: ValueError: a fault of its own"):
        run(fake, "fails")
    assert fake.calls("hpcrun") == []


def test_a_program_that_is_not_there(fake, tmp_path):
    with pytest.raises(MeasurementError, match="cannot be started: No such file"):
        measure([str(tmp_path / "none")], tmp_path / "run", tools=find_tools(str(fake.home)))
    with pytest.raises(InputError, match="empty"):
        measure([], tmp_path / "run", tools=find_tools(str(fake.home)))


@pytest.mark.parametrize("code", [3, 134, 137, 139, 143])
def test_a_program_that_only_fails_under_hpcrun(fake, code):
    fake.behave(under_hpcrun_fails=code)
    with pytest.raises(MeasurementError, match=f"exit code {code} under hpcrun"):
        run(fake)
    with pytest.raises(MeasurementError, match=f"exit code {code} under hpcrun"):
        run(fake, device="cuda")
    assert [call["python"] for call in fake.calls("hpcrun")] == [False, True, False]


def test_a_program_that_fails_with_python_frames_is_measured_without(fake):
    fake.behave(python_fails=134)
    measured = run(fake)
    assert [p.name for p in measured.passes] == ["times"]
    assert measured.database("frames") is None
    assert not any("Python" in notice for notice in measured.passes[0].notices)
    assert "exit code 134" in measured.not_measured["Python frames"]
    assert "pass frames" in measured.not_measured["Python frames"]
    assert [call["python"] for call in fake.calls("hpcrun")] == [False, True]
    measured = run(fake, device="cuda", pc_sampling=False)
    assert not measured.passes[0].python_frames
    assert "exit code 134" in measured.not_measured["Python frames"]
    assert any("without Python frames" in notice for notice in measured.passes[0].notices)


def test_a_program_that_fails_after_its_work_keeps_its_data(fake):
    fake.behave(fails_at_the_end=139)
    measured = run(fake)
    assert [p.name for p in measured.passes] == ["times", "frames"]
    for made in measured.passes:
        assert made.exit_code == 139
        assert any("exit code 139" in notice for notice in made.notices)


def test_python_frames_that_were_not_recorded_are_not_claimed(fake):
    fake.behave(logical=False)
    measured = run(fake)
    assert [p.name for p in measured.passes] == ["times"]
    assert "another Python version" in measured.not_measured["Python frames"]
    # nothing is made of a pass that would be the one for times once more
    assert len(fake.calls("hpcrun")) == 2 and len(fake.calls("hpcprof")) == 1
    measured = run(fake, device="cuda", pc_sampling=False)
    assert not measured.passes[0].python_frames
    assert "another Python version" in measured.not_measured["Python frames"]


def test_no_usable_gpu(fake):
    fake.behave(no_gpu=True)
    measured = run(fake, device="cuda")
    assert [p.name for p in measured.passes] == ["times"]
    assert measured.passes[0].events == ("CPUTIME",)
    assert "before the program ran" in measured.not_measured["GPU times"]
    assert "CUPTI result error" in measured.not_measured["GPU times"]
    assert "before the program ran" in measured.not_measured["stall reasons"]


def test_pc_sampling_that_fails_costs_only_the_stalls(fake):
    fake.behave(refuses=["gpu=nvidia,pc"])
    measured = run(fake, device="cuda")
    assert [p.name for p in measured.passes] == ["times"]
    assert measured.passes[0].events == ("CPUTIME", "gpu=nvidia")
    assert "exit code 1" in measured.not_measured["stall reasons"]


def test_an_event_that_is_listed_but_refused_is_spelled_the_other_way(fake):
    fake.behave(accepts=["CPUTIME", "gpu=cuda", "gpu=cuda,pc"])
    measured = run(fake, device="cuda")
    assert measured.passes[0].events == ("CPUTIME", "gpu=cuda")
    assert measured.passes[1].events == ("gpu=cuda,pc",)
    assert any("gpu=nvidia is unknown" in notice for notice in measured.passes[0].notices)


def test_an_event_that_no_spelling_saves(fake):
    fake.behave(accepts=["CPUTIME"])
    measured = run(fake, device="cuda")
    assert measured.passes[0].events == ("CPUTIME",)
    assert "unknown or unsupported" in measured.not_measured["GPU times"]
    fake.behave(accepts=[])
    with pytest.raises(MeasurementError, match="CPUTIME is unknown or unsupported"):
        run(fake)


def test_a_folder_that_hpcrun_cannot_make(fake):
    fake.behave(uncreatable=True)
    with pytest.raises(MeasurementError, match="could not create"):
        run(fake)


def test_hpcprof_aborts_once_and_the_program_is_measured_again(fake):
    fake.behave(bad_logical=1)
    measured = run(fake, device="cuda", pc_sampling=False)
    assert len(fake.calls("hpcrun")) == 2
    assert measured.passes[0].python_frames
    assert measured.passes[0].measurements.name == "times-2.measurements"
    (notice,) = [n for n in measured.passes[0].notices if "once more" in n]
    assert "Invalid logical stanza" in notice and "exit code 134" in notice


def test_hpcprof_aborts_twice_and_python_frames_are_given_up(fake):
    fake.behave(bad_logical=9)
    measured = run(fake, device="cuda", pc_sampling=False)
    assert [call["python"] for call in fake.calls("hpcrun")] == [True, True, False]
    assert not measured.passes[0].python_frames
    assert "aborts" in measured.not_measured["Python frames"]
    assert measured.passes[0].database.is_dir()


def test_on_the_cpu_only_the_pass_for_frames_is_measured_again(fake):
    fake.behave(bad_logical=1)
    measured = run(fake)
    assert [call["python"] for call in fake.calls("hpcrun")] == [False, True, True]
    times, frames = measured.passes
    assert frames.python_frames and not any("once more" in n for n in times.notices)
    assert frames.measurements.name == "frames-2.measurements"
    (notice,) = [n for n in frames.notices if "once more" in n]
    assert "Invalid logical stanza" in notice and "exit code 134" in notice
    assert "Python frames" not in measured.not_measured


def test_on_the_cpu_an_abort_costs_only_the_python_frames(fake):
    fake.behave(bad_logical=9)
    measured = run(fake)
    assert [call["python"] for call in fake.calls("hpcrun")] == [False, True, True]
    (times,) = measured.passes
    assert times.database.is_dir() and not any("Python" in n for n in times.notices)
    reason = measured.not_measured["Python frames"]
    assert "given up after measuring twice" in reason and "Invalid logical stanza" in reason


def test_a_second_abort_of_another_kind_says_so_too(fake):
    fake.behave(bad_logical=1, python_prof_exit=2)
    measured = run(fake)
    assert [p.name for p in measured.passes] == ["times"]
    reason = measured.not_measured["Python frames"]
    assert "given up after measuring twice" in reason and "exit code 2" in reason


def test_a_database_of_frames_that_cannot_be_made_costs_only_the_frames(fake):
    fake.behave(python_prof_exit=2)
    measured = run(fake)
    assert [p.name for p in measured.passes] == ["times"]
    assert "these frames are too much" in measured.not_measured["Python frames"]
    assert len(fake.calls("hpcrun")) == 2
    with pytest.raises(MeasurementError, match="these frames are too much"):
        run(fake, device="cuda")


def test_frames_that_take_too_long_cost_only_the_frames(fake):
    fake.behave(python_hangs=True)
    measured = run(fake, timeout_s=2.0)
    assert [p.name for p in measured.passes] == ["times"]
    assert "(pass frames) was still running" in measured.not_measured["Python frames"]
    assert processes_naming(str(fake.bin)) == []


def stanza(number: int, function: bytes, file: bytes, line: int = 1) -> bytes:
    """One record of a Python function as hpcrun writes it."""
    return (
        struct.pack(">II", number, len(function)) + function + b"\0"
        + struct.pack(">I", len(file)) + file + struct.pack(">I", line)
    )  # fmt: skip


def test_a_nameless_module_is_named_before_hpcprof_aborts_on_it(fake):
    data = MAGIC + stanza(1, b"main", b"/a.py") + stanza(2, b"", b"") + stanza(3, b"", b"/b.py")
    fake.behave(stanzas=data.hex())
    measured = run(fake)
    times, frames = measured.passes
    assert len(fake.calls("hpcrun")) == 2 and frames.python_frames
    assert any("1 Python module(s) without a name" in notice for notice in frames.notices)
    assert not any("Python module" in notice for notice in times.notices)
    mended = (frames.measurements / "logical" / "python.1").read_bytes()
    assert mended == data.replace(stanza(2, b"", b""), stanza(2, STAND_IN, b""))


@given(
    st.lists(
        st.tuples(
            st.integers(1, 2**32 - 1), st.binary(max_size=9), st.binary(max_size=9),
            st.integers(0, 2**32 - 1),
        )
    ),
    st.integers(1, 12),
)  # fmt: skip
def test_only_nameless_modules_are_named(records, cut):
    data = MAGIC + b"".join(stanza(*record) for record in records)
    mended, count = _mend(data)
    nameless = [not function and not file for _, function, file, _ in records]
    assert count == sum(nameless)
    assert mended == MAGIC + b"".join(
        stanza(number, STAND_IN if unnamed else function, file, line)
        for (number, function, file, line), unnamed in zip(records, nameless, strict=True)
    )
    if records:
        with pytest.raises(struct.error):
            _mend(data[:-cut])


def test_records_that_are_not_understood_stay_as_they_are(tmp_path):
    folder = tmp_path / "logical"
    folder.mkdir()
    for number, data in enumerate((b"", b"something else", MAGIC + stanza(1, b"", b"")[:-2])):
        (folder / f"python.{number}").write_bytes(data)
    assert name_unnamed_modules(tmp_path) == 0
    assert (folder / "python.2").read_bytes() == MAGIC + stanza(1, b"", b"")[:-2]


def test_hpcprof_aborts_without_python_frames(fake):
    fake.behave(prof_aborts=True)
    with pytest.raises(MeasurementError, match="hpcprof aborts"):
        run(fake, python_frames=False)
    assert len(fake.calls("hpcrun")) == 1


def test_hpcprof_names_another_folder(fake):
    fake.behave(prof_race=True)
    measured = run(fake)
    assert measured.passes[0].database.name == "times.database-0badcafe"
    assert any("existed" in notice for notice in measured.passes[0].notices)


@pytest.mark.parametrize(
    "behaviour, message",
    [({"prof_nothing": True}, "wrote no database"), ({"prof_exit": 2}, "exit code 2")],
)
def test_hpcprof_without_a_database(fake, behaviour, message):
    fake.behave(**behaviour)
    with pytest.raises(MeasurementError, match=message):
        run(fake)


def huge_library(folder: Path, name: str, size: int) -> str:
    path = folder / name
    with path.open("wb") as file:
        file.write(b"\x7fELF")
        file.truncate(size)
    return str(path)


def test_hpcstruct_skips_huge_libraries(fake, tmp_path):
    huge = huge_library(tmp_path, "libtorch_cpu.so", 70_000_000)
    small = huge_library(tmp_path, "libc10.so", 1000)
    fake.behave(modules=[huge, small, "/no/such/lib.so"])
    measured = run(fake)
    # in both passes
    assert fake.calls("struct-skipped") == [{"name": "libtorch_cpu.so.hpcstruct"}] * 2
    # the empty stand-in is gone when hpcprof looks
    structs = [call["structs"] for call in fake.calls("hpcprof")]
    assert structs == [["lib.so.hpcstruct", "libc10.so.hpcstruct"]] * 2
    for made in measured.passes:
        (notice,) = made.notices
        assert "libtorch_cpu.so (70 MB, limit 64 MB)" in notice
    found = oversized_binaries(measured.passes[0].measurements, 10)
    assert [path.name for path in found] == ["libc10.so", "libtorch_cpu.so"]


@pytest.mark.parametrize(
    "behaviour, message",
    [({"struct_exit": 1}, "exit code 1"), ({"struct_nothing": True}, "wrote nothing")],
)
def test_hpcstruct_may_fail(fake, behaviour, message):
    fake.behave(modules=["/lib/one.so"], **behaviour)
    measured = run(fake)
    assert any(message in notice for notice in measured.passes[0].notices)
    assert measured.passes[0].database.is_dir()


def test_hpcstruct_may_take_too_long(fake):
    fake.behave(modules=["/lib/one.so", "/lib/two.so"], struct_sleep=60)
    measured = run(fake, structure_timeout_s=0.5)
    assert any("ended after" in notice for notice in measured.passes[0].notices)
    # what it left half written is not given to hpcprof
    assert fake.calls("hpcprof")[0]["structs"] == []


def test_passes_share_what_hpcstruct_found(fake, tmp_path):
    fake.behave(modules=["/lib/one.so"])
    run(fake)
    caches = [c["arguments"][c["arguments"].index("-c") + 1] for c in fake.calls("hpcstruct")]
    assert caches == [str(tmp_path / "cache" / "dlrm-workbook" / "hpcstruct")] * 2


def test_structure_can_be_left_out(fake):
    measured = run(fake, structure=False)
    assert fake.calls("hpcstruct") == []
    assert "structure is false" in measured.not_measured["loops and inlined functions"]


def test_hpcstruct_never_sees_an_unsafe_path(fake, tmp_path):
    folder = tmp_path / "my $(run) folder"
    fake.behave(modules=["/lib/one.so"])
    measured = measure(fake.workload(), folder, tools=find_tools(str(fake.home)))
    assert [p.name for p in measured.passes] == ["times", "frames"]
    for made in measured.passes:
        assert made.measurements == folder / f"{made.name}.measurements"
        assert list(made.measurements.glob("*.hpcrun"))
        assert (made.measurements / "structs" / "one.so.hpcstruct").is_file()
        assert made.notices == ()
    assert all(make_safe(Path(c["arguments"][-1])) for c in fake.calls("hpcstruct"))


def test_measuring_inside_hpcrun_is_refused(fake, monkeypatch):
    monkeypatch.setenv("HPCRUN_EVENT_LIST", "CPUTIME")
    with pytest.raises(InputError, match="runs under hpcrun already"):
        run(fake)


# --- ending ---------------------------------------------------------------------------


def processes_naming(word: str) -> list[int]:
    """Living processes whose command line holds ``word``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def test_time_up_ends_a_stubborn_program_and_its_children(fake):
    started = time.monotonic()
    with pytest.raises(MeasurementError, match=r"still running after \d+ s, at iteration 7"):
        run(fake, "stubborn", timeout_s=1.0)
    assert time.monotonic() - started < 20
    assert processes_naming(str(fake.bin)) == []


def test_time_up_without_hpctoolkit(fake, tmp_path):
    with pytest.raises(MeasurementError, match="without HPCToolkit was still running"):
        measure(
            ["/bin/sleep", "600"], tmp_path / "run", tools=find_tools(str(fake.home)),
            settings=HPCToolkitSettings(timeout_s=0.2),
        )  # fmt: skip


def test_a_caller_that_fails_ends_the_program(fake):
    def fail(progress: Progress) -> None:
        if progress.iteration == 7:
            raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="the caller's own"):
        measure(
            fake.workload("stubborn"), fake.home.parent / "run",
            tools=find_tools(str(fake.home)), progress=fail,
        )  # fmt: skip
    assert processes_naming(str(fake.bin)) == []


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_measurement_leaves_no_process(fake, tmp_path, number, code):
    script = (
        "import sys\n"
        "from dlrm_core.profiling import hpctoolkit_process\n"
        "from dlrm_core.profiling.hpctoolkit import find_tools, measure\n"
        "hpctoolkit_process.GRACE_S = 0.5\n"
        "def show(p):\n"
        "    if p.iteration == 7: print('measuring', flush=True)\n"
        "try:\n"
        "    measure(sys.argv[3:], sys.argv[1], tools=find_tools(sys.argv[2]), progress=show)\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run"), str(fake.home),
         *fake.workload("stubborn")],
        stdout=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    watchdog = threading.Timer(60, driver.kill)
    watchdog.start()
    try:
        assert driver.stdout is not None and b"measuring" in driver.stdout.readline()
        driver.send_signal(number)
        assert driver.wait(30) == code
    finally:
        watchdog.cancel()
        driver.kill()
        driver.stdout.close()
    assert processes_naming(str(fake.bin)) == []


def test_fresh_paths(tmp_path):
    assert fresh_path(tmp_path / "a.database") == tmp_path / "a.database"
    (tmp_path / "a.database").mkdir()
    (tmp_path / "a-2.database").symlink_to("nowhere")
    assert fresh_path(tmp_path / "a.database") == tmp_path / "a-3.database"
    assert fresh_path(Path("relative")).is_absolute()


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_a_program_may_print_anything(lines):
    watch = hpctoolkit_process._Watch("stage", None)
    for line in lines:
        watch._note(line)
        watch._note(b'{"iteration":' + line + b"}")
    assert watch.result is None


def test_a_stage_reports_signals_as_a_shell_does(tmp_path):
    for command, code in (("kill -9 $$", 137), ("exit 7", 7), ("kill -TERM $$", 143)):
        done = run_stage(
            ["/bin/sh", "-c", command], stage="a: b", logs=tmp_path, environment={}, timeout_s=20
        )
        assert done.exit_code == code
    assert (tmp_path / "a-b.out").exists() and (tmp_path / "a-b-3.out").exists()


# --- the real one ---------------------------------------------------------------------


@pytest.mark.skipif(REAL is None, reason="HPCToolkit is neither on PATH nor in HPCTOOLKIT_HOME")
def test_a_real_hpctoolkit(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(
        "import json, time\n"
        "def bottom_mlp_forward():\n"
        "    end = time.perf_counter() + 0.02\n"
        "    while time.perf_counter() < end:\n"
        "        sum(range(20000))\n"
        "times = []\n"
        "for i in range(50):\n"
        "    start = time.perf_counter()\n"
        "    bottom_mlp_forward()\n"
        "    times.append(time.perf_counter() - start)\n"
        "    print(json.dumps({'iteration': i + 1}), flush=True)\n"
        "print(json.dumps({'ms_per_iteration': sorted(times)[25] * 1e3}))\n"
    )
    measured = measure(
        [sys.executable, str(program)],
        tmp_path / "run",
        settings=HPCToolkitSettings(structure_limit_mb=1, structure_cache=tmp_path / "cache"),
    )
    times = measured.passes[0]
    assert (times.database / "meta.db").read_bytes().startswith(b"HPCTOOLKIT")
    assert (times.database / "trace.db").is_file()
    assert times.dilation is not None and 0.5 < times.dilation < 5
    # without the hook at Python calls, and hence without their names
    assert not times.python_frames and times.lost_samples == pytest.approx(0, abs=0.05)
    assert b"bottom_mlp_forward" not in (times.database / "meta.db").read_bytes()
    if "Python frames" not in measured.not_measured:
        frames = measured.passes[1]
        assert frames.name == "frames" and frames.python_frames
        assert b"bottom_mlp_forward" in (frames.database / "meta.db").read_bytes()
        assert not (frames.database / "trace.db").exists()
    assert re.match(r"\d{4}\.", measured.version)
