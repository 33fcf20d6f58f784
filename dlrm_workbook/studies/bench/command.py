"""``dlrm bench``: step times side by side, interleaved, each run in a fresh process.

A plan says who runs what; :func:`run_plan` measures case after case and keeps every run in
the JSON file as soon as it ends, so that a benchmark that is killed has lost one run, and
goes on with ``--resume``.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_core.config import Parameters, load_parameters
from dlrm_core.errors import InputError
from dlrm_workbook.evidence.probes import reduced
from dlrm_workbook.studies.bench.cases import (
    AS_GIVEN,
    PEER,
    PLAIN,
    PRESETS,
    TORCHREC,
    TUNED,
    Ablated,
    Case,
    ablated,
    case_facts,
    contestants,
    differences,
    growth_cases,
    of_case,
    plain_of,
    precisions_of,
    shape_cases,
    steps_of,
    tuned_of,
)
from dlrm_workbook.studies.bench.ledger import Ledger
from dlrm_workbook.studies.bench.rounds import Row, compare, is_missing_tool
from dlrm_workbook.studies.bench.runs import (
    WARMUP,
    Run,
    cores_of,
    require_peer,
    run_ours,
    settings,
)
from dlrm_workbook.studies.bench.shares import KINDS, measure_share
from dlrm_workbook.studies.bench.text import describe, describe_share, missing_peer

__all__ = ["Plan", "bench", "compare", "describe", "run_plan"]

MOST_THREADS = 1024
"""Of training.threads too: with ever more, the OpenMP library ends the process."""

ABLATION = Case("ablation", "each option switched off alone, and added one by one", {})


@dataclass(frozen=True)
class Plan:
    """Who runs what, how often.

    Attributes:
        plain: the reference, for losses and for the peers' shape.
        tuned: the same training with options for speed.
        precisions: further contestants: tuned in these.
        threads: CPU threads; every case runs with each count.
        cores: every contestant is confined to so many; None is all.
        ablation: also measure each option of the last contestant on its own.
        roofline: also measure the shares of this machine's limits.
    """

    plain: Parameters
    tuned: Parameters
    precisions: Sequence[str] = ()
    cases: Sequence[Case] = (AS_GIVEN,)
    peer: Path | None = None
    torchrec: bool = False
    rounds: int = 5
    iterations: int = 8
    threads: Sequence[int] = (1,)
    cores: int | None = None
    ablation: bool = False
    roofline: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.iterations < 1:
            raise InputError(
                f"a benchmark needs rounds >= 1 and iterations >= 1, not {self.rounds} and "
                f"{self.iterations}"
            )
        if not self.threads or min(self.threads) < 1 or max(self.threads) > MOST_THREADS:
            raise InputError(
                f"threads is {list(self.threads)}, expected counts from 1 to {MOST_THREADS}"
            )
        if self.peer is not None:
            require_peer(self.peer)
        for case in self.cases:
            for name, given in self.contestants.items():
                of_case(name, given, case)

    @property
    def contestants(self) -> dict[str, Parameters]:
        """Name to parameters of our own ones."""
        return contestants(self.plain, self.tuned, self.precisions)

    def settings(self) -> dict[str, Any]:
        """What must be equal for runs to be compared; see
        :mod:`dlrm_workbook.studies.bench.ledger`.
        """
        return {
            "iterations": self.iterations,
            "warmup": WARMUP,
            "cores": self.cores,
            "reference": self.plain.to_sections(),
            "contestants": {
                name: differences(self.plain, given) for name, given in self.contestants.items()
            },
        }


def bench(arguments: argparse.Namespace) -> int:
    """``dlrm bench``: print the ratios; with ``--json`` keep every run as it ends.

    Returns:
        0; 1 if a contestant failed or does not train the same.
    """
    if arguments.resume and not arguments.json:
        raise InputError("--resume goes on with the benchmark in --json FILE, but none is given")
    if arguments.embeddings:
        from dlrm_workbook.studies.bench.embeddings import bench_embeddings

        return bench_embeddings(arguments)
    plan = plan_of(arguments)
    file = Path(arguments.json) if arguments.json else None
    # to be repeated anywhere: where the checkout lies here is nobody's business
    command = " ".join("DIR" if word == arguments.peer else word for word in arguments.argv)
    results = run_plan(
        plan,
        file,
        command=command,
        resume=arguments.resume,
        say=lambda text: print(text, file=sys.stderr, flush=True),
        show=lambda text: print(text + "\n", flush=True),
    )
    return exit_status(results["cases"])


def exit_status(cases: Sequence[Mapping[str, Any]]) -> int:
    """1 if a contestant failed or trained something else, said once of a missing package.

    A case that an earlier call was cut short in has its runs alone: nothing is wrong with it.
    """
    finished = [case for case in cases if "failures" in case]
    sentences = [missing_peer(case["failures"]) for case in finished]
    if said := next(filter(None, sentences), None):
        print(f"dlrm bench: {said}", file=sys.stderr)
    fine = all(case["losses_agree"] is not False and not case["failures"] for case in finished)
    return 0 if fine else 1


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The plan that the command line asks for.

    Raises:
        InputError: a name or count cannot be used.
    """
    if arguments.file:
        given = load_parameters(arguments.file, arguments.parameter)
        plain = (
            load_parameters(arguments.reference, arguments.parameter)
            if arguments.reference
            else plain_of(given)
        )
        tuned = tuned_of(given)
    else:
        reference = arguments.reference or PRESETS / "seed.yaml"
        plain = load_parameters(reference, arguments.parameter)
        tuned = load_parameters(PRESETS / "tuned.yaml", arguments.parameter)
    cases = [*shape_cases(arguments.shape or ""), *growth_cases(arguments.growth or "")]
    try:
        threads = [int(count) for count in str(arguments.threads).split(",")]
    except ValueError:
        raise InputError(f"--threads is '{arguments.threads}', expected counts: 1,2") from None
    return Plan(
        plain,
        tuned,
        precisions_of(arguments.precision),
        cases or ([] if arguments.ablation else [AS_GIVEN]),
        Path(arguments.peer) if arguments.peer else None,
        arguments.torchrec,
        arguments.rounds,
        arguments.iterations,
        threads,
        arguments.cores,
        arguments.ablation,
        arguments.roofline,
    )


