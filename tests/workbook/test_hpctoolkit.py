"""The HPCToolkit driver against recorded behaviour, and against the real one where it is."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from fake_hpctoolkit import processes_naming, run
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.base.errors import InputError
from dlrm_core.config import parameters_from_sections
from dlrm_workbook.ground import processes
from dlrm_workbook.ground.processes import (
    ALLOCATOR,
    MeasurementError,
    Progress,
    fresh_path,
    run_child,
)
from dlrm_workbook.ground.profiling import ProfilingConfig
from dlrm_workbook.recordings.hpctoolkit.driver import measure_program
from dlrm_workbook.recordings.hpctoolkit.tools import find_tools
from dlrm_workbook.recordings.measure import measure as measure_run

REAL = shutil.which("hpcrun") or os.environ.get("HPCTOOLKIT_HOME")
ROOT = Path(__file__).resolve().parents[2]


# --- measuring ------------------------------------------------------------------------


def test_measures_on_the_cpu(fake):
    fake.behave(slower=1.1)
    measured = run(fake)
    (times,) = measured.passes
    assert times.dilation == pytest.approx(1.1)
    assert times.ms_per_iteration == pytest.approx(11.0)
    assert measured.unprofiled["ms_per_iteration"] == 10.0
    assert times.result["ms_per_iteration"] == times.ms_per_iteration
    assert not times.python_frames
    assert times.database.is_absolute() and (times.database / "meta.db").is_file()
    (call,) = fake.calls("hpcrun")
    assert call["events"] == ["CPUTIME"] and call["trace"] and not call["python"]
    assert "--no-source" in fake.calls("hpcprof")[0]["arguments"]
    assert "computes on the CPU" in measured.not_measured["GPU times"]
    assert "computes on the CPU" in measured.not_measured["stall reasons"]
    logs = times.measurements.parent / "logs"
    assert "ms_per_iteration" in (logs / "times-hpcrun.out").read_text()


def test_both_sides_of_the_dilation_have_one_allocator(fake, monkeypatch):
    monkeypatch.setenv("PYTHONMALLOC", "debug")
    measured = run(fake)
    expected = {**ALLOCATOR, "PYTHONMALLOC": None}
    expected |= {"HPCRUN_WAIT": None, "HPCRUN_PROCESS_FRACTION": None}
    assert measured.unprofiled["environment"] == expected
    logs = measured.passes[0].measurements.parent / "logs"
    log = (logs / "times-hpcrun.out").read_text().splitlines()[-1]
    assert json.loads(log)["environment"] == expected
    assert any("PYTHONMALLOC was removed" in notice for notice in measured.notices)


def test_measures_times_and_stalls_apart_on_a_gpu_unless_asked_for_one_run(fake):
    measured = run(fake, device="cuda", gpu_control_flow=True)
    assert [p.name for p in measured.passes] == ["times", "stalls"]
    assert list(measured.not_measured) == ["Python frames"]
    assert "--gpucfg" in fake.calls("hpcstruct")[0]["arguments"]
    measured = run(fake, device="cuda", single_pass=True)
    assert [(c["events"], c["trace"], c["python"]) for c in fake.calls("hpcrun")] == [
        (["CPUTIME", "gpu=nvidia"], True, False),
        (["gpu=nvidia,pc"], False, True),
        (["CPUTIME", "gpu=nvidia,pc"], True, True),
    ]
    assert measured.not_measured == {} and measured.passes[0].python_frames


def test_our_own_steps_are_not_waited_for_on_a_gpu(tmp_path, monkeypatch):
    """A loss that is read drains the GPU's queue; the span log tells iterations apart."""
    commands = []

    def caught(command, folder, **settings):
        commands.append(command)
        raise InputError("enough")

    monkeypatch.setattr("dlrm_workbook.recordings.measure.measure_program", caught)
    given = ("hpctoolkit", "as asked")
    monkeypatch.setattr("dlrm_workbook.recordings.measure.choose_engine", lambda config: given)
    for device in ("cpu", "cuda"):
        found = torch.device(device)
        monkeypatch.setattr("dlrm_core.base.machine.resolve_device", lambda training, d=found: d)
        with pytest.raises(InputError, match="enough"):
            measure_run(parameters_from_sections({}), tmp_path / device)
    often = [word for command in commands for word in command if "training.log_every=" in word]
    assert often == ["training.log_every=1", f"training.log_every={sum(profiled_iterations())}"]
    assert all("--spans" in command for command in commands)


def profiled_iterations():
    """Those before and those while the profiler measures, by default."""
    return ProfilingConfig().warmup, ProfilingConfig().iterations


def test_existing_outputs_are_left_alone(fake):
    first = run(fake)
    second = run(fake)
    assert first.passes[0].database.name == "times.database"
    assert second.passes[0].database.name == "times-2.database"
    assert second.passes[0].measurements.name == "times-2.measurements"
    assert len(list(first.passes[0].measurements.glob("*.hpcrun"))) == 1


def test_a_slowed_pass_is_pointed_out(fake):
    fake.behave(slower=4.0)
    (frames,) = run(fake, single_pass=True).passes
    assert any("4.00x" in notice and "Python frames" in notice for notice in frames.notices)
    times, stalls = run(fake, device="cuda").passes
    assert any("4.00x" in notice and "Python" not in notice for notice in times.notices)
    assert any("times come from the other pass" in notice for notice in stalls.notices)


