"""What the ``scaling`` notebook needs: a record of ranks, a network, and predictions from both.

Three sources of what a rank computes, the first that there is: the record's profile of one
process (measured on TorchRec, alone and beside others), this machine's parts timed without
TorchRec, or the data sheet of a GPU that the notebook's parameters name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from dlrm_core.config import Parameters
from dlrm_core.errors import InputError, MissingToolError
from dlrm_core.files import read_json, write_json
from dlrm_core.machine import REPOSITORY
from dlrm_core.parts import parse_span
from dlrm_core.progress import Bar
from dlrm_workbook.analysis.devices import device
from dlrm_workbook.analysis.findings.finding import Finding
from dlrm_workbook.analysis.findings.ranks import scaling_findings
from dlrm_workbook.analysis.ranks.check import own_profile
from dlrm_workbook.analysis.ranks.choice import (
    Choice,
    Setting,
    best_sharding,
    rank_memory,
    scaling_table,
)
from dlrm_workbook.analysis.ranks.communication import (
    Study,
    full_size,
    study_of,
    volumes_by_sharding,
)
from dlrm_workbook.analysis.ranks.links import (
    LINKS,
    Link,
    Network,
    calibrate,
    check,
    link,
    links_table,
)
from dlrm_workbook.analysis.ranks.prediction import ComputeProfile, ceiling_profile, steady
from dlrm_workbook.analysis.ranks.record import (
    ScalingRecord,
    Slowness,
    read_record,
    record_of,
    straggler_table,
)
from dlrm_workbook.analysis.ranks.schedule import Overlap
from dlrm_workbook.analysis.ranks.sharding import SHARDINGS, make_plan, maximum_ranks
from dlrm_workbook.studies.bench.notebook import read_benchmark

# One process alone: this machine's times of each part, for predictions without TorchRec.

PROFILE_ITERATIONS = 6
"""Of each batch size where this machine's parts are timed without TorchRec."""

WARMUP = 2


