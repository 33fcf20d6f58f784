"""Interrupts commands at random moments on a busy machine, and looks at what is left.

Every command is started afresh, gets SIGINT (as Ctrl-C sends it), SIGTERM or SIGKILL after a
random time, while loops of Python take every core. It must end within the limit, without a
traceback, leave no process behind, and its run folders must say ``interrupted`` (or what else
became of them before the signal): after SIGKILL once the next command has looked.

    python tests/campaigns/interruptions.py --count 24 --json FILE
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dlrm_core.base.files import read_json, write_json
from dlrm_workbook.runner.index import write_index

ROOT = Path(__file__).parents[2]
QUICK = ["-f", "parameters/quick.yaml"]
LIMIT_S = 5.0
"""Seconds that a command may take to end after the signal."""
GONE_S = 10.0
"""Seconds after which no process of a killed command may be there."""
MARK = "DLRM_CAMPAIGN_MARK"

COMMANDS: dict[str, list[str]] = {
    "train": ["train", *QUICK, "-p", "training.batches=100000", "--output", "OUT/train"],
    "run train": ["run", "train", *QUICK, "-p", "training.batches=2000", "--output-root", "OUT"],
    "run profile": ["run", "profile", *QUICK, "--output-root", "OUT"],
    "run all": ["run", "all", *QUICK, "--output-root", "OUT"],
    "run bottlenecks": [
        *("run", "bottlenecks", "-p", "profile_run=dlrm_workbook/samples/seed-cpu"),
        *("--output-root", "OUT"),
    ],
    "run compare": [
        *("run", "compare", *QUICK, "-p", "change={training.batch_size: 64}"),
        *("--output-root", "OUT"),
    ],
    "run scaling": ["run", "scaling", *QUICK, "--output-root", "OUT"],
    "sweep": ["run", "train", "-f", "parameters/sweep-small.yaml", "--output-root", "OUT"],
    "bench": ["bench", *QUICK, "--json", "OUT/bench.json"],
}
LONGEST_S = {"run bottlenecks": 15.0}
"""Seconds until the last moment at which a command is interrupted; 40 where none are given."""


@dataclass
class Case:
    """What came of one interruption.

    Attributes:
        after_s: seconds between start and signal.
        ended_s: seconds between the signal and the end of the command; None: it was over before.
        left: processes of the command that were there when it had ended.
        faults: what was not as it must be.
    """

    command: str
    signal: str
    after_s: float
    ended_s: float | None
    left: int
    faults: list[str]


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """Keep the machine busy with so many loops of Python."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.wait()


def marked(mark: str) -> list[int]:
    """Living processes whose environment has the mark."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            if alive and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def interrupt(name: str, number: signal.Signals, after_s: float, top: Path) -> Case:
    """Run a command, send a signal after some time, and look at what is left."""
    out, mark = top / "out", uuid.uuid4().hex
    out.mkdir()
    words = [word.replace("OUT", str(out)) for word in COMMANDS[name]]
    with (top / "err").open("w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "dlrm_workbook", *words],
            cwd=ROOT,
            env=os.environ | {MARK: mark},
            stdout=subprocess.DEVNULL,
            stderr=err,
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(after_s)
        over = process.poll() is not None
        began = time.monotonic()
        if not over:
            process.send_signal(number)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        ended_s = None if over else time.monotonic() - began
        err.seek(0)
        said = err.read()
    faults = []
    if number is signal.SIGKILL:
        while marked(mark) and time.monotonic() - began < GONE_S:
            time.sleep(0.1)
    left = marked(mark)
    for pid in left:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:120]
        faults.append(f"left over: {command.decode(errors='replace')}")
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    if ended_s is not None and ended_s > LIMIT_S:
        faults.append(f"ended after {ended_s:.1f} s")
    if number is not signal.SIGKILL and not over:
        if "Traceback" in said:
            faults.append(f"traceback: {said.strip().splitlines()[-1][:200]}")
        if process.returncode not in (128 + number, 0):
            faults.append(f"exit code {process.returncode}: {said.strip()[-200:]}")
    if number is signal.SIGKILL:
        write_index(out)  # what the next command does
    for run_json in out.rglob("run.json"):
        status = read_json(run_json)["status"]
        if status == "running":
            faults.append(f"{run_json.relative_to(out)} says running")
    shutil.rmtree(out, ignore_errors=True)
    return Case(name, number.name, round(after_s, 2), ended_s, len(left), faults)


def main() -> int:
    """Exit code 0 if every command ended as it must."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=24, help="interruptions in all")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new one after so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loops", type=int, default=2 * (os.cpu_count() or 1))
    parser.add_argument("--only", choices=[*COMMANDS], action="append")
    parser.add_argument("--signal", choices=["SIGINT", "SIGTERM", "SIGKILL"], action="append")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    # a shell that starts us in the background has SIGINT ignored, which children inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)
    moments, began = random.Random(given.seed), time.monotonic()
    names = given.only or [*COMMANDS]
    signals = given.signal or ["SIGINT", "SIGINT", "SIGTERM", "SIGKILL"]
    cases: list[Case] = []
    with busy(given.loops), tempfile.TemporaryDirectory(prefix="interruptions-") as top:
        while len(cases) < given.count and time.monotonic() - began < given.seconds:
            name = names[len(cases) % len(names)]
            number = signal.Signals[signals[moments.randrange(len(signals))]]
            after_s = moments.uniform(0.5, LONGEST_S.get(name, 40.0))
            case = interrupt(name, number, after_s, Path(top))
            cases.append(case)
            ended = "over before" if case.ended_s is None else f"{case.ended_s:.1f} s"
            print(
                f"{len(cases)} {name}, {case.signal} after {after_s:.1f} s: {ended} "
                f"{'; '.join(case.faults)}",
                flush=True,
            )
    if given.json:
        write_json(Path(given.json), {"limit_s": LIMIT_S, "cases": [asdict(c) for c in cases]})
    hit = [case.ended_s for case in cases if case.ended_s is not None]
    faulty = sum(bool(case.faults) for case in cases)
    slowest = f"{max(hit):.1f} s" if hit else "none"
    print(f"{len(hit)} interrupted, {faulty} with faults, slowest end {slowest}")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
