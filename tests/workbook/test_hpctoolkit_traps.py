"""Every way in which HPCToolkit is known to go wrong, and what the driver makes of it."""

import os
import shutil
import struct
from pathlib import Path

import pytest
from fake_hpctoolkit import run
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.base.errors import InputError
from dlrm_workbook.ground.processes import MeasurementError
from dlrm_workbook.recordings.hpctoolkit import build
from dlrm_workbook.recordings.hpctoolkit.build import (
    LOGICAL_MAGIC,
    STAND_IN,
    _mend,
    name_unnamed_modules,
    oversized_binaries,
)
from dlrm_workbook.recordings.hpctoolkit.driver import measure_program
from dlrm_workbook.recordings.hpctoolkit.passes import make_safe
from dlrm_workbook.recordings.hpctoolkit.tools import find_tools

REAL = shutil.which("hpcrun") or os.environ.get("HPCTOOLKIT_HOME")
ROOT = Path(__file__).resolve().parents[2]


# --- traps ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"unmeasured": True}, "nothing was measured"),
        ({"uncreatable": True}, "could not create"),
        ({"prof_aborts": True}, "hpcprof aborts"),
        ({"prof_nothing": True}, "wrote no database"),
        ({"prof_exit": 2}, "exit code 2"),
    ],
)
def test_a_run_without_data_or_database_says_why_and_is_not_repeated(fake, behaviour, message):
    fake.behave(**behaviour)
    with pytest.raises(MeasurementError, match=message):
        run(fake)
    assert len(fake.calls("hpcrun")) == 1


def test_a_program_that_fails_by_itself(fake):
    with pytest.raises(MeasurementError, match=r"exit code 3: ValueError: a fault of its own"):
        run(fake, "fails")
    assert fake.calls("hpcrun") == []


def test_a_program_that_is_not_there(fake, tmp_path):
    tools = find_tools(str(fake.home))
    with pytest.raises(MeasurementError, match="cannot be started: No such file"):
        measure_program([str(tmp_path / "none")], tmp_path / "run", tools=tools)
    with pytest.raises(InputError, match="empty"):
        measure_program([], tmp_path / "run", tools=tools)


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        (3, "failed with exit code 3"),
        (134, r"was ended by SIGABRT \(exit code 134\)"),
        (139, r"was ended by SIGSEGV \(exit code 139\)"),
    ],
)
def test_a_program_that_only_fails_under_hpcrun(fake, code, ended):
    """The signal is named, and its own error is quoted, not the progress bar after it."""
    fake.behave(under_hpcrun_fails=code)
    said = rf"{ended} under hpcrun \(pass times\): Fatal Python error: Aborted;"
    with pytest.raises(MeasurementError, match=said):
        run(fake)
    with pytest.raises(MeasurementError, match=said):
        run(fake, device="cuda")
    assert [call["python"] for call in fake.calls("hpcrun")] == [False, False]


def test_a_program_that_fails_with_python_frames_is_measured_without(fake):
    fake.behave(python_fails=134)
    measured = run(fake, single_pass=True)
    assert [p.name for p in measured.passes] == ["times"]
    assert any("without Python frames" in notice for notice in measured.passes[0].notices)
    assert [call["python"] for call in fake.calls("hpcrun")] == [True, False]
    measured = run(fake, device="cuda")
    times, stalls = measured.passes
    assert stalls.name == "stalls" and not stalls.python_frames
    assert "exit code 134" in measured.not_measured["Python frames"]
    assert any("without Python frames" in notice for notice in stalls.notices)
    assert not any("Python" in notice for notice in times.notices)


def test_a_program_that_fails_after_its_work_keeps_its_data(fake):
    fake.behave(fails_at_the_end=139)
    measured = run(fake)
    assert any("exit code 139" in notice for notice in measured.passes[0].notices)


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
    (times,) = run(fake, device="cuda", single_pass=True).passes
    assert times.events == ("CPUTIME", "gpu=nvidia")


