"""The benchmark of the ``benchmark`` notebook: measured there, or read from a finished file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_core.config import Parameters
from dlrm_studies.bench import cases
from dlrm_studies.bench.analyse import read_benchmark
from dlrm_studies.bench.embeddings_show import DEFAULT, read_embeddings
from dlrm_studies.bench.measure import BENCHMARK, BenchEffort, BenchPlan, Others, run_plan
from dlrm_workbook.evidence.contestants import PEER
from dlrm_workbook.ground.bar import Bar


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
    plan: BenchPlan | None = None
    document: dict[str, Any] = field(default_factory=dict)
    embeddings: dict[str, Any] | None = None

    def measure(self, say: Callable[[str], object] = lambda text: None) -> None:
        """Run what is to be measured; ``say`` is called with a line a run.

        Raises:
            InputError: the file cannot be written, or none of our own contestants ran.
        """
        if self.plan is None:
            return
        self.document = run_plan(self.plan, self.file, say=say)
        for case in self.document["cases"]:
            failures = {n: why for n, why in case["failures"].items() if n != PEER}
            if not case["contestants"]:
                why = next(iter(failures.values()), "no contestant ran")
                raise InputError(f"{case['case']}: nothing was measured: {why}")

    def bar(self) -> Bar:
        """Live progress of :meth:`measure`, over all processes; a line of a step ends one."""
        total = 0 if self.plan is None else self.plan.runs
        return Bar("in turns", "run", total, shown=total > 0, counts=lambda text: ": step " in text)


def start_benchmark(
    parameters: Parameters,
    folder: Path,
    *,
    results: str = "",
    others: Others | None = None,
    shapes: Sequence[str] = (),
    growth: Sequence[str] = (),
    effort: BenchEffort | None = None,
) -> Benchmark:
    """The benchmark that a notebook's parameters ask for.

    Args:
        parameters: the tuned contestant, or, if they have no option for speed, the plain one;
            the other is the same training without, or with, those of tuned.yaml.
        folder: gets ``benchmark.json``.
        results: a finished benchmark's JSON; nothing is measured then, and the embeddings'
            benchmark is the ``embeddings.json`` beside it, if there is one.
        others: contestants beside these two.
        shapes: names of shapes; empty: the parameters as they are, unless ``growth`` is given.
        effort: how much is measured; the bare work of each round always is. With no round only
            the page's other sections are measured, as far as they are asked for.

    Raises:
        InputError: a name or count cannot be used, or a file is no benchmark.
    """
    if results:
        file = Path(results).expanduser().absolute()
        beside = file.with_name(DEFAULT.name)
        embeddings = read_embeddings(str(beside) if beside.is_file() else "")
        document = read_benchmark(file)
        sentence = f"This page shows the benchmark in `{file}`, measured on {document['date']}."
        return Benchmark(sentence, file, None, document, embeddings)
    if effort is not None and not effort.rounds:
        sentence = "The contestants were not timed in turns: `rounds` is 0."
        return Benchmark(sentence, folder / BENCHMARK.name, document={"cases": []})
    others = others or Others()
    chosen = cases.shape_cases(",".join(shapes), "shapes") + cases.growth_cases(
        ",".join(growth), "growth"
    )
    plan = BenchPlan(
        cases.plain_of(parameters),
        cases.tuned_of(parameters),
        replace(others, precisions=cases.precisions_of(others.precisions)),
        chosen or [cases.AS_GIVEN],
        replace(effort or BenchEffort(), bare=True),
    )
    sentence = "Measured now, on this machine: every contestant in turns, in fresh processes."
    return Benchmark(sentence, folder / BENCHMARK.name, plan, {}, read_embeddings())