def test_dropped_samples_are_counted_and_pointed_out(fake):
    assert run(fake).passes[0].lost_samples == 0
    fake.behave(lost=61)
    measured = run(fake)
    assert measured.passes[0].lost_samples == pytest.approx(0.61)
    assert "dropped 61% of its samples" in measured.passes[0].notices[-1]
    assert "Python calls" not in measured.not_measured["all CPU time"]
    measured = run(fake, device="cuda", pc_sampling=False)
    assert "61%" in measured.not_measured["all CPU time"]
    assert "Python calls" in run(fake, single_pass=True).passes[0].notices[-1]


def test_a_program_without_figures_has_no_dilation(fake):
    measured = run(fake, "silent")
    # the last interval line still counts as a figure
    assert measured.passes[0].dilation == pytest.approx(1.0)
    tools = find_tools(str(fake.home))
    mute = measure_program(["/bin/true"], fake.home.parent / "mute", tools=tools)
    assert mute.passes[0].dilation is None
    assert any("dilation is unknown" in notice for notice in mute.notices)


def test_progress_tells_stage_time_and_iteration(fake):
    seen: list[Progress] = []
    fake.behave(modules=["/lib/libone.so"], struct_sleep=0.3)
    measure_program(
        fake.workload(), fake.home.parent / "run", tools=find_tools(str(fake.home)),
        progress=seen.append,
    )  # fmt: skip
    assert list(dict.fromkeys(p.stage for p in seen)) == [
        "unprofiled", "times: hpcrun", "times: hpcstruct", "times: hpcprof",
    ]  # fmt: skip
    assert any(p.stage == "times: hpcrun" and p.iteration == 2 for p in seen)
    assert any(p.detail == "libone.so" for p in seen)
    assert all(p.elapsed_s >= 0 for p in seen)


# --- ending ---------------------------------------------------------------------------


def test_time_up_ends_a_stubborn_program_and_its_children(fake, monkeypatch):
    # time is up when it has come so far, however long the machine takes for that
    def progress(watch: processes._Watch) -> Progress:
        elapsed_s = 1e6 if watch.iteration == 7 else 0.0
        return Progress(watch._stage, elapsed_s, watch.iteration)

    monkeypatch.setattr(processes._Watch, "progress", progress)
    with pytest.raises(MeasurementError, match=r"still running after \d+ s, at iteration 7"):
        run(fake, "stubborn", timeout_s=100)
    assert processes_naming(str(fake.bin)) == []


def test_time_up_without_hpctoolkit(fake, tmp_path):
    with pytest.raises(MeasurementError, match="without HPCToolkit was still running"):
        measure_program(
            ["/bin/sleep", "600"], tmp_path / "run", tools=find_tools(str(fake.home)),
            config=ProfilingConfig(timeout_s=1),
        )  # fmt: skip


def test_a_caller_that_fails_ends_the_program(fake):
    def fail(progress: Progress) -> None:
        if progress.iteration == 7:
            raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="the caller's own"):
        measure_program(
            fake.workload("stubborn"), fake.home.parent / "run",
            tools=find_tools(str(fake.home)), progress=fail,
        )  # fmt: skip
    assert processes_naming(str(fake.bin)) == []


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_measurement_leaves_no_process(fake, tmp_path, number, code):
    script = (
        "import sys\n"
        "from dlrm_workbook.ground import processes\n"
        "from dlrm_workbook.recordings.hpctoolkit.driver import measure_program\n"
        "from dlrm_workbook.recordings.hpctoolkit.tools import find_tools\n"
        "processes.GRACE_S = 0.5\n"
        "def show(p):\n"
        "    if p.iteration == 7: print('measuring', flush=True)\n"
        "try:\n"
        "    tools = find_tools(sys.argv[2])\n"
        "    measure_program(sys.argv[3:], sys.argv[1], tools=tools, progress=show)\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run"), str(fake.home),
         *fake.workload("stubborn")],
        stdout=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    watchdog = threading.Timer(200, driver.kill)
    watchdog.start()
    try:
        assert driver.stdout is not None and b"measuring" in driver.stdout.readline()
        driver.send_signal(number)
        assert driver.wait(100) == code
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
    watch = processes._Watch("stage")
    for line in lines:
        for printed in (line, b'{"iteration":' + line + b"}"):
            watch.note(printed)
            processes._json_object(printed)
    assert watch.progress().elapsed_s >= 0


def test_a_stage_reports_signals_as_a_shell_does(tmp_path):
    for command, code in (("kill -9 $$", 137), ("exit 7", 7), ("kill -TERM $$", 143)):
        done = run_child(
            ["/bin/sh", "-c", command], stage="a: b", logs=tmp_path, environment={}, timeout_s=20
        )
        assert done.exit_code == code
    assert (tmp_path / "a-b.out").exists() and (tmp_path / "a-b-3.out").exists()


# --- the real one ---------------------------------------------------------------------


@pytest.mark.skipif(REAL is None, reason="HPCToolkit is neither on PATH nor in HPCTOOLKIT_HOME")
def test_a_real_hpctoolkit(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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
    measured = measure_program(
        [sys.executable, str(program)],
        tmp_path / "run",
        config=ProfilingConfig(structure_limit_mb=1),
    )
    times = measured.passes[0]
    assert (times.database / "meta.db").read_bytes().startswith(b"HPCTOOLKIT")
    assert (times.database / "trace.db").is_file()
    assert times.dilation is not None and 0.05 < times.dilation < 50
    # without the hook at Python calls, and hence without their names
    assert not times.python_frames and times.lost_samples == pytest.approx(0, abs=0.05)
    assert b"bottom_mlp_forward" not in (times.database / "meta.db").read_bytes()
    assert re.match(r"\d{4}\.", measured.version)
