"""The benchmark of the ``benchmark`` notebook: measured there, or read from a finished file."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrm_core.config import Parameters
from dlrm_core.errors import InputError
from dlrm_core.files import read_json, write_json
from dlrm_core.progress import Bar
from dlrm_workbook.studies.bench.analyse import losses
from dlrm_workbook.studies.bench.cases import (
    AS_GIVEN,
    PEER,
    ablated,
    growth_cases,
    plain_of,
    shape_cases,
    tuned_of,
)
from dlrm_workbook.studies.bench.command import Plan, run_plan
from dlrm_workbook.studies.bench.embeddings_show import DEFAULT, read_embeddings
from dlrm_workbook.studies.bench.ledger import SCHEMA
from dlrm_workbook.studies.protocols.measure import read_document
from dlrm_workbook.studies.stability.measure import (
    SUMMARY,
    Stability,
    measure_stability,
    read_stability,
)


@dataclass
class Benchmark:
    """A benchmark's document, once it is there.

    Attributes:
        sentence: what this page shows.
        plan: what is to be measured; None of a finished one.
        file: where the document is, or will be.
        embeddings: the document of ``dlrm bench --embeddings``, if there is one.
    """

    sentence: str
    file: Path
    plan: Plan | None = None
    document: dict[str, Any] = field(default_factory=dict)
    embeddings: dict[str, Any] | None = None

    def measure(self, say: Any = None) -> None:
        """Run what is to be measured; ``say`` is called with a line a run.

        Raises:
            InputError: the file cannot be written, or none of our own contestants ran.
        """
        if self.plan is None:
            return
        self.document = run_plan(self.plan, self.file, say=say or (lambda text: None))
        for case in self.document["cases"]:
            failures = {n: why for n, why in case["failures"].items() if n != PEER}
            if not case["contestants"]:
                why = next(iter(failures.values()), "no contestant ran")
                raise InputError(f"{case['case']}: nothing was measured: {why}")

    def bar(self) -> Bar:
        """Live progress of :meth:`measure`, over all processes; a line of a step ends one."""
        total, unit = self.runs, "run"
        return Bar("in turns", unit, total, shown=total > 0, counts=lambda text: ": step " in text)

    @property
    def runs(self) -> int:
        """How many processes there are to run; 0 of a finished benchmark."""
        plan = self.plan
        if plan is None:
            return 0
        who = len(plan.contestants) + (plan.peer is not None) + plan.torchrec
        count = len(plan.cases) * who
        if plan.ablation:
            last = list(plan.contestants.values())[-1]
            count += 2 + len(ablated(plan.plain, last))
        return count * plan.rounds * len(plan.threads)

    @property
    def same_training(self) -> bool:
        """Whether no contestant's losses are further off than its precision explains."""
        return all(case.get("losses_agree") is not False for case in self.document["cases"])

    @property
    def losses(self) -> Any:
        """Differences of the losses, a table (see
        :func:`dlrm_workbook.studies.bench.analyse.losses`).
        """
        return losses(self.document)


def start(
    parameters: Parameters,
    folder: Path,
    *,
    results: str = "",
    embeddings: str = "",
    peer: str = "",
    torchrec: bool = False,
    precisions: Sequence[str] = (),
    shapes: Sequence[str] = (),
    growth: Sequence[str] = (),
    ablation: bool = False,
    roofline: bool = True,
    rounds: int = 5,
    iterations: int = 8,
    threads: Sequence[int] = (1,),
    cores: int = 0,
) -> Benchmark:
    """The benchmark that a notebook's parameters ask for.

    Args:
        parameters: the tuned contestant, or, if they have no option for speed, the plain one;
            the other is the same training without, or with, those of tuned.yaml.
        folder: gets ``benchmark.json``.
        results: a finished benchmark's JSON; nothing is measured then.
        embeddings: JSON of ``dlrm bench --embeddings``; empty: ``embeddings.json`` beside
            the results, else that in benchmarks/results, if there is one.
        peer: a facebookresearch/dlrm checkout.
        shapes: names of shapes; empty: the parameters as they are, unless ``growth`` is given.
        cores: cores that each contestant is confined to; 0: all.

    Raises:
        InputError: a name or count cannot be used, or a file is no benchmark.
    """
    if results:
        file = Path(results).expanduser().absolute()
        beside = file.with_name(DEFAULT.name)
        embeddings = embeddings or (str(beside) if beside.is_file() else "")
    found = read_embeddings(embeddings)
    if results:
        document = read_benchmark(file)
        sentence = f"This page shows the benchmark in `{file}`, measured on {document['date']}."
        return Benchmark(sentence, file, None, document, found)
    cases = [*shape_cases(",".join(shapes)), *growth_cases(",".join(growth))]
    plan = Plan(
        plain_of(parameters),
        tuned_of(parameters),
        [precision for precision in precisions if precision != "fp32"],
        cases or [AS_GIVEN],
        Path(peer).expanduser() if peer else None,
        torchrec,
        rounds,
        iterations,
        threads,
        cores or None,
        ablation,
        roofline,
    )
    sentence = "Measured now, on this machine: every contestant in turns, in fresh processes."
    return Benchmark(sentence, folder / "benchmark.json", plan, {}, found)


