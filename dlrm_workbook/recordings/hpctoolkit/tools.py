"""Finds HPCToolkit's programs and says what they can measure on this machine.

Nothing is assumed from a version number: events, Python frames and option
spellings are read from the programs' own listings, because they have changed
between releases (``gpu=nvidia`` became ``gpu=cuda``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.base.files import read_json
from dlrm_core.base.machine import kernel_text
from dlrm_workbook.ground.machine import output_of
from dlrm_workbook.ground.processes import MeasurementError, run_child

SPACK = "spack install hpctoolkit +cuda +python ~viewer ^cuda@12"
"""Without the Python that it is to be built for; CUPTI of CUDA 13 has no PC sampling for it."""

THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def spack_line(python: str = THIS_PYTHON) -> str:
    """The command that installs HPCToolkit for programs of a Python version."""
    return f"{SPACK} ^python@{python}"


GPU_EVENTS = ("gpu=nvidia", "gpu=cuda")
"""Kernel times, launches, copies; spellings by release, the measured one first."""

PC_SAMPLING = ",pc"
"""What makes of a GPU event one that also samples where kernels wait (stall reasons)."""

CPU_EVENT = "CPUTIME"

PROBE_TIMEOUT_S = 120.0
"""Seconds for one question to a tool (``hpcrun -L`` on a slow shared disk)."""

NVIDIA_PARAMETERS = Path("/proc/driver/nvidia/params")


@dataclass(frozen=True)
class Tools:
    """One HPCToolkit installation: its programs, and what their own listings say.

    Attributes:
        version: as ``hpcrun -V`` gives it, such as ``2024.01.99-next``.
        python_frames: it offers ``-a python``.
        cuda, python: versions that it was built with, such as ``3.11``; "" if without or unknown.
        no_source: hpcprof's option that keeps source files out, "" if it has none.
    """

    hpcrun: Path
    hpcprof: Path
    hpcstruct: Path | None
    version: str
    events: frozenset[str]
    python_frames: bool
    cuda: str = ""
    no_source: str = ""
    python: str = ""

    @property
    def gpu_event(self) -> str | None:
        """This release's spelling of the NVIDIA GPU event, or None."""
        return next((event for event in GPU_EVENTS if event in self.events), None)

    @property
    def pc_event(self) -> str | None:
        """This release's spelling of PC sampling, or None."""
        event = f"{self.gpu_event}{PC_SAMPLING}"
        return event if event in self.events else None


