"""Small programs that behave as hpcrun, hpcstruct and hpcprof were seen to behave.

Exit codes, messages and files follow recordings of HPCToolkit 2024.01.99; a
``behaviour.json`` beside the programs says which of the recorded troubles occur.
"""

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

from dlrm_workbook.ground.profiling import ProfilingConfig
from dlrm_workbook.recordings.hpctoolkit.driver import Measurement, measure_program
from dlrm_workbook.recordings.hpctoolkit.tools import Capabilities, Tools, find_tools, probe

COMMON = """
import json, os, sys, time
from pathlib import Path
here = Path(__file__).resolve().parent
behaviour = json.loads((here / "behaviour.json").read_text())
arguments = sys.argv[1:]

def noted(tool, **values):
    with open(here / f"calls-{tool}.jsonl", "a") as file:
        file.write(json.dumps(values) + chr(10))
"""

HPCRUN = """
import subprocess
if arguments[:1] == ["-V"]:
    print("hpcrun: A member of HPCToolkit, version " + behaviour["version"])
    print("git branch:  unknown")
    print("install dir: " + str(here.parent))
    if behaviour["cuda"]:
        print("NVIDIA CUDA support: yes")
        print("- CUDA: " + behaviour["cuda"])
    print("Python support: yes")
    sys.exit(behaviour.get("version_exit", 0))
if arguments[:1] == ["-L"]:
    print("=" * 75 + chr(10) + "Available Timer events" + chr(10) + "=" * 75)
    print("Name\\t\\tDescription" + chr(10) + "-" * 75)
    for event in behaviour["events"]:
        print(event + "  \\tsome text" + chr(10) + "\\t\\tmore text" + chr(10))
    sys.exit(0)
if arguments[:1] == ["-h"]:
    if behaviour["python"]:
        print("                           -a python")
        print("                                Attribute to Python code and functions")
    sys.exit(0)
out, events, trace, python = None, [], False, False
while arguments:
    word = arguments.pop(0)
    if word == "-o": out = Path(arguments.pop(0))
    elif word == "-e": events.append(arguments.pop(0))
    elif word == "-t": trace = True
    elif word == "-a": python = arguments.pop(0) == "python"
    elif word == "--": break
noted("hpcrun", events=events, trace=trace, python=python, out=str(out))
if behaviour.get("unmeasured"):
    os.execvp(arguments[0], arguments)
for event in events:
    if event not in behaviour.get("accepts", behaviour["events"]):
        out.mkdir(parents=True, exist_ok=True)
        print(f"HPCToolkit fatal error: event {event} is unknown or unsupported.", file=sys.stderr)
        print("Use 'hpcrun -L <program>' for a list of available events.", file=sys.stderr)
        sys.exit(1)
if behaviour.get("uncreatable"):
    print(f"hpcrun: could not create output directory `{out}': Permission denied", file=sys.stderr)
    sys.exit(255)
out.mkdir(parents=True, exist_ok=True)  # an existing directory is silently added to
stem = f"python3-000000-000-host-{os.getpid()}-0"
(out / (stem + ".log")).write_text(
    "SAMPLE ANOMALIES: blocks: 9 (async: 9, dlopen: 0), errors: 0 (segv: 0, soft: 0)" + chr(10)
    + "SUMMARY: samples: 100 (recorded: " + str(100 - behaviour.get("lost", 0))
    + ", blocked: 9, errant: 0, trolled: 0, yielded: 0)," + chr(10))
gpu = any(event.startswith("gpu=") for event in events)
if gpu and behaviour.get("no_gpu") or any(e in behaviour.get("refuses", []) for e in events):
    print("FATAL: hpcrun failure: failure type = CUPTI result error", file=sys.stderr)
    print("See the 'FAQ and Troubleshooting' chapter in the HPCToolkit manual", file=sys.stderr)
    sys.exit(1)
environment = dict(os.environ, HPCRUN_EVENT_LIST=" ".join(events))
environment["FAKE_SLOWER"] = str(behaviour.get("slower", 1.0))
if python and behaviour.get("python_fails"):
    environment["FAKE_EXIT"] = str(behaviour["python_fails"])
if behaviour.get("under_hpcrun_fails"):
    environment["FAKE_EXIT"] = str(behaviour["under_hpcrun_fails"])
if behaviour.get("fails_at_the_end"):
    environment["FAKE_LAST_EXIT"] = str(behaviour["fails_at_the_end"])
code = subprocess.call(arguments, env=environment)
modules = b"".join(len(m).to_bytes(4, "big") + m.encode() for m in behaviour["modules"])
(out / (stem + ".hpcrun")).write_bytes(b"HPCRUN-profile____" + bytes(9) + modules + bytes(9))
if trace:
    (out / (stem + ".hpctrace")).write_bytes(b"trace")
if python and behaviour.get("logical", True):
    (out / "logical").mkdir(exist_ok=True)
    bad = behaviour.get("bad_logical")
    (out / "logical" / "python.logical").write_text("bad" if bad else "good")
    if "stanzas" in behaviour:
        (out / "logical" / "python.1").write_bytes(bytes.fromhex(behaviour["stanzas"]))
sys.exit(code if code >= 0 else 128 - code)
"""

