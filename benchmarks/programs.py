"""Ordinary training programs with one planted fault or none, and a judge of what is said of them.

    python benchmarks/programs.py --check                  every program runs three iterations
    python benchmarks/programs.py --stopwatch [NAME ...]   what each fault truly costs
    python benchmarks/programs.py --judge OUTPUT_ROOT --half opened

A program is a file of ``benchmarks/programs`` with textual edits of ``opened.yaml`` or
``sealed.yaml``, its clean twin the same file without them (or with the edits that cure it).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from stopwatch import Program, in_turns

HERE = Path(__file__).parent
BASES = HERE / "programs"
TRUTH = HERE / "results" / "programs_truth.json"
TABLE = HERE / "results" / "programs.json"
HALVES = (
    "opened",
    "sealed",
    "fresh",
    "unseen",
    "veiled",
    "shaded",
    "hooded",
    "cloaked",
    "masked",
    "shrouded",
    "mantled",
    "curtained",
    "swathed",
)
TIMED, COPIES = 30, 2
"""Iterations of a turn (faults that come now and then have periods that divide it), and processes
of each program."""
TOLERANCE = 0.2
"""Of the true share: so far the share that is said may lie from it."""
CLEAN_SHARE = 0.1
"""A finding of a clean program may have less than this share of the step."""
LIMIT_S = 900
"""After so many seconds one run of ``dlrm`` is ended, and counts as wrong."""


@cache
def table() -> dict[str, dict[str, Any]]:
    """All programs by name, which no two have, with the half that each belongs to."""
    programs: dict[str, dict[str, Any]] = {}
    for half in HALVES:
        entries = yaml.safe_load((BASES / f"{half}.yaml").read_text(encoding="utf-8"))
        if twice := sorted(programs.keys() & entries.keys()):
            raise SystemExit(f"{half}.yaml: another set has programs of these names: {twice}")
        for name, entry in entries.items():
            programs[name] = {"half": half, "edits": [], "twin": [], **entry}
    return programs


def edited(base: str, edits: Sequence[Mapping[str, str]]) -> str:
    """The text of a base with edits, each of which must apply at exactly one place."""
    text = (BASES / f"{base}.py").read_text(encoding="utf-8")
    for edit in edits:
        if text.count(edit["old"]) != 1:
            raise SystemExit(f"{base}.py holds this {text.count(edit['old'])} times: {edit['old']}")
        text = text.replace(edit["old"], edit["new"])
    return text


def write(name: str, folder: Path) -> Path:
    """Write a program into a folder, with its fault where it has one."""
    entry = table()[name]
    path = folder / f"{name}.py"
    path.write_text(edited(entry["base"], entry["edits"]), encoding="utf-8")
    return path


def write_twin(name: str, folder: Path) -> Path:
    """Write a program into a folder without its fault."""
    entry = table()[name]
    path = folder / f"{name}.py"
    path.write_text(edited(entry["base"], entry["twin"]), encoding="utf-8")
    return path


def command(name: str, path: Path) -> list[str]:
    """How a user starts a program, on two ranks where it is made for them."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [sys.executable, *(ranks if table()[name]["base"] == "ranks" else []), path.name]