@dataclass(frozen=True)
class Capabilities:
    """What can be measured here, and why the rest cannot.

    Attributes:
        gpu_event, pc_event: events for GPU times and PC sampling, None if they cannot be had.
        python_frames: call paths can hold Python functions.
        not_measured: name of a measurement to the reason why it is not made.
        notices: what the reader of the figures should know besides.
    """

    gpu_event: str | None
    pc_event: str | None
    python_frames: bool
    not_measured: dict[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


def find_tools(home: str | None = None) -> Tools:
    """Find hpcrun, hpcstruct and hpcprof in ``home``, an installation's folder (or its ``bin``),
    else in the environment variable HPCTOOLKIT_HOME, and without that on PATH, and ask them what
    they offer. A MissingToolError says that hpcrun or hpcprof is absent or does not start."""
    home = home or os.environ.get("HPCTOOLKIT_HOME")
    folder = Path(home).expanduser().absolute() if home else None
    hpcrun, hpcprof = _find("hpcrun", folder), _find("hpcprof", folder)
    if hpcrun is None or hpcprof is None:
        raise MissingToolError(
            f"HPCToolkit's {'hpcprof' if hpcrun else 'hpcrun'} was not found "
            f"{f'in {folder}' if folder else 'on PATH'}; install it with `{spack_line()}`, or set "
            "HPCTOOLKIT_HOME (or profiling.hpctoolkit_home) to its folder"
        )
    about = _ask(hpcrun, "-V")
    version = re.search(r"version\s+([^\s,]+)", about)
    cuda = re.search(r"^- CUDA:\s*([\d.]+)", about, re.MULTILINE)
    no_source = re.search(r"--no-sources?\b", _ask(hpcprof, "--help", required=False))
    return Tools(
        hpcrun=hpcrun,
        hpcprof=hpcprof,
        hpcstruct=_find("hpcstruct", folder),
        version=version.group(1) if version else "unknown",
        events=parse_events(_ask(hpcrun, "-L")),
        python_frames=bool(re.search(r"-a\s+python\b", _ask(hpcrun, "-h", required=False))),
        cuda=cuda.group(1) if cuda else "",
        no_source=no_source.group(0) if no_source else "",
        python=built_for_python(hpcrun),
    )


def built_for_python(hpcrun: Path) -> str:
    """The Python version that an HPCToolkit was built for, such as ``3.11``; "" if nothing tells.

    hpcrun has the layout of Python's objects compiled in, is linked with no Python and reports
    no version. Spack notes what it built with; else the library's debugging information, which
    HPCToolkit's own build keeps, holds the path of Python's headers.
    """
    prefix = hpcrun.resolve().parent.parent
    with contextlib.suppress(InputError, KeyError, TypeError):
        nodes = read_json(prefix / ".spack" / "spec.json")["spec"]["nodes"]
        for node in nodes:
            if node["name"] == "python" and (match := re.match(r"\d+\.\d+", node["version"])):
                return match.group()
    named: set[bytes] = set()
    for library in prefix.glob("lib*/**/libhpcrun.so"):
        with contextlib.suppress(OSError):
            named.update(_PYTHON_HEADERS.findall(library.read_bytes()))
    return named.pop().decode() if len(named) == 1 else ""


_PYTHON_HEADERS = re.compile(rb"include/python(3\.\d{1,2})\b")


def python_of(command: Sequence[str]) -> str:
    """The Python version that a command runs in, such as ``3.11``; "" where nothing tells."""
    if command[0] == sys.executable:
        return THIS_PYTHON
    program = shutil.which(command[0])
    match = re.fullmatch(r"python(3\.\d+)", Path(program).resolve().name) if program else None
    return match[1] if match else ""


def parse_events(listing: str) -> frozenset[str]:
    """Event names in ``hpcrun -L``: the first word of each line that is not indented."""
    words = (line.split()[0] for line in listing.splitlines() if line[:1].strip())
    return frozenset(word for word in words if not set(word) <= set("=-"))


def probe(
    tools: Tools,
    *,
    nvidia_smi: str = "nvidia-smi",
    driver_parameters: Path = NVIDIA_PARAMETERS,
    cuda_version: str | None = None,
    python_version: str | None = None,
) -> Capabilities:
    """Say what this machine and this HPCToolkit can measure together. ``nvidia_smi`` is the program
    that lists GPUs, ``driver_parameters`` the NVIDIA driver's parameters file. The CUDA (hence
    CUPTI) version is the workload's, None: that of the torch installed here; so is Python's, "" if
    unknown, None: this process's."""
    python_version = THIS_PYTHON if python_version is None else python_version
    missing: dict[str, str] = {}
    notices: list[str] = []
    gpu_event, pc_event = tools.gpu_event, tools.pc_event
    if no_gpu := _no_gpu(nvidia_smi):
        missing["GPU times"] = no_gpu
        gpu_event = None
    elif gpu_event is None:
        missing["GPU times"] = (
            f"HPCToolkit {tools.version} at {tools.hpcrun.parent} lists no event of "
            f"{' or '.join(GPU_EVENTS)}: it was built without CUDA (`{spack_line()}`)"
        )
    if gpu_event is None:
        missing["stall reasons"] = missing["GPU times"]
        pc_event = None
    elif pc_event is None:
        missing["stall reasons"] = (
            f"HPCToolkit {tools.version} lists no PC sampling event ({gpu_event}{PC_SAMPLING})"
        )
    elif reason := _pc_sampling_refused(tools, cuda_version, driver_parameters):
        missing["stall reasons"] = reason
        pc_event = None
    if not tools.python_frames:
        missing["Python frames"] = (
            f"HPCToolkit {tools.version} does not offer -a python: it was built without Python "
            f"(`{spack_line()}`)"
        )
    elif tools.python and python_version and tools.python != python_version:
        missing["Python frames"] = (
            f"HPCToolkit {tools.version} was built for Python {tools.python}, but the program runs "
            f"in Python {python_version}: names and lines of its functions would be wrong; build "
            f"it with `{spack_line(python_version)}`"
        )
    elif not tools.python or not python_version:
        whose = "the program runs in" if tools.python else "HPCToolkit was built for"
        notices.append(
            f"nothing tells which Python {whose}: if the two versions differ, names and lines of "
            "Python frames are wrong"
        )
    if tools.hpcstruct is None:
        missing["loops and inlined functions"] = f"hpcstruct is not beside {tools.hpcrun}"
    frames = "Python frames" not in missing
    return Capabilities(gpu_event, pc_event, frames, missing, tuple(notices))


def torch_cuda_version() -> str:
    """CUDA version of the installed torch, "" for a CPU build; torch is not imported.

    The workload loads torch's own CUPTI, so this is the version that counts.
    """
    text = ""
    with contextlib.suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


def _find(name: str, folder: Path | None) -> Path | None:
    """A program in an installation's folder, or on PATH where none is given."""
    if folder is None:
        program = shutil.which(name)
        return Path(program).absolute() if program else None
    # an explicit folder that holds nothing is a mistake to name, not one to paper over
    places = (folder / "bin" / name, folder / name)
    return next((path for path in places if path.is_file() and os.access(path, os.X_OK)), None)


def _ask(tool: Path, option: str, *, required: bool = True) -> str:
    """What a tool prints for an informational option. Raises MissingToolError: it does not start,
    fails, or does not answer in time."""
    plain = {name: text for name, text in os.environ.items() if not name.startswith("HPCRUN_")}
    try:
        answer = run_child(
            [tool, option], stage=tool.name, environment=plain, timeout_s=PROBE_TIMEOUT_S
        )
    except MeasurementError as error:
        raise MissingToolError(
            f"{tool} does not run here ({error}); reinstall HPCToolkit with `{spack_line()}`"
        ) from None
    if answer.timed_out or (required and answer.exit_code != 0):
        ended = f"{answer.failure()} ({answer.last_words()})"
        raise MissingToolError(
            f"{tool} {option} {'does not answer in time' if answer.timed_out else ended}; "
            f"reinstall HPCToolkit with `{spack_line()}`"
        )
    return answer.stdout + answer.stderr


def _no_gpu(nvidia_smi: str) -> str:
    """Why there is no GPU of NVIDIA, "" if there is one."""
    program = shutil.which(nvidia_smi)
    if program is None:
        return "no NVIDIA GPU: nvidia-smi is not installed"
    names = output_of([program, "--query-gpu=name", "--format=csv,noheader"])
    return "" if names.strip() else "no NVIDIA GPU: nvidia-smi finds none, or does not answer"


def _pc_sampling_refused(tools: Tools, cuda_version: str | None, parameters: Path) -> str:
    """Why PC sampling cannot work on this machine, "" if it may."""
    cuda = torch_cuda_version() if cuda_version is None else cuda_version
    for owner, version in (("torch", cuda), (f"HPCToolkit {tools.version}", tools.cuda)):
        major = version.partition(".")[0]
        # releases that say gpu=cuda sample through CUPTI's newer interface
        if tools.gpu_event == "gpu=nvidia" and major.isdigit() and int(major) >= 13:
            return (
                f"{owner} brings CUDA {version}, whose CUPTI no longer has the PC sampling that "
                f"HPCToolkit {tools.version} uses; it needs CUDA 12 or a newer HPCToolkit"
            )
    text = kernel_text(parameters)
    if re.search(r"^RmProfilingAdminOnly:\s*1\b", text, re.MULTILINE) and os.geteuid() != 0:
        return (
            "the NVIDIA driver lets only root use performance counters; load it with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )
    return ""