HPCSTRUCT = """
measurements = Path(arguments[-1])
noted("hpcstruct", arguments=arguments)
if " " in str(measurements):
    print("make: *** " + str(measurements).split()[0] + ": No such file", file=sys.stderr)
    sys.exit(1)
structs = measurements / "structs"
structs.mkdir(exist_ok=True)
for module in behaviour["modules"]:
    path = structs / (Path(module).name + ".hpcstruct")
    if path.exists():
        noted("struct-skipped", name=path.name)
        continue
    name = Path(module).name
    print(f" begin parallel analysis of CPU binary {name} (size = 1, threads = 2)", flush=True)
    if behaviour.get("struct_sleep"):
        path.write_text("<HPCToolkitStructure>half")
        time.sleep(behaviour["struct_sleep"])
    if not behaviour.get("struct_nothing"):
        path.write_text("<HPCToolkitStructure></HPCToolkitStructure>" + chr(10))
sys.exit(behaviour.get("struct_exit", 0))
"""

HPCPROF = """
if arguments[:1] == ["--help"]:
    print(behaviour["prof_help"])
    sys.exit(0)
measurements, database = Path(arguments[-1]), Path(arguments[arguments.index("-o") + 1])
structs = sorted(path.name for path in measurements.glob("structs/*.hpcstruct"))
noted("hpcprof", arguments=arguments, structs=structs)
if behaviour.get("prof_exit"):
    print("ERROR: something else", file=sys.stderr)
    sys.exit(behaviour["prof_exit"])
if not list(measurements.glob("*.hpcrun")):
    print("ERROR: no input", file=sys.stderr)
    sys.exit(2)
if behaviour.get("disk_full"):
    print("terminate called after throwing: write: No space left on device", file=sys.stderr)
    os.abort()
logical = measurements / "logical" / "python.logical"
unnamed = any(bytes(8) + bytes(1) in path.read_bytes() for path in logical.parent.glob("python.1"))
if unnamed or behaviour.get("prof_aborts") or logical.exists() and logical.read_text() == "bad":
    print("FATAL: Invalid logical stanza, both names are empty!", file=sys.stderr, flush=True)
    os.abort()
if logical.exists() and behaviour.get("python_prof_exit"):
    print("ERROR: these frames are too much", file=sys.stderr)
    sys.exit(behaviour["python_prof_exit"])
if behaviour.get("prof_nothing"):
    sys.exit(0)
database.mkdir(parents=True)
for name in ("meta.db", "profile.db", "cct.db"):
    (database / name).write_bytes(b"HPCTOOLKIT")
if behaviour.get("recorded"):
    for path in Path(behaviour["recorded"]).glob("*.db"):
        (database / path.name).write_bytes(path.read_bytes())
"""

