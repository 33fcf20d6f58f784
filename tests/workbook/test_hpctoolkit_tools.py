"""Finding HPCToolkit, what it can do, and which passes follow from that."""

import dataclasses
import os
import shutil
import sys
from pathlib import Path

import pytest
from fake_hpctoolkit import capabilities, run

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_workbook import doctor
from dlrm_workbook.recordings.hpctoolkit.passes import Pass, plan_passes
from dlrm_workbook.recordings.hpctoolkit.tools import (
    Capabilities,
    find_tools,
    parse_events,
    python_of,
    torch_cuda_version,
)

REAL = shutil.which("hpcrun") or os.environ.get("HPCTOOLKIT_HOME")
ROOT = Path(__file__).resolve().parents[2]


# --- finding and probing --------------------------------------------------------------


def test_missing_tools_name_the_spack_command(tmp_path, monkeypatch):
    monkeypatch.delenv("HPCTOOLKIT_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingToolError, match="hpcrun was not found on PATH") as error:
        find_tools()
    python = ".".join(map(str, sys.version_info[:2]))
    line = f"spack install hpctoolkit +cuda +python ~viewer ^cuda@12 ^python@{python}"
    assert f"`{line}`" in str(error.value)
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
    with pytest.raises(MissingToolError, match=r"hpcrun -V failed with exit code 1"):
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


@pytest.mark.parametrize(
    ("behaviour", "torch", "events", "why"),
    [
        ({}, None, ("gpu=nvidia", "gpu=nvidia,pc"), {}),
        # a release that says gpu=cuda may well sample with CUDA 13
        (
            {"events": ["CPUTIME", "gpu=cuda", "gpu=cuda,pc"]},
            *("13.0", ("gpu=cuda", "gpu=cuda,pc"), {}),
        ),
        (
            {"events": ["CPUTIME"], "cuda": ""},
            None,
            (None, None),
            {"GPU times": "built without CUDA"},
        ),
        ({"cuda": "12.4"}, "13.0", ("gpu=nvidia", None), {"stall reasons": "CUDA 13.0"}),
        ({"cuda": "13.0"}, "12.8", ("gpu=nvidia", None), {"stall reasons": "CUDA 13.0"}),
    ],
)
def test_what_a_machine_can_measure_is_found_and_the_rest_has_its_reason(
    fake, behaviour, torch, events, why
):
    fake.behave(**behaviour)
    found = capabilities(fake, **({"cuda_version": torch} if torch else {}))
    assert (found.gpu_event, found.pc_event) == events
    assert found.not_measured.keys() - {"stall reasons"} == why.keys() - {"stall reasons"}
    assert bool(found.not_measured) == bool(why)
    assert all(said in found.not_measured[name] for name, said in why.items())


def test_probe_says_why_there_is_no_gpu(fake):
    fake.behave(gpus=[])
    assert "nvidia-smi finds none" in capabilities(fake).not_measured["GPU times"]
    (fake.bin / "nvidia-smi").unlink()
    found = capabilities(fake)
    assert "nvidia-smi is not installed" in found.not_measured["GPU times"]
    assert found.not_measured["stall reasons"] == found.not_measured["GPU times"]


def test_pc_sampling_needs_root_or_the_driver_option(fake, monkeypatch):
    (fake.home / "params").write_text("RmLogonRC: 1\nRmProfilingAdminOnly: 1\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "RestrictProfilingToAdminUsers=0" in capabilities(fake).not_measured["stall reasons"]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert capabilities(fake).pc_event == "gpu=nvidia,pc"


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


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (b"\0/usr/include/python3.12\0/opt/py/include/python3.12\0", "3.12"),
        (b"\0/usr/include/python3.12\0/usr/include/python3.9\0", ""),
        (b"\0no headers\0", ""),
        (b"", ""),
    ],
)
def test_python_of_a_build_without_spack_is_that_of_its_headers(fake, text, version):
    fake.behave(built_for="")
    library = fake.home / "lib" / "hpctoolkit" / "libhpcrun.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(text)
    assert find_tools(str(fake.home)).python == version
    found = capabilities(fake)
    if version:
        expected = version == f"{sys.version_info.major}.{sys.version_info.minor}"
        assert found.python_frames == expected
    else:
        assert found.python_frames
        assert "nothing tells which Python HPCToolkit was built for" in found.notices[0]


def test_python_of_a_command_is_told_by_its_name(tmp_path):
    real = tmp_path / "python3.9"
    real.write_text("#!/bin/sh\n")
    real.chmod(0o755)
    (tmp_path / "python").symlink_to(real)
    assert python_of([str(tmp_path / "python")]) == "3.9"
    assert python_of([sys.executable]) == ".".join(map(str, sys.version_info[:2]))
    assert python_of(["torchrun"]) == "" == python_of(["/no/such/program"])


def test_doctor_finds_what_the_measurement_finds(fake, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("HPCTOOLKIT_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(MissingToolError) as refused:
        find_tools()
    parts = {part.name: part for part in doctor._hpctoolkit()}
    assert parts["HPCToolkit (hpcrun)"].found == str(refused.value)
    assert not any(part.present for part in parts.values())
    fake.behave(built_for="3.8.1")
    monkeypatch.setenv("HPCTOOLKIT_HOME", str(fake.home))
    parts = {part.name: part for part in doctor._hpctoolkit()}
    assert parts["HPCToolkit (hpcrun)"].present
    frames = parts["HPCToolkit's Python frames"]
    assert not frames.present and "was built for Python 3.8" in frames.found
    assert parts["HPCToolkit's hpcstruct"].present
    (fake.bin / "hpcstruct").unlink()
    structure = {part.name: part for part in doctor._hpctoolkit()}["HPCToolkit's hpcstruct"]
    assert not structure.present and "is not beside" in structure.found


# --- planning -------------------------------------------------------------------------


def test_passes_by_device():
    gpu = Capabilities("gpu=nvidia", "gpu=nvidia,pc", python_frames=True)
    assert plan_passes(gpu, "cpu") == [Pass("times", ("CPUTIME",), True, False)]
    assert plan_passes(gpu, "cpu", single=True) == [Pass("times", ("CPUTIME",), True, True)]
    assert plan_passes(gpu, "cuda") == [
        Pass("times", ("CPUTIME", "gpu=nvidia"), True, False),
        Pass("stalls", ("gpu=nvidia,pc",), False, True),
    ]
    assert [p.name for p in plan_passes(gpu, "cuda", pc_sampling=False)] == ["times"]
    bare = plan_passes(dataclasses.replace(gpu, python_frames=False), "cuda")
    assert [(p.name, p.python) for p in bare] == [("times", False), ("stalls", False)]
    blind = Capabilities(None, "gpu=nvidia,pc", python_frames=True)
    assert plan_passes(blind, "cuda") == plan_passes(gpu, "cpu")
    none = Capabilities(None, None, python_frames=False)
    assert plan_passes(none, "cpu") == [Pass("times", ("CPUTIME",), True, False)]
    assert plan_passes(none, "cuda") == [Pass("times", ("CPUTIME",), True, False)]
    with pytest.raises(InputError, match="'tpu'"):
        plan_passes(gpu, "tpu")