def test_an_event_that_is_listed_but_refused(fake):
    fake.behave(accepts=["CPUTIME"])
    measured = run(fake, device="cuda")
    assert measured.passes[0].events == ("CPUTIME",)
    assert "unknown or unsupported" in measured.not_measured["GPU times"]
    fake.behave(accepts=[])
    with pytest.raises(MeasurementError, match="CPUTIME is unknown or unsupported"):
        run(fake)


@pytest.mark.parametrize(
    ("behaviour", "tried", "why"),
    [
        ({"logical": False}, [False, True], "another Python version"),  # and are not claimed
        ({"bad_logical": True}, [False, True, False], "aborts"),  # hpcprof does
    ],
)
def test_python_frames_that_cannot_be_had_are_given_up(fake, behaviour, tried, why):
    fake.behave(**behaviour)
    measured = run(fake, device="cuda")
    assert [call["python"] for call in fake.calls("hpcrun")] == tried
    frames = [(p.name, p.python_frames) for p in measured.passes]
    assert frames == [("times", False), ("stalls", False)]
    assert why in measured.not_measured["Python frames"]
    assert measured.passes[1].database.is_dir()


def test_a_database_that_cannot_be_made_costs_only_its_pass(fake):
    fake.behave(python_prof_exit=2)
    measured = run(fake, device="cuda")
    assert [p.name for p in measured.passes] == ["times"]
    assert "these frames are too much" in measured.not_measured["stall reasons"]


def stanza(number: int, function: bytes, file: bytes, line: int = 1) -> bytes:
    """One record of a Python function as hpcrun writes it."""
    return (
        struct.pack(">II", number, len(function)) + function + b"\0"
        + struct.pack(">I", len(file)) + file + struct.pack(">I", line)
    )  # fmt: skip


def test_a_nameless_module_is_named_before_hpcprof_aborts_on_it(fake):
    data = (
        LOGICAL_MAGIC
        + stanza(1, b"main", b"/a.py")
        + stanza(2, b"", b"")
        + stanza(3, b"", b"/b.py")
    )
    fake.behave(stanzas=data.hex())
    (frames,) = run(fake, single_pass=True).passes
    assert len(fake.calls("hpcrun")) == 1 and frames.python_frames
    assert any("1 Python module(s) without a name" in notice for notice in frames.notices)
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
    data = LOGICAL_MAGIC + b"".join(stanza(*record) for record in records)
    mended, count = _mend(data)
    nameless = [not function and not file for _, function, file, _ in records]
    assert count == sum(nameless)
    assert mended == LOGICAL_MAGIC + b"".join(
        stanza(number, STAND_IN if unnamed else function, file, line)
        for (number, function, file, line), unnamed in zip(records, nameless, strict=True)
    )
    if records:
        with pytest.raises(struct.error):
            _mend(data[:-cut])


def test_records_that_are_not_understood_stay_as_they_are(tmp_path):
    folder = tmp_path / "logical"
    folder.mkdir()
    for number, data in enumerate(
        (b"", b"something else", LOGICAL_MAGIC + stanza(1, b"", b"")[:-2])
    ):
        (folder / f"python.{number}").write_bytes(data)
    assert name_unnamed_modules(tmp_path) == 0
    assert (folder / "python.2").read_bytes() == LOGICAL_MAGIC + stanza(1, b"", b"")[:-2]


def test_a_full_disk_is_no_reason_to_measure_again(fake):
    fake.behave(disk_full=True)
    with pytest.raises(MeasurementError, match=r"is full: .*No space left on device"):
        run(fake)
    assert len(fake.calls("hpcrun")) == 1
    with pytest.raises(MeasurementError, match="is full"):
        run(fake, device="cuda")
    assert len(fake.calls("hpcrun")) == 2


