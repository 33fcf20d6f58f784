"""Reads damaged and hostile parameters, databases, traces and checkpoints; counts what came of it.

    python -m tests.campaigns.attacks parameters --count 1500
    python -m tests.campaigns.attacks databases --count 10000
    python -m tests.campaigns.attacks traces --count 10000
    python -m tests.campaigns.attacks checkpoints --count 3000
    python -m tests.campaigns.attacks pages --count 2000

A case passes if it is read, or refused by a sentence of at most 500 characters, in 5 s of
processor time (10 s with all that its page shows) and 1 GiB of memory. Case ``i`` is made from
``(seed, i)`` alone; ``--only`` makes one again.
"""

import argparse
import gzip
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_core.base.errors import InputError
from dlrm_core.config import SECTIONS, load_parameters, parameters_from_sections
from dlrm_workbook.analysis.inspect import inspect_recording
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.report import explain
from dlrm_workbook.show.tables import bundle
from dlrm_workbook.show.views import VIEWS
from dlrm_workbook.trials.sweep.plan import sweep_points
from tests import fuzz_database, gpu_trace
from tests.campaigns.checkpoint_edits import Checkpoints
from tests.sample_notebooks import PAYLOADS

MOST_SECONDS = 5.0
MOST_BYTES = 1 << 30
MOST_CHARACTERS = 500

Make = Callable[[random.Random, Path], Path]
Kind = tuple[Make, Callable[[Path], None]]
"""What makes a case in a folder, and what reads it."""


class TooSlowError(BaseException):
    """A case took too long; no part of the program catches it."""


