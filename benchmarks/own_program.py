"""Whether the page of another program gives its parts the times that a stopwatch gives them.

A checkout of facebookresearch/dlrm is trained at the experiment's shape by its own script and
recorded by ``dlrm run profile -- ...``. Meanwhile ``perf_counter`` is read around the script's own
functions (``apply_mlp``, ``apply_emb``, ...), where gradients arrive at their results, and around
the optimizer: in the iterations without the profiler that is the truth. The page's times are those
of the same iterations, once as the page scales them and once by one factor for all parts.

    python benchmarks/own_program.py CHECKOUT PYTHON --rounds 4 --json FILE
    python benchmarks/own_program.py CHECKOUT PYTHON --rounds 5 --twin --json FILE

PYTHON is one in which the script runs. With ``--twin`` the script runs without a stopwatch, in
turns with ``parameters/seed.yaml``, the same training by our own model; parts are compared.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

WARM_UP, RECORDED, SKIPPED = 2, 8, 1
SHAPE = [
    *("--arch-sparse-feature-size=64", "--arch-mlp-bot=512-512-64"),
    *("--arch-mlp-top=1024-1024-1024-1", "--arch-interaction-op=dot", "--mini-batch-size=2048"),
    *("--num-batches=24", "--num-indices-per-lookup=100", "--numpy-rand-seed=727"),
    *("--data-generation=random", "--arch-embedding-size=" + "-".join(["1000000"] * 8)),
]
UPDATES = "embedding backward and all updates"
SUMMED = {"embedding backward": UPDATES, "data forward": "data"}
OTHER = "other"


# ---- inside the script, with nothing but torch ---------------------------------------------------


def stopwatch(checkout: str, found: str) -> None:
    """Run the script with a stopwatch around its parts; ``found`` gets their ms and page faults."""
    import resource

    sys.path.insert(0, checkout)
    import torch

    script = importlib.import_module("dlrm_s_pytorch")
    data = importlib.import_module("dlrm_data_pytorch")
    marks: list[tuple[str, float, int]] = []

    def mark(part: str) -> None:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        marks.append((part, time.perf_counter() * 1e3, faults))

    def around(owner: Any, name: str, part: Callable[..., str], backward: str = "") -> None:
        call = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            mark(part(*arguments))
            result = call(*arguments, **named)
            mark("end" if name == "step" else OTHER)
            last = result[-1] if isinstance(result, list) else result
            if backward and last.requires_grad:
                here = part(*arguments).replace("forward", "backward")
                last.register_hook(lambda _gradient: mark(here))
            return result

        setattr(owner, name, timed)

    model = script.DLRM_Net

    def mlp(self: Any, _values: Any, layers: Any) -> str:
        return ("bottom_mlp" if layers is self.bot_l else "top_mlp") + " forward"

    around(model, "apply_mlp", mlp, "backward")
    around(model, "apply_emb", lambda *_: "embedding forward", "backward")
    around(model, "interact_features", lambda *_: "interaction forward", "backward")
    around(torch.Tensor, "backward", lambda *_: "loss")
    around(torch.optim.SGD, "zero_grad", lambda *_: UPDATES)
    around(torch.optim.SGD, "step", lambda *_: UPDATES)
    around(data.RandomDataset, "__getitem__", lambda *_: "data")
    try:
        script.run()
    finally:
        ends = [row for row, (part, _, _) in enumerate(marks) if part == "end"]
        iterations: list[dict[str, list[float]]] = []
        for first, last in zip(ends, ends[1:]):  # noqa: B905, RUF007 (an older Python may run this)
            ms: defaultdict[str, float] = defaultdict(float)
            faults: defaultdict[str, float] = defaultdict(float)
            for row in range(first, last):
                part = SUMMED.get(marks[row][0], marks[row][0])
                ms[part] += marks[row + 1][1] - marks[row][1]
                faults[part] += marks[row + 1][2] - marks[row][2]
            iterations.append({part: [ms[part], faults[part]] for part in ms})
        Path(found).write_text(json.dumps(iterations))


# ---- beside the page -----------------------------------------------------------------------------


def _recorded(checkout: Path, folder: Path, program: list[str]) -> tuple[list[str], Any]:
    """Record a program (nothing: our own model) at the experiment's shape; command and profile."""
    from dlrm_workbook.recordings.open import open_recording

    seed = str(Path(__file__).resolve().parent.parent / "parameters" / "seed.yaml")
    command = ["dlrm", "run", "profile", "-f", seed, "--output-root", str(folder)]
    command += ["-p", "profiling.engine=torch", "-p", "profiling.probes=false"]
    command += ["-p", f"profiling.warmup={WARM_UP}", "-p", f"profiling.iterations={RECORDED}"]
    command += program
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=checkout)
    return command, open_recording(done.stdout.splitlines()[-1]).profile


