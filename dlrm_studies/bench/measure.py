"""A benchmark: step times side by side, interleaved, each run in a fresh process.

A plan says who runs what; :func:`run_plan` measures case after case and keeps every run in
the JSON file as soon as it ends, so that a benchmark that is killed has lost one run, and
goes on with ``--resume``.

Its ``cases`` (``kind``: ``shape``, ``growth``, ``ablation``) have ``runs``, from which all else is
computed: ``contestants`` (medians), ``ratios`` over ``against``, ``loss_difference``, ``bare``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.base.machine import resolve_device
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_studies.bench.bare import (
    describe_bare,
    judge_bare,
    product_kind,
    time_round,
)
from dlrm_studies.bench.cases import (
    AS_GIVEN,
    BF16X2,
    PLAIN,
    TORCHREC,
    Case,
    ablated,
    case_facts,
    of_case,
    tuned_contestants,
    why_no_bf16x2,
)
from dlrm_studies.bench.torchrec import require_torchrec, run_torchrec
from dlrm_studies.runs import Record
from dlrm_workbook.analysis.changes import difference
from dlrm_workbook.evidence import contestants
from dlrm_workbook.ground.ledger import Ledger, require_same
from dlrm_workbook.ground.machine import machine_facts

BENCHMARK = Record("benchmark.json", "benchmark", 2)

RESUME_ADVICE = "leave --resume out or give another --json"

MOST_THREADS = 1024
"""Of training.threads too: with ever more, the OpenMP library ends the process."""

ABLATION = Case("ablation", "each option switched off alone, and added one by one", {})


@dataclass(frozen=True)
class BenchEffort:
    """How much is measured.

    Attributes:
        threads: CPU threads; every case runs with each count.
        cores: every contestant is confined to so many; None is all.
        ablation: also measure each option of the last contestant on its own.
        bare: in each round of a shape also time the bare products and rows (CPU).
    """

    rounds: int = 5
    iterations: int = 8
    threads: Sequence[int] = (1,)
    cores: int | None = None
    ablation: bool = False
    bare: bool = False

    def __post_init__(self) -> None:
        if not self.threads or min(self.threads) < 1 or max(self.threads) > MOST_THREADS:
            raise InputError(
                f"threads is {list(self.threads)}, expected counts from 1 to {MOST_THREADS}"
            )


@dataclass(frozen=True)
class Others:
    """Contestants beside the plain and the tuned one.

    Attributes:
        precisions: tuned in these.
        peer: a facebookresearch/dlrm checkout.
        torchrec: TorchRec's DLRM.
    """

    precisions: Sequence[str] = ()
    peer: Path | None = None
    torchrec: bool = False


@dataclass(frozen=True)
class BenchPlan:
    """Who runs what, how often.

    Attributes:
        plain: the reference, for losses and for the peers' shape.
        tuned: the same training with options for speed.
        run_plain: the plain contestant runs, too; without it the first tuned one is the
            reference for losses, facebookresearch/dlrm's among them.
    """

    plain: Parameters
    tuned: Parameters
    others: Others = Others()
    cases: Sequence[Case] = (AS_GIVEN,)
    effort: BenchEffort = BenchEffort()
    run_plain: bool = True

    def __post_init__(self) -> None:
        rounds, iterations = self.effort.rounds, self.effort.iterations
        if rounds < 1 or iterations < 1:
            raise InputError(
                f"a benchmark needs rounds >= 1 and iterations >= 1, not {rounds} and {iterations}"
            )
        if self.others.peer is not None:
            contestants.require_peer(self.others.peer)
            if self.plain.model.interaction not in contestants.PEER_INTERACTIONS:
                known = " and ".join(map(repr, contestants.PEER_INTERACTIONS))
                raise InputError(
                    f"model.interaction is {self.plain.model.interaction!r}, but "
                    f"facebookresearch/dlrm has {known} only; leave --peer out"
                )
            if self.plain.data.multi_hot_sizes is not None:
                raise InputError(
                    "data.multi_hot_sizes is given, but facebookresearch/dlrm has bags of one "
                    "size; leave --peer out"
                )
        for case in self.cases:
            for name, given in self.contestants.items():
                of_case(name, given, case)

    @property
    def contestants(self) -> dict[str, Parameters]:
        """Name to parameters of our own ones; the first is the reference."""
        plain = {PLAIN: self.plain} if self.run_plain else {}
        return plain | tuned_contestants(self.tuned, self.others.precisions)

    @property
    def runs(self) -> int:
        """How many processes there are to run."""
        who = len(self.contestants) + (self.others.peer is not None) + self.others.torchrec
        count = len(self.cases) * who
        if self.effort.ablation:
            name, last = list(self.contestants.items())[-1]
            count += 1 + len(ablated(self.plain, last, name))
        return count * self.effort.rounds * len(self.effort.threads)


# The document: every run is in it as soon as it ends.


def heading(kind: str, schema: int, command: str) -> dict[str, Any]:
    """The beginning of a benchmark's document."""
    return {
        "kind": kind,
        "schema": schema,
        "commands": [command] if command else [],
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine_facts(),
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
    }