def run_plan(
    plan: Plan,
    file: Path | None = None,
    *,
    command: str = "",
    resume: bool = False,
    say: Callable[[str], object] = lambda text: None,
    show: Callable[[str], object] = lambda text: None,
    run: Callable[[Parameters, int, int], Run] = run_ours,
) -> dict[str, Any]:
    """Measure everything.

    Args:
        file: gets the results as JSON, whole after every run.
        resume: go on with ``file``: what is in it is not measured again, and cases that
            are not of this plan stay.
        say: called with a line a run.
        show: called with the text of each case that is finished.

    Returns:
        the document that is in ``file``, see docs/benchmark.md.

    Raises:
        InputError: ``file`` cannot be written, or holds a benchmark of other settings.
    """
    ledger = Ledger.open(
        file,
        plan.settings() | {"environment": {str(n): settings(n) for n in plan.threads}},
        command,
        resume,
    )
    with cores_of(plan.cores) as cores:
        ledger.document["settings"]["usable_cores"] = cores
        ledger.save()
        for threads in plan.threads:
            absent: dict[str, str] = {}
            for case in plan.cases:
                _run_case(plan, case, threads, ledger, absent, say, run)
                show(describe(ledger.case(case, threads)))
            if plan.ablation:
                _run_ablation(plan, threads, ledger, say, run)
                show(describe(ledger.case(ABLATION, threads)))
            if plan.roofline:
                _measure_shares(plan, threads, ledger, say, show)
    return ledger.document


def _run_case(
    plan: Plan,
    case: Case,
    threads: int,
    ledger: Ledger,
    absent: dict[str, str],
    say: Callable[[str], object],
    run: Callable[[Parameters, int, int], Run],
) -> None:
    """One case; who lacks a tool (``absent``) is not tried again."""
    ours = {name: of_case(name, given, case) for name, given in plan.contestants.items()}
    iterations = min(plan.iterations, case.iterations or plan.iterations)
    extra: dict[str, Callable[[], Run]] = {}
    if plan.torchrec:
        # it has no data of its own: it gets ours as fast as we make them
        given = dataclasses.replace(ours[PLAIN], data=ours[TUNED].data)
        extra[TORCHREC] = lambda: _run_torchrec(given, iterations, threads)
    facts = case_facts(case, ours[PLAIN]) | {"threads": threads, "iterations": iterations}
    _compare(plan, case, facts, ours, plan.peer, extra, absent, ledger, say, run)