def test_a_disk_without_a_megabyte_is_full_whatever_was_said(fake, monkeypatch):
    usage = shutil.disk_usage(fake.home)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    fake.behave(under_hpcrun_fails=135)
    with pytest.raises(MeasurementError, match=r"the disk of .* is full: make room"):
        run(fake)
    assert len(fake.calls("hpcrun")) == 1


def test_variables_of_the_shell_that_change_a_measurement_are_taken_out(fake, monkeypatch):
    monkeypatch.setenv("HPCRUN_WAIT", "1")
    monkeypatch.setenv("HPCRUN_PROCESS_FRACTION", "0.1")
    measured = run(fake)
    for result in (measured.unprofiled, measured.passes[0].result):
        assert result["environment"]["HPCRUN_WAIT"] is None
        assert result["environment"]["HPCRUN_PROCESS_FRACTION"] is None
    said = "HPCRUN_PROCESS_FRACTION, HPCRUN_WAIT were removed from the environment"
    assert any(notice.startswith(said) for notice in measured.notices)


def test_frames_of_another_python_are_not_measured(fake):
    fake.behave(built_for="3.8.1")
    measured = run(fake, single_pass=True)
    assert not any(call["python"] for call in fake.calls("hpcrun"))
    why = measured.not_measured["Python frames"]
    assert "was built for Python 3.8, but the program runs in Python 3." in why


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
    assert fake.calls("struct-skipped") == [{"name": "libtorch_cpu.so.hpcstruct"}]
    # the empty stand-in is gone when hpcprof looks
    structs = [call["structs"] for call in fake.calls("hpcprof")]
    assert structs == [["lib.so.hpcstruct", "libc10.so.hpcstruct"]]
    for made in measured.passes:
        (notice,) = made.notices
        assert "libtorch_cpu.so (70 MB), limit 16 MB" in notice
    found = oversized_binaries(measured.passes[0].measurements, 10)
    assert [path.name for path in found] == ["libc10.so", "libtorch_cpu.so"]


@pytest.mark.parametrize(
    "behaviour, message",
    [
        ({"struct_exit": 1}, "hpcstruct failed with exit code 1"),
        ({"struct_exit": 137}, "hpcstruct was ended by SIGKILL (exit code 137)"),
        ({"struct_nothing": True}, "wrote nothing"),
    ],
)
def test_hpcstruct_may_fail(fake, behaviour, message):
    fake.behave(modules=["/lib/one.so"], **behaviour)
    measured = run(fake)
    assert any(message in notice for notice in measured.passes[0].notices)
    assert measured.passes[0].database.is_dir()


def test_hpcstruct_may_take_too_long(fake, monkeypatch):
    monkeypatch.setattr(build, "STRUCTURE_TIMEOUT_S", 0.5)
    fake.behave(modules=["/lib/one.so", "/lib/two.so"], struct_sleep=60)
    measured = run(fake)
    assert any("ended after" in notice for notice in measured.passes[0].notices)
    # what it left half written is not given to hpcprof
    assert fake.calls("hpcprof")[0]["structs"] == []


def test_passes_share_what_hpcstruct_found(fake, tmp_path):
    fake.behave(modules=["/lib/one.so"])
    run(fake, device="cuda")
    caches = [c["arguments"][c["arguments"].index("-c") + 1] for c in fake.calls("hpcstruct")]
    assert caches == [str(tmp_path / "cache" / "dlrm-workbook" / "hpcstruct")] * 2


def test_structure_can_be_left_out(fake):
    measured = run(fake, structure=False)
    assert fake.calls("hpcstruct") == []
    assert "structure is false" in measured.not_measured["loops and inlined functions"]


def test_hpcstruct_never_sees_an_unsafe_path(fake, tmp_path):
    folder = tmp_path / "my $(run) folder"
    fake.behave(modules=["/lib/one.so"])
    measured = measure_program(fake.workload(), folder, tools=find_tools(str(fake.home)))
    assert [p.name for p in measured.passes] == ["times"]
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