def timed_alone(
    parameters: Parameters, folder: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Parts of one ``dlrm train`` at several batch sizes, a process each.

    Args:
        folder: gets the parameters of each process.
        say: is told of each batch size that is done.

    Returns:
        Rows of a record's ``compute_profile``.

    Raises:
        InputError: a process failed.
    """
    most = parameters.training.batch_size
    rows: list[dict[str, Any]] = []
    # predictions for many ranks rest on what few samples cost
    for size in sorted({max(1, most // 64), max(1, most // 4), most}):
        rows += parts_of(parameters, size, folder)
        say(f"batch {size:,} alone")
    return rows


def parts_of(parameters: Parameters, batch_size: int, folder: Path) -> list[dict[str, Any]]:
    """Rows of ``compute_profile`` from one process of ``dlrm train`` with its spans."""
    sections = parameters.to_sections()
    sections["training"] |= {
        "batch_size": batch_size,
        "batches": WARMUP + PROFILE_ITERATIONS,
        "epochs": None,
        "max_steps": None,
        "eval_every": None,
        "auc_target": None,
        "checkpoint_every": None,
        "resume": "",
        "log_every": WARMUP + PROFILE_ITERATIONS,
        # ranks have torch's dense part, whatever one process would use
        "dense_backend": "torch",
    }
    if parameters.training.fp32_matmul.startswith("bf16"):
        sections["training"]["fp32_matmul"] = "default"
    file = folder / f"alone-{batch_size}.yaml"
    file.write_text(yaml.safe_dump(sections), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "dlrm_workbook", "train", "-f", str(file), "--spans"],
        capture_output=True,
        text=True,
        check=False,
        timeout=parameters.profiling.timeout_s,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"one process with a batch of {batch_size} failed: {last}")
    spans = json.loads(done.stdout.strip().splitlines()[-1])["spans"]
    return _profile_rows(spans, batch_size)


def _profile_rows(spans: Sequence[Any], batch_size: int) -> list[dict[str, Any]]:
    """Parts by iteration; those of the warm-up are left out."""
    ends = [end for name, _, end in spans if name.endswith("::iteration")]
    rows: dict[tuple[int, str, str], float] = {}
    for name, begun, end in spans:
        part = parse_span(name)
        if part is None:
            continue
        iteration = sum(done < begun for done in ends)
        key = (iteration, *part)
        rows[key] = rows.get(key, 0.0) + 1e-6 * (end - begun)
    return [
        {
            "concurrent": 1,
            "batch_size": batch_size,
            "iteration": iteration - WARMUP,
            "component": component,
            "phase": phase,
            "time_ms": time,
        }
        for (iteration, component, phase), time in rows.items()
        if WARMUP <= iteration < len(ends)
    ]


RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

WAY = REPOSITORY / "benchmarks" / "results" / "kalamkar_small.json"
"""``dlrm bench -f parameters/kalamkar_small.yaml --ablation --json`` of this file."""


@dataclass
class Scaling:
    """One page's record and predictions.

    Attributes:
        parameters: as they are, scaled to fit where the preset is.
        whole: the study's full size of them, else the same.
        network: what is predicted for.
        gpu: whose data sheet stands in for a measured profile; "" for none.
        ranks: numbers of ranks to measure on this node; empty: none.
        file: where the record is, or will be.
    """

    parameters: Parameters
    whole: Parameters
    network: Network
    gpu: str
    ranks: tuple[int, ...]
    file: Path
    finished: bool = False
    memory_bytes: float | None = None
    record: ScalingRecord = field(default_factory=lambda: record_of({}))
    launch: dict[str, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    # ---- measuring ------------------------------------------------------------------------

    def measure(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Run the ranks, or read what an earlier run left.

        Without TorchRec nothing runs on several ranks, which is said; the parts of one process
        are timed all the same, since predictions need them.
        """
        if self.finished:
            self.record = read_record(self.file)
            self.launch = dict(read_json(self.file).get("launch") or {})
            return
        document: dict[str, Any] = {}
        if self.ranks:
            document = self._ranks(say)
        if not document.get("compute_profile") and not self.gpu:
            say("one process alone")
            document |= {"compute_profile": timed_alone(self.parameters, self.file.parent, say)}
        document.setdefault("parameters", self.parameters.to_sections())
        write_json(self.file, document)
        self.record = record_of(document)

    def bar(self) -> Bar:
        """Live progress of :meth:`measure`: what is being measured."""
        from dlrm_workbook.studies.scaling.measure import Effort

        total = Effort().rounds * len(self.ranks) or None
        return Bar("measuring", "stage", total, shown=not self.finished)

    def _ranks(self, say: Callable[[str], None]) -> dict[str, Any]:
        from dlrm_core.distributed.step import config_of_rank
        from dlrm_workbook.studies.scaling.measure import measure_scaling

        try:
            made = measure_scaling(self.parameters, self.ranks, self.file.parent, on_progress=say)
        except MissingToolError as error:
            names = ("runs", "iterations", "parts", "collectives", "link_probe")
            return {"not_measured": dict.fromkeys(names, str(error))}
        _, self.notices = config_of_rank(self.parameters.training)
        self.launch = dict(made.get("launch") or {})
        return made

    # ---- what predictions rest on ---------------------------------------------------------

    @property
    def link(self) -> Link | None:
        """This machine's own link, if it was measured."""
        probe = self.record.link_probe
        try:
            return calibrate(probe, "this machine, measured") if len(probe) else None
        except InputError:
            return None

    @property
    def links(self) -> pd.DataFrame:
        """Links by name, this machine's first."""
        own = self.link
        return links_table((*((own,) if own else ()), *LINKS))

    @property
    def link_check(self) -> pd.DataFrame | None:
        """Measured collectives beside what the calibrated link says."""
        own = self.link
        return check(self.record.link_probe, own) if own else None

    @property
    def profile(self) -> ComputeProfile:
        """What one rank's parts cost.

        Raises:
            InputError: nothing was measured and no GPU is named.
        """
        if self.gpu:
            return ceiling_profile(self.predicts, device(self.gpu).ceilings(), device="cuda")
        if self.record.compute_profile.empty:
            raise InputError(
                "compute profile: not measured, and gpu is empty; name a GPU of a data sheet, or "
                "measure one process"
            )
        return own_profile(self.record)

    @property
    def setting(self) -> Setting:
        """What predictions for the network named by the page are made from."""
        # whoever moves the bytes there, it is not the cores that compute
        profile = replace(steady(self.profile), shares_node=False)
        if self.network.ranks_per_node > 1 and not self.gpu:
            profile = self.profile
        return Setting(self.predicts, self.network, profile, Overlap(), self.memory_bytes)

    @property
    def predicts(self) -> Parameters:
        """What is predicted: a data sheet knows no limit of size, so there the study's own."""
        return self.whole if self.gpu else self.parameters

    def batch_size(self, scaling: str) -> int:
        """Of all ranks (strong) or of each (weak): the study's where its full size is predicted."""
        if not self.gpu or self.study is None:
            return self.parameters.training.batch_size
        weak = scaling == "weak"
        return self.study.weak_batch_per_rank if weak else self.study.strong_batch

    # ---- tables ---------------------------------------------------------------------------

    @property
    def study(self) -> Study | None:
        """The study's configuration that these parameters are of."""
        return study_of(self.parameters)

    def volumes(self, ranks: int) -> pd.DataFrame:
        """Bytes of the full size on so many ranks, by sharding."""
        batch = self.study.strong_batch if self.study else self.whole.training.batch_size
        return volumes_by_sharding(self.whole, ranks, max(batch, ranks), SHARDINGS)

    def volume_ranks(self) -> int:
        """Ranks of the tables of bytes and memory: the study's, else eight."""
        most = maximum_ranks(self.whole, "table_wise")
        return min(8, most) if self.study is None else self.study.quoted_ranks

    def memory(self, ranks: int) -> pd.DataFrame:
        """Memory of every rank at full size, by sharding."""
        batch = self.study.strong_batch if self.study else self.whole.training.batch_size
        tables = []
        for name in SHARDINGS:
            plan = make_plan(self.whole, ranks, name, idle=True)
            if name == "mixed" and plan.name != "mixed":
                continue
            found = rank_memory(self.whole, plan, max(batch, ranks))
            tables.append(found.assign(sharding=name))
        return pd.concat(tables, ignore_index=True)

    def predicted(self, scaling: str, counts: Sequence[int] = RANKS) -> pd.DataFrame:
        """Predicted iterations with the best sharding at each number of ranks."""
        counts, batch = self._counts(counts, scaling), self.batch_size(scaling)
        return scaling_table(self.setting, counts, scaling, batch_size=batch)

    def by_sharding(self, counts: Sequence[int] = RANKS) -> dict[str, pd.DataFrame]:
        """The same for each sharding by its name, strong scaling."""
        strong = self._counts(counts, "strong")
        return {
            name: scaling_table(self.setting, strong, "strong", name, self.batch_size("strong"))
            for name in SHARDINGS
            if name != "mixed"
        }

    def choice(self, ranks: int) -> Choice:
        """All shardings on so many ranks, and the fastest."""
        return best_sharding(self.setting, ranks, self.batch_size("strong"))

    def stragglers(self, strong: pd.DataFrame, slowness: Slowness) -> pd.DataFrame:
        """What slow ranks cost at each predicted number of ranks."""
        known = strong[strong["mid_ms"].notna()]
        return straggler_table(
            known["compute_ms"].tolist(),
            known["exposed_ms"].tolist(),
            known["ranks"].tolist(),
            slowness,
        )

    def findings(self) -> list[Finding]:
        """What the measured runs wait for."""
        return scaling_findings(self.record, self.parameters)

    def shares(self) -> list[tuple[str, float]]:
        """Share of each component in one rank's iteration at the page's batch size."""
        profile = self.profile
        _, costs = profile.at(1)
        batch = self.predicts.training.batch_size
        totals: dict[str, float] = {}
        for (component, _), cost in costs.items():
            totals[component] = totals.get(component, 0.0) + cost.time_ms(batch).mid
        whole = sum(totals.values())
        ordered = sorted(totals.items(), key=lambda item: -item[1])
        return [(name, time / whole) for name, time in ordered if time > 0]

    def _counts(self, counts: Sequence[int], scaling: str) -> list[int]:
        batch = self.batch_size(scaling)
        return [count for count in counts if scaling == "weak" or count <= batch]

    @property
    def sentence(self) -> str:
        """What this page shows, and what of the parameters ranks do without."""
        if self.finished:
            return f"This page shows the record in `{self.file}`."
        if not self.ranks:
            return "Nothing runs on several ranks here (`ranks` is empty): predictions only."
        listed = ", ".join(map(str, self.ranks))
        shown = f"Measured now, on this machine: {listed} ranks, strong and weak."
        return "\n\n".join([shown, *(f"{notice}." for notice in self.notices)])


def start(
    parameters: Parameters,
    folder: Path,
    *,
    record: str = "",
    ranks: Sequence[int] = (1, 2, 4),
    inside: str = "",
    between: str = "OPA",
    ranks_per_node: int = 1,
    gpu: str = "",
    memory_gb: float = 0.0,
) -> Scaling:
    """The page that a notebook's parameters ask for.

    Args:
        folder: gets ``scaling.json``.
        record: a finished record to show instead of measuring.
        ranks: numbers of ranks to measure on this node.
        inside: link inside a node; needed where a node has several ranks.
        between: link between nodes; empty: one node has all ranks.
        gpu: predict for this GPU by its data sheet instead of this machine's measured parts.
        memory_gb: of one rank, 10^9 bytes; 0: the GPU's, or no limit.

    Raises:
        InputError: a name or number cannot be used.
    """
    if any(count < 1 for count in ranks):
        raise InputError(f"ranks is {list(ranks)}, expected numbers of 1 or more")
    if ranks_per_node < 1:
        raise InputError(f"ranks_per_node is {ranks_per_node}, expected at least 1")
    if ranks_per_node > 1 and not inside:
        raise InputError(
            f"inside is empty, but ranks_per_node is {ranks_per_node}: name the link inside a "
            f"node ({', '.join(known.name for known in LINKS[:3])}, ...)"
        )
    if not inside and not between:
        raise InputError("inside and between are empty: name a link to predict for")
    if inside and not between:
        network = Network(link(inside))
    else:
        outer = link(between)
        network = Network(link(inside) if inside else outer, outer, ranks_per_node)
    memory = 1e9 * (memory_gb or (device(gpu).memory_gb if gpu else 0.0))
    file = Path(record).expanduser().absolute() if record else folder / "scaling.json"
    return Scaling(
        *(parameters, full_size(parameters), network, gpu, tuple(sorted(set(ranks))), file),
        finished=bool(record),
        memory_bytes=memory or None,
    )


def study_way() -> dict[str, Any] | None:
    """The recorded way of the study's Small from plain to tuned here; None if there is none."""
    return read_benchmark(WAY) if WAY.is_file() else None