def _run_ablation(
    plan: Plan,
    threads: int,
    ledger: Ledger,
    say: Callable[[str], object],
    run: Callable[[Parameters, int, int], Run],
) -> None:
    """The last contestant without each of its options, and the way to it from the plain one."""
    name, tuned = list(plan.contestants.items())[-1]
    variants = ablated(plan.plain, tuned)
    leaf, *also = steps_of(plan.plain, tuned)[-1]
    last = Ablated(name, "ladder", leaf, differences(plan.plain, tuned)[leaf], tuned, tuple(also))
    rungs = [_ablated_facts(variant) for variant in (*variants, last)]
    ours = {PLAIN: plan.plain, name: tuned} | {v.name: v.parameters for v in variants}
    facts = case_facts(ABLATION, plan.plain) | {
        "kind": "ablation",
        "threads": threads,
        "iterations": plan.iterations,
        "ablated": {"base": PLAIN, "all": name, "variants": rungs},
    }
    _compare(plan, ABLATION, facts, ours, None, {}, {}, ledger, say, run)


def _ablated_facts(variant: Ablated) -> dict[str, Any]:
    facts = {name: getattr(variant, name) for name in ("name", "kind", "leaf", "value")}
    return facts | {"also": list(variant.also)}


def _compare(
    plan: Plan,
    case: Case,
    facts: dict[str, Any],
    ours: Mapping[str, Parameters],
    peer: Path | None,
    extra: Mapping[str, Callable[[], Run]],
    absent: dict[str, str],
    ledger: Ledger,
    say: Callable[[str], object],
    run: Callable[[Parameters, int, int], Run],
) -> None:
    """Run the contestants of a case in turns, keeping each run, and judge them."""
    threads = facts["threads"]
    before = ledger.resumable(case, threads, facts)
    rows: list[Row] = list(before.get("runs") or [])
    failures = dict(absent)

    def keep(row: Row) -> None:
        ledger.put(case, threads, {**before, **facts, "runs": rows})
        say(
            f"{facts['case']}, {threads} threads, round {row['round'] + 1}/{plan.rounds}, "
            f"{row['contestant']}: step {row['step_ms']:.1f} ms, end to end "
            f"{row['end_to_end_ms']:.1f} ms"
        )

    def lost(name: str, error: InputError) -> None:
        say(f"{facts['case']}, {threads} threads, {name} FAILED: {error}")
        if is_missing_tool(error):
            absent[name] = str(error)

    judged = compare(
        ours,
        peer=peer,
        rounds=plan.rounds,
        iterations=facts["iterations"],
        threads=threads,
        run=run,
        extra=extra,
        rows=rows,
        failures=failures,
        on_run=keep,
        on_failure=lost,
    )
    ledger.put(case, threads, facts | judged)


def _run_torchrec(parameters: Parameters, iterations: int, threads: int) -> Run:
    from dlrm_workbook.studies.bench.torchrec import run_torchrec

    return run_torchrec(parameters, iterations, threads)


def _measure_shares(
    plan: Plan,
    threads: int,
    ledger: Ledger,
    say: Callable[[str], object],
    show: Callable[[str], object],
) -> None:
    """Shares of this machine's limits, of each tuned contestant; equal halves once."""
    shares: list[dict[str, Any]] = ledger.document["shares"]
    have = {(row["what"], row["case"], row["contestant"], row["threads"]) for row in shares}
    seen: list[tuple[str, Parameters]] = []
    for case in [case for case in plan.cases if case.kind == "shape"]:
        for name, given in plan.contestants.items():
            parameters = of_case(name, given, case)
            for what in KINDS:
                half = reduced(parameters, "dense" if what == "dense" else "sparse")
                half = dataclasses.replace(half, source="", title="")
                if name == PLAIN or (what, half) in seen:
                    continue
                seen.append((what, half))
                if (what, case.name, name, threads) in have:
                    continue
                row = {"case": case.name, "contestant": name, "threads": threads, "what": what}
                say(f"{case.name}, {threads} threads, {name}: share of the {what} part's limit")
                try:
                    row |= measure_share(what, parameters, threads)
                except InputError as error:
                    row |= {"share": None, "reason": str(error)}
                shares.append(row)
                ledger.save()
                show(describe_share(row))


def peer_name(against: str) -> str:
    """Whom a ratio compares with, as a reader calls it."""
    names = {PEER: "facebookresearch/dlrm", PLAIN: "our plain reference", TORCHREC: "TorchRec"}
    return names.get(against, against)