def open_ledger(plan: BenchPlan, file: Path | None, command: str, resume: bool) -> Ledger:
    """A new document, or the one in the file to go on with.

    Raises:
        InputError: that is of other settings, another machine or other versions.
    """
    ours = plan.contestants
    document = heading("dlrm bench", BENCHMARK.schema, command) | {
        "settings": {
            "iterations": plan.effort.iterations,
            "warmup": contestants.WARMUP,
            "cores": plan.effort.cores,
            "reference": plan.plain.to_sections(),
            "contestants": {name: difference(plan.plain, given) for name, given in ours.items()},
            "environment": {
                str(count): contestants.settings(count) for count in plan.effort.threads
            },
        },
        "cases": [],
        "not_measured": _not_measured(plan),
    }
    asked = document["settings"]

    def work(begun: Mapping[str, Any]) -> Mapping[str, Any]:
        """What must be equal for runs to be compared."""
        if begun["schema"] != BENCHMARK.schema:
            raise ValueError("another schema")
        had = begun["settings"]
        reference = had["reference"]
        with contextlib.suppress(InputError):
            # parameters that an earlier version did not have are at their defaults
            reference = parameters_from_sections(reference).to_sections()
        return {
            **{name: had[name] for name in ("iterations", "warmup", "cores")},
            "reference": reference,
            # others may join
            "contestant": {
                name: had["contestants"].get(name, change)
                for name, change in asked["contestants"].items()
            },
            "processor": begun["machine"].get("cpu"),
            "versions": begun["versions"],
        }

    ledger = ledger_of_cases(file, document, work, resume)
    if ledger.resumed:
        begun = ledger.document
        for name in ("contestants", "environment"):
            asked[name] = begun["settings"][name] | asked[name]
        kept = {name: begun[name] for name in ("cases", "commands")}
        ledger.document |= document | kept
    return ledger


def ledger_of_cases(
    file: Path | None,
    document: dict[str, Any],
    work: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    resume: bool,
) -> Ledger:
    """A benchmark's document with its cases, new or in the file to go on with.

    Args:
        work: what of a document must be equal to go on with it.
    """
    ledger = Ledger(
        file,
        document,
        work=work,
        entries="cases",
        key=("case", "threads"),
        advice=RESUME_ADVICE,
        resume=resume,
    )
    begun = ledger.document
    begun["commands"] = list(dict.fromkeys([*begun["commands"], *document["commands"]]))
    return ledger


def _not_measured(plan: BenchPlan) -> dict[str, str]:
    reasons = {}
    if not torch.cuda.is_available():
        reasons["gpu"] = "torch sees no GPU on this machine; make gpu-check measures on one"
    if reason := why_no_bf16x2(plan.tuned):
        reasons[BF16X2] = reason
    return reasons


# Measuring.

Say = Callable[[str], object]


def run_plan(
    plan: BenchPlan,
    file: Path | None = None,
    *,
    command: str = "",
    resume: bool = False,
    say: Say = lambda text: None,
    show: Say = lambda text: None,
    run: Callable[[Parameters, int, int], contestants.Run] = contestants.run_ours,
) -> dict[str, Any]:
    """Measure everything.

    Args:
        file: gets the results as JSON, whole after every run.
        resume: go on with ``file``: what is in it is not measured again, and cases that
            are not of this plan stay.
        say: called with a line a run.
        show: called with the text of each case that is finished.
        run: runs one of our own contestants.

    Returns:
        the document that is in ``file``.

    Raises:
        InputError: ``file`` cannot be written, or contains a benchmark of other settings.
        MissingToolError: a contestant needs a package that is not installed; what was
            measured before is in ``file``.
    """
    if plan.others.torchrec:
        require_torchrec()
    ledger = open_ledger(plan, file, command, resume)
    measurement = _Measurement(plan, ledger, say, run)
    with contestants.cores_of(plan.effort.cores) as cores:
        ledger.document["settings"]["usable_cores"] = cores
        ledger.save()
        for threads in plan.effort.threads:
            for case in plan.cases:
                results = measurement.case(case, threads)
                floor = [describe_bare(results["bare"])] if "bare" in results else []
                show("\n".join([contestants.describe(results), *floor]))
            if plan.effort.ablation:
                show(contestants.describe(measurement.ablation(threads)))
    return ledger.document