def run(words: Sequence[str], folder: Path, limit_s: float, **variables: str) -> tuple[int, str]:
    """Run a command in a folder; what still runs at the limit is ended, with all it started.

    Returns:
        The exit status and what was printed to either stream.
    """
    with subprocess.Popen(
        words,
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            printed = f"ended after {limit_s:.0f} s"
            with contextlib.suppress(subprocess.TimeoutExpired):
                printed, _ = process.communicate(timeout=30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, printed


def check(names: Sequence[str]) -> None:
    """Run three iterations of each program and twin; faults must differ from their twins."""
    for name in names:
        for maker in (write, write_twin):
            with tempfile.TemporaryDirectory() as place:
                path = maker(name, Path(place))
                status, printed = run([*command(name, path), "--steps", "3"], path.parent, 300)
                if status:
                    raise SystemExit(f"{name} ({maker.__name__}): {printed[-3000:]}")
                places(name, path.read_text()) if maker is write else None
        entry = table()[name]
        if entry["cause"] and edited(entry["base"], entry["edits"]) == edited(
            entry["base"], entry["twin"]
        ):
            raise SystemExit(f"{name} is its own twin")
        print(f"{name}: runs", flush=True)


def stopwatch(names: Sequence[str], turns: int, output: Path) -> None:
    """Time each faulty program and its twin in turns, and store the share of the fault."""
    measured = json.loads(output.read_text()) if output.is_file() else {}
    for name in names:
        if not table()[name]["cause"]:
            continue
        with tempfile.TemporaryDirectory() as place:
            programs: list[Program] = []
            for maker in (write, write_twin):
                folder = Path(place) / maker.__name__
                folder.mkdir()
                programs.append((command(name, maker(name, folder)), folder, {}))
            times = in_turns(programs * COPIES, turns, TIMED)
        faulty, twin = (
            [statistics.mean(turn) for turn in zip(*times[first::2], strict=True)]
            for first in (0, 1)
        )
        shares = sorted(1 - good / bad for bad, good in zip(faulty, twin, strict=True))
        measured[name] = {
            "share": statistics.median(shares),
            "low": shares[0],
            "high": shares[-1],
            "faulty_ms": statistics.median(faulty),
            "twin_ms": statistics.median(twin),
            "turns": turns,
        }
        output.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        print(name, {key: round(value, 3) for key, value in measured[name].items()}, flush=True)


def places(name: str, text: str) -> set[int]:
    """Numbers of the lines that an answer may name: those listed, and bodies of functions."""
    entry, lines = table()[name], set[int]()
    for wanted in entry.get("lines", []):
        numbers = [i for i, line in enumerate(text.splitlines(), 1) if line.strip() == wanted]
        if len(numbers) != 1:
            raise SystemExit(f"{name}: {len(numbers)} lines read {wanted!r}")
        lines.update(numbers)
    functions = {
        node.name: range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    }
    for function in entry.get("functions", []):
        lines.update(functions[function])
    return lines


def names_cause(name: str, bottlenecks: Mapping[str, Any]) -> bool:
    """Whether the headline's first sentence or the first finding names the planted cause.

    A line counts as ``NAME.py:NUMBER``, a function in quotes, code or with its parenthesis, a
    setting by the words of the answer. Of the evidence only the first line that it names counts.
    """
    entry = table()[name]
    with tempfile.TemporaryDirectory() as place:
        lines = places(name, write(name, Path(place)).read_text())
    first = next(iter(bottlenecks.get("findings") or []), {})
    headline = re.split(r"(?<=[.!?])(?:\*\*)?\s", bottlenecks.get("headline") or "")[0]
    said = " ".join([headline, str(first.get("title", "")), str(first.get("advice", ""))])
    place_of = re.compile(rf"\b{name}\.py:(\d+)")
    numbers = place_of.findall(said) + place_of.findall(str(first.get("evidence", "")))[:1]
    if lines & {int(number) for number in numbers}:
        return True
    quoted = "[`\"'“‘]"
    for function in entry.get("functions", []):
        if re.search(rf"{quoted}(?:\w+\.)*{function}\b|\b{function}\(", said):
            return True
    return any(re.search(word, said, re.IGNORECASE) for word in entry.get("words", []))


def is_clean(bottlenecks: Mapping[str, Any]) -> bool:
    """Whether a run says that there is no bottleneck, but for where the most time goes."""
    large = [
        finding
        for finding in bottlenecks.get("findings") or []
        if (finding.get("share_of_step") or 0) >= CLEAN_SHARE and "largest" not in finding["id"]
    ]
    return not large and "No known bottleneck" in (bottlenecks.get("headline") or "")


def judged(name: str, root: Path, options: Sequence[str]) -> dict[str, Any]:
    """Run ``dlrm run all`` on a program and hold what it says against the answer."""
    entry = table()[name]
    folder = root.absolute() / "programs"
    folder.mkdir(parents=True, exist_ok=True)
    path = write(name, folder)
    tool = [sys.executable, "-m", "dlrm_workbook", "run", "all", "-p", "profiling.engine=torch"]
    tool += [*options, "--output-root", str(root.absolute()), "--", *command(name, path)]
    began = time.perf_counter()
    status, printed = run(tool, folder, LIMIT_S, PYTHONPATH=str(HERE.parent))
    wall_s = time.perf_counter() - began
    runs = [line for line in printed.splitlines() if line.startswith(str(root.absolute()))]
    file = Path(runs[-1]) / "bottlenecks.json" if runs else root / "nowhere"
    bottlenecks = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    findings = bottlenecks.get("findings") or [{}]
    truth = json.loads(TRUTH.read_text()) if TRUTH.is_file() else {}
    true = truth.get(name, {}).get("share")
    share = findings[0].get("share_of_step")
    within = None
    if entry["cause"] and true is not None:
        within = share is not None and abs(share - true) <= TOLERANCE * true
    named = names_cause(name, bottlenecks) if entry["cause"] else is_clean(bottlenecks)
    return {
        "program": name,
        "half": entry["half"],
        "cause": entry["cause"],
        "right": bool(bottlenecks) and named,
        "share_said": share,
        "share_true": true,
        "within_20_percent": within,
        "quality": (bottlenecks.get("quality") or {}).get("level"),
        "wall_s": round(wall_s, 1),
        "exit_status": status,
        "headline": bottlenecks.get("headline") or printed[-400:],
        "first_finding": findings[0].get("title"),
    }


def judge(names: Sequence[str], root: Path, output: Path, options: Sequence[str]) -> None:
    """Judge programs one after the other; rows of earlier runs stay where not judged again."""
    rows = (
        {row["program"]: row for row in json.loads(output.read_text())}
        if (output.is_file())
        else {}
    )
    for name in names:
        row = rows[name] = judged(name, root, options)
        output.write_text(json.dumps(list(rows.values()), indent=1) + "\n", encoding="utf-8")
        print(" | ".join(columns(row)), flush=True)
    for half in HALVES:
        chosen = [rows[name] for name in names if rows[name]["half"] == half]
        for kind, of_kind in (("faults", True), ("clean", False)):
            right = [row["right"] for row in chosen if bool(row["cause"]) is of_kind]
            if right:
                print(f"{half}, {kind}: {sum(right)} of {len(right)} right")


def columns(row: Mapping[str, Any]) -> Iterator[str]:
    """One line of the table that is printed."""
    share = {True: "yes", False: "no", None: "-"}[row["within_20_percent"]]
    yield f"{row['program']:9}"
    yield "right" if row["right"] else "WRONG"
    for key in ("share_said", "share_true"):
        yield "not measured" if row[key] is None else f"{row[key]:.1%}"
    yield f"within 20 %: {share}"
    yield str(row["quality"])
    yield f"{row['wall_s']} s"
    yield str(row["first_finding"])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--check", action="store_true", help="run three iterations of each")
    task.add_argument("--stopwatch", action="store_true", help="time faults against their twins")
    task.add_argument("--judge", type=Path, metavar="OUTPUT_ROOT", help="run dlrm on each")
    parser.add_argument("names", nargs="*", help="programs; all are taken where none is named")
    parser.add_argument("--half", choices=HALVES, help="only programs of this half")
    parser.add_argument("--turns", type=int, default=6, help="of the stopwatch")
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--trials", help="profiling.trials of the judged runs, seconds")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    unknown = set(options.names) - set(table())
    if unknown:
        parser.error(f"no program is called {', '.join(sorted(unknown))}")
    names = [
        name
        for name, entry in table().items()
        if options.half in (None, entry["half"]) and name in (options.names or table())
    ]
    if options.check:
        check(names)
    elif options.stopwatch:
        stopwatch(names, options.turns, options.json or TRUTH)
    else:
        given = ["-p", f"profiling.trials={options.trials}"] if options.trials else []
        judge(names, options.judge, options.json or TABLE, given)


if __name__ == "__main__":
    main()