def one_pair(checkout: Path, python: str, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """The commands, and each part of the unchanged script and of its twin, ms, as pages have it."""
    from dlrm_workbook.analysis.reference import at_reference

    commands, figures = [], {}
    for name, program in (("script", ["--", python, "dlrm_s_pytorch.py", *SHAPE]), ("twin", [])):
        command, profile = _recorded(checkout, folder, program)
        commands.append(" ".join(command))
        figures[f"{name}_ms"] = _page(at_reference(profile))
    return commands, figures


def one_round(checkout: Path, python: str, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """The command, and page, one factor and stopwatch of each part, ms, of one recorded run."""
    from dlrm_workbook.analysis.reference import at_reference

    found = folder / "stopwatch.json"
    here = str(Path(__file__).resolve())
    inside = [python, here, "--inside", str(found), str(checkout), *SHAPE]
    command, profile = _recorded(checkout, folder, ["--", *inside])
    laps, half = profile.meta["laps_ms"], RECORDED // 2
    begin = SKIPPED + WARM_UP
    timed = json.loads(found.read_text())[begin : begin + 2 * RECORDED]
    plain, under = timed[:half] + timed[half + RECORDED :], timed[half : half + RECORDED]
    # of the same iterations all, however busy the machine is
    meta = {name: value for name, value in profile.meta.items() if name != "counters"}
    whole = replace(profile, meta=meta, _known={})
    meta = {name: value for name, value in meta.items() if name != "laps_ms"}
    figures: dict[str, Any] = {
        "page_ms": _page(at_reference(whole)),
        "one_factor_ms": _page(at_reference(replace(whole, meta=meta, _known={}))),
        "stopwatch_ms": _medians(plain, 0),
        "faults": _medians(plain, 1),
        "faults_under_the_profiler": _medians(under, 1),
        "laps": len(laps["between"]) + 1,
    }
    return command, figures


def _page(profile: Any) -> dict[str, float]:
    from dlrm_workbook.analysis.attribution import attribute

    parts: defaultdict[str, float] = defaultdict(float)
    columns = ["component", "phase", "time_ms"]
    for component, phase, ms in attribute(profile)[columns].itertuples(index=False, name=None):
        name = UPDATES if phase == "update" else f"{component} {phase}".strip()
        parts[SUMMED.get(name, name)] += ms
    return dict(parts)


def _medians(iterations: list[dict[str, list[float]]], place: int) -> dict[str, float]:
    parts = {part for one in iterations for part in one}
    return {
        part: statistics.median(one.get(part, [0.0, 0.0])[place] for one in iterations)
        for part in sorted(parts)
    }


def main() -> None:
    from dlrm_core.base.files import write_json
    from dlrm_workbook.ground.machine import machine_facts, versions

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("python")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--twin", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    rounds, command = [], [""]
    for _ in range(asked.rounds):
        with tempfile.TemporaryDirectory() as folder:
            one = one_pair if asked.twin else one_round
            command, figures = one(asked.checkout.resolve(), asked.python, Path(folder))
        rounds.append(figures)
        print(json.dumps(figures), flush=True)
    pairs = (
        [("script", "twin")] if asked.twin else [(n, "stopwatch") for n in ("page", "one_factor")]
    )
    ratios = {
        f"{above}_over_{below}": {
            part: [one[f"{above}_ms"][part] / one[f"{below}_ms"][part] for one in rounds]
            for part in rounds[0][f"{below}_ms"]
            if all(part in one[f"{name}_ms"] for one in rounds for name in (above, below))
        }
        for above, below in pairs
    }
    document = {"command": command, "machine": machine_facts(), "versions": versions()}
    write_json(asked.json, document | {"rounds": rounds, "ratios": ratios})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        _, _, inside_found, inside_checkout, *sys.argv[1:] = sys.argv
        stopwatch(inside_checkout, inside_found)
    else:
        main()