def read_benchmark(file: Path) -> dict[str, Any]:
    """The document of a benchmark.

    Raises:
        InputError: the file is none of this version's.
    """
    document = read_json(file)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise InputError(f"{file}: is no benchmark of this version (schema {SCHEMA}); run it again")
    return document


# What the ``benchmark`` notebook measures besides contestants: protocols, and N seeds.

RECORD = "protocols.json"


def protocols(
    parameters: Parameters,
    folder: Path,
    iterations: int,
    batch_sizes: Sequence[int],
    results: str = "",
) -> dict[str, Any] | None:
    """The document of ``dlrm protocols``, measured now in a fresh process.

    Args:
        folder: gets ``protocols.json``.
        iterations: of training; 0: nothing is measured.
        batch_sizes: of inference.
        results: a finished benchmark: nothing is measured, the record beside it is read.

    Returns:
        None where nothing was measured.

    Raises:
        InputError: the run cannot be made; the message is the process's own.
    """
    if results:
        beside = Path(results).expanduser().absolute().with_name(RECORD)
        return read_document(beside) if beside.exists() else None
    if not iterations:
        return None
    record, given = folder / RECORD, folder / "protocols-parameters.json"
    write_json(given, _once(parameters).to_sections())
    command = [
        *(sys.executable, "-m", "dlrm_core", "protocols", "-f", str(given)),
        *("--iterations", str(iterations), "--seconds", "4", "--json", str(record)),
        *("--batch-sizes", ",".join(map(str, batch_sizes))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise InputError(said[-1].removeprefix("dlrm protocols: "))
    return read_document(record)


def _once(parameters: Parameters) -> Parameters:
    """Without what belongs to a run of its own: checkpoints, a sweep."""
    training = dataclasses.replace(
        parameters.training, resume="", checkpoint_every=None, checkpoint_folder=""
    )
    return dataclasses.replace(parameters, training=training, sweep={})


def stability(
    parameters: Parameters, folder: Path, seeds: int, finished: str = ""
) -> dict[str, Stability]:
    """Trainings with N seeds, by label; none if none were asked for.

    Args:
        folder: gets a folder ``stability``.
        seeds: how many are trained now; 0: none.
        finished: a folder of ``dlrm stability``, or one that holds several, each named by
            what sets it apart (``fp32``, ``bf16``).

    Raises:
        InputError: no such folder, or it holds no result.
    """
    if finished:
        place = Path(finished).expanduser().absolute()
        if (place / SUMMARY).is_file():
            return {_label(found := read_stability(place)): found}
        found_in = sorted(file.parent for file in place.glob(f"*/{SUMMARY}"))
        if not found_in:
            raise InputError(f"stability: {place} holds no {SUMMARY} of dlrm stability")
        return {one.name: read_stability(one) for one in found_in}
    if not seeds:
        return {}
    made = measure_stability(parameters, range(seeds), folder / "stability")
    return {_label(made): made}


def _label(found: Stability) -> str:
    return str(found.parameters.get("training", {}).get("precision", "")) or found.title
