"""The ``scaling`` page: a record of ranks, a network, and predictions from both.

Three sources of what a rank computes, the first that there is: the record's profile of one
process (measured on TorchRec, alone and beside others), this machine's parts timed without
TorchRec, or the data sheet of a GPU that the notebook's parameters name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.base.files import read_json, write_json
from dlrm_core.config import Parameters
from dlrm_studies.scaling import measure
from dlrm_studies.scaling.findings import scaling_findings
from dlrm_studies.scaling.measure import Effort
from dlrm_studies.scaling.model.choice import (
    Choice,
    Slowness,
    best_sharding,
    memory_extremes,
    scaling_table,
    straggler_table,
)
from dlrm_studies.scaling.model.communication import Study, full_size, study_of, volumes_by_sharding
from dlrm_studies.scaling.model.links import LINKS, Link, Network, check, link, links_table
from dlrm_studies.scaling.model.prediction import (
    ComputeProfile,
    Setting,
    ceiling_profile,
    measured_profile,
    steady,
)
from dlrm_studies.scaling.model.record import (
    ScalingRecord,
    own_link,
    read_record,
    record_of,
)
from dlrm_studies.scaling.model.sharding import SHARDINGS, make_plan, maximum_ranks
from dlrm_workbook.analysis.devices import device
from dlrm_workbook.analysis.findings.finding import Finding
from dlrm_workbook.ground.bar import Bar

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass
class Scaling:
    """One page's record and predictions.

    Attributes:
        parameters: as they are, scaled to fit where the preset is.
        network: what joins the ranks that are predicted.
        gpu: whose data sheet stands in for a measured profile; "" for none.
        memory_bytes: of one predicted rank; None: no limit.
        ranks: numbers of ranks to measure on this node; empty: none.
        file: where the record is, or will be.
        folder: the page's own.
        finished: whether the record is there and nothing is measured.
    """

    parameters: Parameters
    network: Network
    gpu: str
    memory_bytes: float | None
    ranks: tuple[int, ...]
    file: Path
    folder: Path
    finished: bool
    record: ScalingRecord = field(default_factory=lambda: record_of({}))
    launch: dict[str, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    @property
    def whole(self) -> Parameters:
        """The study's full size of the parameters, else the same."""
        return full_size(self.parameters)

    # ---- measuring ------------------------------------------------------------------------

    def measure(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Run the ranks, or read what an earlier run left.

        Without TorchRec nothing runs on several ranks, which is said; the parts of one process
        are timed all the same, since predictions need them.
        """
        if self.finished:
            self.record = read_record(self.file)
            self.launch = dict(read_json(self.file).get("launch") or {})
            if self.record.checked is not None and not self.gpu:
                # a summary does not say what a process takes; the page's predictions need it
                tables = {**self.record.tables, "compute_profile": pd.DataFrame(self._alone(say))}
                self.record = replace(self.record, tables=tables)
            return
        document = self._ranks(say) if self.ranks else {}
        if not document.get("compute_profile") and not self.gpu:
            document["compute_profile"] = self._alone(say)
        document.setdefault("parameters", self.parameters.to_sections())
        write_json(self.file, document)
        self.record = record_of(document)

    def _alone(self, say: Callable[[str], None]) -> list[dict[str, Any]]:
        say("one process alone")
        return measure.timed_alone(self.parameters, self.folder, say)

    def bar(self) -> Bar:
        """Live progress of :meth:`measure`: what is being measured."""
        total = Effort().rounds * len(self.ranks) or None
        return Bar("measuring", "stage", total, shown=not self.finished)

    def _ranks(self, say: Callable[[str], None]) -> dict[str, Any]:
        try:
            document = measure.measure_scaling(
                self.parameters, self.ranks, self.file.parent, on_progress=say
            )
        except MissingToolError as error:
            names = ("runs", "iterations", "parts", "collectives", "link_probe")
            return {"not_measured": dict.fromkeys(names, str(error))}
        self.notices = list(document["notices"])
        self.launch = dict(document.get("launch") or {})
        return document

    # ---- what predictions rest on ---------------------------------------------------------

    @property
    def link(self) -> Link | None:
        """This machine's own link, if it was measured."""
        return own_link(self.record, "this machine, measured")

    @property
    def links(self) -> pd.DataFrame:
        """Links by name, this machine's first."""
        return links_table([*filter(None, [self.link]), *LINKS])

    @property
    def link_check(self) -> pd.DataFrame | None:
        """Measured collectives beside what the calibrated link says."""
        measured_link = self.link
        return check(self.record.link_probe, measured_link) if measured_link else None

    @property
    def profile(self) -> ComputeProfile:
        """What one rank's parts cost.

        Raises:
            InputError: nothing was measured and no GPU is named.
        """
        if self.gpu:
            return ceiling_profile(self.predicts, device(self.gpu).ceilings())
        if self.record.compute_profile.empty:
            raise InputError(
                "compute profile: not measured, and gpu is empty; name a GPU of a data sheet, or "
                "measure one process"
            )
        return measured_profile(self.record.compute_profile)

    @property
    def setting(self) -> Setting:
        """What predictions for the network named by the page are made from."""
        # whoever moves the bytes there, it is not the cores that compute
        profile = self.profile
        if self.gpu or self.network.ranks_per_node == 1:
            profile = replace(steady(profile), shares_node=False)
        return Setting(self.predicts, self.network, profile, memory_bytes=self.memory_bytes)

    @property
    def predicts(self) -> Parameters:
        """What is predicted: a data sheet knows no limit of size, so there the study's own."""
        return self.whole if self.gpu else self.parameters

    def batch_size(self, scaling: str) -> int:
        """Of all ranks (strong) or of each (weak): the study's where its full size is predicted."""
        if not self.gpu or self.study is None:
            return self.parameters.training.batch_size
        weak = scaling == "weak"
        return self.study.weak_batch if weak else self.study.strong_batch

    # ---- tables ---------------------------------------------------------------------------

    @property
    def study(self) -> Study | None:
        """The study's configuration that these parameters are of."""
        return study_of(self.parameters)

    @property
    def shown_ranks(self) -> int:
        """Ranks of the tables of bytes and memory: the study's, else eight at most."""
        most = maximum_ranks(self.whole, "table_wise")
        return min(8, most) if self.study is None else self.study.quoted_ranks

    @property
    def _whole_batch(self) -> int:
        return self.study.strong_batch if self.study else self.whole.training.batch_size

    def volumes(self, ranks: int) -> pd.DataFrame:
        """Bytes of the full size on so many ranks, by sharding."""
        return volumes_by_sharding(self.whole, ranks, max(self._whole_batch, ranks), SHARDINGS)

    def memory(self, ranks: int) -> pd.DataFrame:
        """Memory of the fullest and the emptiest rank at full size, by sharding."""
        plans = {name: make_plan(self.whole, ranks, name, idle=True) for name in SHARDINGS}
        if plans["mixed"].name != "mixed":
            del plans["mixed"]  # it came out as one of the others
        return memory_extremes(self.whole, plans, max(self._whole_batch, ranks))

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
        predicted = strong[strong["mid_ms"].notna()]
        return straggler_table(
            predicted["compute_ms"].tolist(),
            predicted["exposed_ms"].tolist(),
            predicted["ranks"].tolist(),
            slowness,
        )

    def findings(self) -> list[Finding]:
        """What the measured runs wait for."""
        return scaling_findings(self.record, self.parameters)

    def _counts(self, counts: Sequence[int], scaling: str) -> list[int]:
        batch = self.batch_size(scaling)
        return [count for count in counts if scaling == "weak" or count <= batch]

    @property
    def sentence(self) -> str:
        """What this page shows, and what of the parameters ranks do without."""
        if self.finished:
            now = ", and predicts from one process that was timed now on this machine"
            summary = self.record.checked is not None
            return f"This page shows the record in `{self.file}`{now if summary else ''}."
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
    if any(type(count) is not int or count < 1 for count in ranks):
        raise InputError(f"ranks is {list(ranks)}, expected numbers of 1 or more")
    if not memory_gb >= 0:
        raise InputError(f"memory_gb is {memory_gb}, expected 0 or more")
    memory = 1e9 * (memory_gb or (device(gpu).memory_gb if gpu else 0.0))
    return Scaling(
        parameters,
        network_of(inside, between, ranks_per_node),
        gpu,
        memory or None,
        tuple(sorted(set(ranks))),
        Path(record).expanduser().absolute() if record else folder / measure.RECORD,
        folder,
        finished=bool(record),
    )


def network_of(inside: str, between: str, ranks_per_node: int) -> Network:
    """The network of a notebook's parameters, as :func:`start` takes them.

    Raises:
        InputError: a name or number cannot be used.
    """
    if ranks_per_node < 1:
        raise InputError(f"ranks_per_node is {ranks_per_node}, expected at least 1")
    if ranks_per_node > 1 and not inside:
        raise InputError(
            f"inside is empty, but ranks_per_node is {ranks_per_node}: name the link inside a "
            f"node ({', '.join(listed.name for listed in LINKS[:3])}, ...)"
        )
    if not inside and not between:
        raise InputError("inside and between are empty: name a link to predict for")
    if inside and not between:
        return Network(link(inside))
    outer = link(between)
    return Network(link(inside) if inside else outer, outer, ranks_per_node)