@dataclass(frozen=True)
class _Measurement:
    """A plan being run; every run is put into the ledger as it ends."""

    plan: BenchPlan
    ledger: Ledger
    say: Say
    run: Callable[[Parameters, int, int], contestants.Run]

    def case(self, case: Case, threads: int) -> dict[str, Any]:
        """Run one case with all contestants."""
        plan = self.plan
        ours = {name: of_case(name, given, case) for name, given in plan.contestants.items()}
        iterations = min(plan.effort.iterations, case.iterations or plan.effort.iterations)
        plain = of_case(PLAIN, plan.plain, case)
        extra: dict[str, Callable[[], contestants.Run]] = {}
        if plan.others.torchrec:
            # it has no data of its own: it gets ours as fast as we make them
            given = dataclasses.replace(plain, data=of_case(PLAIN, plan.tuned, case).data)
            extra[TORCHREC] = lambda: run_torchrec(given, iterations, threads)
        facts = case_facts(case, plain) | {"threads": threads, "iterations": iterations}
        on_cpu = resolve_device(plan.plain.training).type == "cpu"
        bare = plan.effort.bare and on_cpu and case.kind == "shape"
        return self._compare(facts, ours, plan.others.peer, extra, bare)

    def ablation(self, threads: int) -> dict[str, Any]:
        """The last contestant without each of its options, and the way to it from plain."""
        plan = self.plan
        name, tuned = list(plan.contestants.items())[-1]
        variants = ablated(plan.plain, tuned, name)
        ours = {PLAIN: plan.plain, name: tuned} | {facts["name"]: p for facts, p in variants}
        facts = case_facts(ABLATION, plan.plain) | {
            "kind": "ablation",
            "threads": threads,
            "iterations": plan.effort.iterations,
            "ablated": {
                "base": PLAIN,
                "all": name,
                "variants": [facts for facts, _ in variants],
            },
        }
        return self._compare(facts, ours, None, {})

    def _compare(
        self,
        facts: dict[str, Any],
        ours: Mapping[str, Parameters],
        peer: Path | None,
        extra: Mapping[str, Callable[[], contestants.Run]],
        bare: bool = False,
    ) -> dict[str, Any]:
        """Run the contestants of a case in turns, keeping each run, and judge them.

        Args:
            bare: also time the bare products and rows in each round.
        """
        case, threads = facts["case"], facts["threads"]
        before = self.ledger.find(case, threads) or {}
        if before:
            names = ("change", "tuned_change", "iterations", "ablated")
            begun, now = ({name: entry.get(name) for name in names} for entry in (before, facts))
            require_same(f"{self.ledger.path}: {case}", begun, now, RESUME_ADVICE)
        rows: list[contestants.Row] = list(before.get("runs") or [])
        floors: list[dict[str, Any]] = list(before.get("bare_rounds") or [])
        kinds = {name: product_kind(given) for name, given in ours.items()}

        def keep(row: contestants.Row) -> None:
            self.ledger.put({**before, **facts, "runs": rows, "bare_rounds": floors})
            self.say(
                f"{case}, {threads} threads, round {row['round'] + 1}/{self.plan.effort.rounds}, "
                f"{row['contestant']}: step {row['step_ms']:.1f} ms, end to end "
                f"{row['end_to_end_ms']:.1f} ms"
            )

        def lost(name: str, error: InputError) -> None:
            if isinstance(error, MissingToolError):
                # a minute's installation; without it an hour's ratios would be over nobody
                raise error
            self.say(f"{case}, {threads} threads, {name} FAILED: {error}")

        def time_bare(number: int) -> None:
            if any(one["round"] == number for one in floors):
                return
            try:
                times = time_round(
                    next(iter(ours.values())), list(dict.fromkeys(kinds.values())), threads
                )
            except InputError as error:
                times = {"reasons": {"all": str(error)}}
            floors.append({"round": number} | times)
            self.say(f"{case}, {threads} threads, round {number + 1}: bare products and rows")

        judged = contestants.compare(
            ours,
            peer=peer,
            rounds=self.plan.effort.rounds,
            iterations=facts["iterations"],
            threads=threads,
            run=self.run,
            extra=extra,
            rows=rows,
            on_run=keep,
            on_failure=lost,
            each_round=time_bare if bare else None,
        )
        if floors:
            others = [
                name for name in (contestants.PEER, TORCHREC) if name in judged["contestants"]
            ]
            every = dict.fromkeys(others, "fp32") | kinds
            judged |= {"bare_rounds": floors, "bare": judge_bare(floors, rows, every)}
        self.ledger.put(facts | judged)
        return facts | judged