@dataclass
class Tally:
    """What came of the cases."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


# ---- parameters -----------------------------------------------------------------------

ODD_VALUES = [
    *("0", "-1", "false", "''", "[]", "{}", "null", "~", ".nan", ".inf", "-.inf", "1e400", "0x"),
    *("9" * 400, "-" + "9" * 400, "9" * 5000, "0x" + "f" * 5000, "1" * 400 + ".5", "1e-400"),
    *('"a\\0b"', '"\\ud800"', '"\\x1b[2J"', "2026-13-45", "190:20:30", "!!binary x", "*a", "&a b"),
    *("[" * 40 + "]" * 40, "[" * 60 + "]" * 60, "[" * 9000, "{a: " * 30 + "1" + "}" * 30),
    *("[1, [2]]", "[true]", "[.nan]", "[-1]", "1-2-3", "512--64", "64-" * 3000 + "64", "!!set {a}"),
    *(f"[{', '.join(['a' * 2000] * 9)}]", "{" + "b" * 2000 + ": " + "c" * 2000 + "}"),
    *("a" * 5000, "/dev/zero", "~nobody-of-that-name/x", "../" * 2000, "- 1", "<<: {a: 1}"),
]
DOCUMENTS = [
    *("", "\0", "[", "]", "- 1", "5", "%YAML 9.9\n---\na: 1", "---\na: 1\n---\nb: 2", "\ufeff{}"),
    *("? [1]\n: 2", "a: b: c", "\t- a", "!!python/object/apply:os.system [id]", "a: &a [*a]"),
    "\n".join(["a: &a0 {x: 1}"] + [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 50)}]}}"
              for i in range(1, 9)]),
    "\n".join(["model: {table_rows: *a9}", "a0: &a0 [1]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]"
              for i in range(1, 10)]),
    "a: " + "[" * 100_000,
    "a: [" + "1," * 300_000 + "]",
    "sweep: {" + ", ".join(f"{s}: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" for s in (
        "training.seed", "training.batch_size", "training.batches", "data.seed", "model.tables",
        "training.log_every", "profiling.iterations", "profiling.warmup")) + "}",
]  # fmt: skip


def parameters_file(rng: random.Random, folder: Path) -> Path:
    """A bad parameters file: odd values in real leaves, whole documents, damaged presets."""
    path = folder / "case.yaml"
    kind = rng.random()
    presets = sorted((Path(__file__).parents[2] / "parameters").glob("*.yaml"))
    if kind < 0.1:
        path.write_text(rng.choice(DOCUMENTS))
    elif kind < 0.3:
        data = bytearray(rng.choice(presets).read_bytes())
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(data))
            data[at : at + rng.randint(0, 4)] = rng.choice([b"", b"\0", b"[", b": ", b"\xff", b"*"])
        path.write_bytes(bytes(data))
    elif kind < 0.35:
        section = rng.choice([*SECTIONS, "title", "sweep", "x" * 2000, "1"])
        path.write_text(f"{section}: {rng.choice(ODD_VALUES)}\n")
    else:
        lines = []
        for section in rng.sample(list(SECTIONS), rng.randint(1, 3)):
            leaves = rng.sample([f.name for f in fields(SECTIONS[section])], rng.randint(1, 3))
            lines.append(f"{section}:")
            lines += [f"  {leaf}: {rng.choice(ODD_VALUES)}" for leaf in leaves]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")
    return path


def read_parameters(path: Path) -> None:
    """Read a parameters file as ``dlrm run`` does, and hold what was read to its own record."""
    parameters = load_parameters(path)
    again = parameters_from_sections(json.loads(json.dumps(parameters.to_sections())))
    assert again.to_sections() == parameters.to_sections(), "read otherwise the second time"
    sweep_points(parameters)


# ---- databases ------------------------------------------------------------------------


def database_maker(scratch: Path) -> Make:
    """Damaged, spliced and mixed databases, see :mod:`tests.fuzz_database`."""
    made = scratch / "made"
    made.mkdir()
    whole = fuzz_database.sources(made)
    fuzz_database.exercise(made / "made-0")  # imports and caches, before memory is limited

    def make(rng: random.Random, folder: Path) -> Path:
        numbers = np.random.default_rng(rng.randrange(2**32))
        files = fuzz_database.mutate(numbers, whole)
        if rng.random() < 0.1:  # whole files of different runs
            files = {name: rng.choice(whole).get(name, b"") for name in fuzz_database.FILES}
        for name, data in files.items():
            (folder / name).write_bytes(data)
        if rng.random() < 0.02 and files:  # sparse: the size lies
            with (folder / rng.choice(list(files))).open("ab") as file:
                file.truncate(10**13)
        return folder

    return make


# ---- traces ---------------------------------------------------------------------------

ODD_NUMBERS: list[Any] = [
    *(float("nan"), float("inf"), -float("inf"), -1, 0, 1e308, -1e308, 10**18, 10**30, 2**63),
    *(-(2**63), 1.5, "12", "x", None, True, [], {}, [1], "9" * 400, 10**400),
]


def trace_file(rng: random.Random, folder: Path) -> Path:
    """A trace of a small GPU program with odd numbers, types, overlaps, depth or bytes."""
    events = json.loads(json.dumps(gpu_trace.events()))
    for _ in range(rng.randint(1, 6)):
        event = rng.choice(events)
        if not event:
            continue
        inside = isinstance(event.get("args"), dict) and event["args"] and rng.random() < 0.5
        place = event["args"] if inside else event
        key = rng.choice(list(place))
        how = rng.random()
        if how < 0.6:
            place[key] = rng.choice(ODD_NUMBERS)
        elif how < 0.7:
            del place[key]
        elif how < 0.8:
            place[key] = rng.choice(PAYLOADS)
        elif how < 0.9:
            events += [dict(event, ts=event.get("ts", 0)) for _ in range(rng.choice([1, 300]))]
        else:
            event["args"] = rng.choice(events).get("args", {})
    start = float(rng.choice([0, 1e6, 1e15]))
    spans = rng.choice([0] * 12 + [300, 3000])
    kinds = rng.choice([["cpu_op"], ["python_function"], ["cpu_op", "python_function", "kernel"]])
    deep, lanes = rng.random() < 0.5, rng.choice([1, 1, 7, 3000])
    events += [
        {"ph": "X", "cat": rng.choice(kinds), "name": f"f{i % 9}", "pid": 1, "tid": i % lanes,
         "ts": start + (i if deep else rng.randrange(spans)),
         "dur": 2 * (spans - i) if deep else rng.randrange(spans), "args": {}}
        for i in range(spans)
    ]  # fmt: skip
    text = json.dumps({"schemaVersion": 1, "traceEvents": events})
    how = rng.random()
    if how < 0.1:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["", "[" * 100_000, '"', "\0", "nan", "}", "\\"]) + text[at:]
    elif how < 0.15:
        text = text[: rng.randrange(len(text))]
    elif how < 0.17:
        text = text.replace('"args": {}', '"args": {"a": ' + "[" * 5000 + "]" * 5000 + "}", 1)
    data = text.encode()
    path = folder / "case.json"
    if rng.random() < 0.2:
        path = folder / "case.json.gz"
        if rng.random() < 0.1:  # a bomb
            data += b" " * (150 << 20)
        data = gzip.compress(data, 1)
        if rng.random() < 0.3:
            at = rng.randrange(len(data))
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + rng.randint(0, 9) :]
    path.write_bytes(data)
    return path


def read_recording(path: Path) -> None:
    """Read a recording as ``dlrm inspect`` does."""
    json.dumps(inspect_recording(open_recording(path)))


def explain_recording(path: Path) -> None:
    """Explain a recording and make every table, sentence and figure that pages show."""
    report = explain(str(path))
    json.dumps(report.document, allow_nan=False)
    report.markdown("case")
    for view in VIEWS:
        for shown in report.show(view).outputs:
            bundle(shown)


# ---- checkpoints ----------------------------------------------------------------------


def checkpoint_kind(scratch: Path) -> Kind:
    """Damaged and edited checkpoints, see :mod:`tests.campaigns.checkpoint_edits`."""
    whole = Checkpoints(scratch / "made")
    return whole.make, whole.read


# ---- the cases ------------------------------------------------------------------------


KINDS: dict[str, Callable[[Path], Kind]] = {
    "parameters": lambda _: (parameters_file, read_parameters),
    "databases": lambda scratch: (database_maker(scratch), fuzz_database.exercise),
    "traces": lambda _: (trace_file, read_recording),
    "pages": lambda _: (trace_file, explain_recording),
    "checkpoints": checkpoint_kind,
}


def attack(what: str, count: int, seed: int = 1, only: int | None = None) -> Tally:
    """Make and read ``count`` cases of a kind, one of :data:`KINDS`."""
    tally = Tally()

    def too_slow(*_: object) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGVTALRM, too_slow)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make, read = KINDS[what](Path(scratch))
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        imports = 0 if what == "databases" else 1 << 29
        resource.setrlimit(resource.RLIMIT_AS, (taken + imports + MOST_BYTES, hard))
        try:
            for case in range(count) if only is None else [only]:
                folder = Path(scratch) / "case"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                path = make(random.Random(f"{seed} {case}"), folder)
                _one(case, path, read, tally)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
            signal.signal(signal.SIGVTALRM, before)
    return tally


def _one(case: int, path: Path, read: Callable[[Path], None], tally: Tally) -> None:
    start = time.process_time()
    most = 2 * MOST_SECONDS if read is explain_recording else MOST_SECONDS
    signal.setitimer(signal.ITIMER_VIRTUAL, most)
    try:
        read(path)
        outcome = "read"
    except InputError as error:
        outcome = "refused"
        said = str(error).replace(str(path), "PATH").replace(str(path.parent), "PATH")
        if len(said) > MOST_CHARACTERS or "\n" in said:
            tally.failures.append(f"case {case}: a message of {len(said)} characters: {said[:90]}")
    except TooSlowError:
        outcome = "too slow"
        tally.failures.append(f"case {case}: {traceback.format_exc(limit=-3)}")
    except Exception as error:
        outcome = type(error).__name__
        tally.failures.append(f"case {case}: {traceback.format_exc(limit=-3)}")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    tally.slowest_s = max(tally.slowest_s, time.process_time() - start)
    tally.outcomes[outcome] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=KINDS)
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="make one case again")
    options = parser.parse_args()
    tally = attack(options.what, options.count, options.seed, options.only)
    for failure in tally.failures[:20]:
        print(failure)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(
        f"{sum(tally.outcomes.values()):,} {options.what}: {dict(tally.outcomes)}; "
        f"{len(tally.failures)} failures; slowest {tally.slowest_s:.2f} s of processor time; "
        f"peak memory {peak:,.0f} MB"
    )
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