WORKLOAD = """
import json, os, signal, sys, time
mode = sys.argv[1] if len(sys.argv) > 1 else ""
if mode == "fails":
    print("ValueError: a fault of its own", file=sys.stderr)
    sys.exit(3)
if mode == "stubborn" and "HPCRUN_EVENT_LIST" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        time.sleep(600)
    print(json.dumps({"iteration": 7}), flush=True)
    time.sleep(600)
if "FAKE_EXIT" in os.environ:
    print("Fatal Python error: Aborted", file=sys.stderr)
    print("training:  45%|####5     | 9/20 [00:01<00:02, 5.1it/s]", file=sys.stderr)
    code = int(os.environ["FAKE_EXIT"])
    os._exit(code) if code < 128 else os.kill(os.getpid(), code - 128)
print("not JSON", flush=True)
print("{also not", flush=True)
for iteration in (1, 2):
    print(json.dumps({"iteration": iteration, "ms_per_iteration": 9.0}), flush=True)
    time.sleep(0.02)
ms = 10.0 * float(os.environ.get("FAKE_SLOWER", 1))
environment = {name: os.environ.get(name) for name in
               ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "PYTHONMALLOC",
                "HPCRUN_WAIT", "HPCRUN_PROCESS_FRACTION")}
if mode != "silent":
    print(json.dumps({"ms_per_iteration": ms, "data_ms_per_iteration": 2 * ms,
                      "loss": 0.5, "environment": environment}), flush=True)
sys.exit(int(os.environ.get("FAKE_LAST_EXIT", 0)))
"""

NVIDIA_SMI = """
if behaviour["gpus"]:
    print(chr(10).join(behaviour["gpus"]))
else:
    print("No devices were found")
    sys.exit(6)
"""

DEFAULTS: dict[str, Any] = {
    "version": "2024.01.99-next",
    "cuda": "12.4",
    "events": ["REALTIME", "CPUTIME", "gpu=nvidia", "gpu=nvidia,pc", "perf::CYCLES"],
    "python": True,
    "built_for": f"{sys.version_info.major}.{sys.version_info.minor}.7",
    "modules": [],
    "prof_help": "      --no-source             Disable embedded source output.",
    "gpus": ["NVIDIA H200"],
}


class FakeHPCToolkit:
    """An installation in ``home`` whose behaviour a test chooses."""

    def __init__(self, home: Path, **behaviour: Any) -> None:
        self.home = home
        self.bin = home / "bin"
        self.bin.mkdir(parents=True)
        for name, body in (
            ("hpcrun", HPCRUN),
            ("hpcstruct", HPCSTRUCT),
            ("hpcprof", HPCPROF),
            ("nvidia-smi", NVIDIA_SMI),
        ):
            self._write(name, COMMON + body)
        self._write("workload", WORKLOAD)
        self.behaviour = dict(DEFAULTS)
        self.behave(**behaviour)

    def _write(self, name: str, text: str) -> None:
        path = self.bin / name
        # -I -S: a fraction of the start-up time
        path.write_text(f"#!{os.path.realpath(sys.executable)} -IS\n{text}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def behave(self, **behaviour: Any) -> None:
        self.behaviour.update(behaviour)
        (self.bin / "behaviour.json").write_text(json.dumps(self.behaviour))
        # as Spack notes what it installed, and what with
        spec = self.home / ".spack" / "spec.json"
        spec.unlink(missing_ok=True)
        if built_for := self.behaviour["built_for"]:
            spec.parent.mkdir(exist_ok=True)
            nodes = [{"name": "hpctoolkit"}, {"name": "python", "version": built_for}]
            spec.write_text(json.dumps({"spec": {"nodes": nodes}}))

    def calls(self, name: str) -> list[dict[str, Any]]:
        """What a program noted each time it ran."""
        path = self.bin / f"calls-{name}.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines()]

    def workload(self, *arguments: str) -> list[str]:
        return [str(self.bin / "workload"), *arguments]


def run(fake: FakeHPCToolkit, *workload: str, device: str = "cpu", **settings) -> Measurement:
    """Measure the fake workload into a fresh folder beside the tools."""
    tools = find_tools(str(fake.home))
    return measure_program(
        fake.workload(*workload),
        fake.home.parent / "run",
        device=device,
        config=ProfilingConfig(**settings),
        tools=tools,
        capabilities=capabilities(fake, tools=tools),
    )


def capabilities(
    fake: FakeHPCToolkit, cuda_version: str = "12.4", tools: Tools | None = None
) -> Capabilities:
    return probe(
        tools or find_tools(str(fake.home)),
        nvidia_smi=str(fake.bin / "nvidia-smi"),
        driver_parameters=fake.home / "params",
        cuda_version=cuda_version,
    )


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
