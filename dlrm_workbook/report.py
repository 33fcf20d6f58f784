"""One object at the door: everything that is known about a run or a recording.

>>> report = explain("outputs/2026-11-24/101500-profile-seed")  # doctest: +SKIP
>>> report.headline, report.lines, report.findings  # doctest: +SKIP

Tables are computed when they are first asked for and kept. One that has nothing to show is
empty and says why in ``attrs["not_measured"]``, which ``show(table)`` prints in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from dlrm_workbook.analysis import gpu, idleness, verdict, whatif
from dlrm_workbook.analysis.attribution import attribute
from dlrm_workbook.analysis.findings import findings
from dlrm_workbook.analysis.findings.finding import Finding
from dlrm_workbook.analysis.lines import lines
from dlrm_workbook.analysis.quality import quality
from dlrm_workbook.analysis.reference import at_reference
from dlrm_workbook.analysis.roofline import roofline
from dlrm_workbook.analysis.tried import tried
from dlrm_workbook.analysis.verdict import Stage
from dlrm_workbook.ground.runs import DEFAULT_OUTPUT_ROOT
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.runner.notebook import Source, find_profile


class Report:
    """What a run or a recording tells; times are of one step, as the page calls it.

    Attributes:
        source: where the profile came from: its ``folder``, a ``sentence`` that says what is
            explained, ``ranks`` (every rank's profile of a recording of several).
        profile: the profile at the pace of the page's step
            (:func:`dlrm_workbook.analysis.reference.at_reference`).
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.profile: Profile = at_reference(source.profile)

    # ---- the answer ---------------------------------------------------------------------------

    @cached_property
    def headline(self) -> str:
        """The verdict in a few sentences of Markdown."""
        return verdict.verdict_text(self.profile, self.parts, self.ranked_findings, self.stages)

    @cached_property
    def quality(self) -> dict[str, str]:
        """``level`` (green, amber, red) and ``sentence``: what the figures are good for."""
        return quality(self.profile, self.parts, self.ranked_findings)

    @cached_property
    def findings(self) -> pd.DataFrame:
        """Bottlenecks, worst first: ``title``, ``component``, ``share_of_step`` (0 to 1),
        ``change``, ``gain`` and its ``basis``; see :func:`~.verdict.finding_table`."""
        return verdict.finding_table(self.ranked_findings)

    @cached_property
    def lines(self) -> pd.DataFrame:
        """Time by line of the program's own code, most first; see
        :func:`dlrm_workbook.analysis.lines.lines`."""
        return lines(self.profile)

    @cached_property
    def trials(self) -> pd.DataFrame:
        """Remedies that were tried on the running program; see
        :func:`dlrm_workbook.analysis.tried.tried`."""
        return tried(self.profile)

    @cached_property
    def parts(self) -> pd.DataFrame:
        """Time by ``component``, ``phase`` and ``where``: ``time_ms``, ``share``; the rows add
        up to the step."""
        return attribute(self.profile)

    # ---- the evidence -------------------------------------------------------------------------

    @cached_property
    def roofline(self) -> pd.DataFrame:
        """Parts against the limits of the machine: ``ceiling_ms``, ``share_of_ceiling``,
        ``limit``."""
        return roofline(self.profile, self.parts)

    @cached_property
    def kernels(self) -> pd.DataFrame:
        """Kernels of the GPU with their times and launches."""
        return gpu.kernel_table(self.profile)

    @cached_property
    def idle(self) -> pd.DataFrame:
        """What the host did while the GPU was idle, by cause."""
        return idleness.idle_by_cause(self.profile, idleness.idle_causes(self.profile))

    @cached_property
    def changes(self) -> pd.DataFrame:
        """Every change whose parts were timed, with the step that is predicted under it."""
        return whatif.what_if_table(self.profile)

    def predict(self, change: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> pd.DataFrame:
        """The step under changed parameters; of our own runs whose parts were probed.

        Raises:
            InputError: a parameter does not exist, or its effect was not measured.
        """
        return whatif.predict(self.profile, change)

    def to_hatchet(self) -> Any:
        """The call tree as a ``hatchet.GraphFrame``."""
        return self.profile.to_hatchet()

    # ---- what pages are made of ---------------------------------------------------------------

    @cached_property
    def ranked_findings(self) -> list[Finding]:
        """The findings as objects, with their evidence and advice."""
        found = findings(self.profile, self.parts, self.source.ranks)
        return verdict.findings_timed(self.profile, found)

    @cached_property
    def stages(self) -> list[Stage]:
        """The step as it is, under each advised change on top of those before, and the limit."""
        return verdict.stages(self.profile, self.ranked_findings, self.roofline)

    @cached_property
    def document(self) -> dict[str, Any]:
        """What ``bottlenecks.json`` holds."""
        document = verdict.document(
            self.profile,
            self.parts,
            self.ranked_findings,
            self.stages,
            self.roofline,
            self.changes,
        )
        named: dict[str, Any] = self.source.named(document)
        return named


def explain(
    profile_run: str | Path = "",
    *,
    parts: Mapping[str, str] | None = None,
    device_name: str = "",
    output_root: str | Path = DEFAULT_OUTPUT_ROOT,
) -> Report:
    """Everything that is known about a run or a recording.

    Args:
        profile_run: a run's folder, one that ``dlrm record`` wrote, an HPCToolkit database, a
            Chrome trace of torch.profiler, or the traces of several ranks in a folder or an
            archive; empty or ``latest``: the newest finished run, else the sample.
        parts: patterns of names to parts, as ``profiling.parts``, for other programs.
        device_name: the GPU of a recording that names none.
        output_root: where finished runs are looked for.

    Raises:
        InputError: what is asked for cannot be opened, or holds no profile; the GPU is not
            listed, or the recording names its own.
    """
    return Report(find_profile(str(profile_run), Path(output_root), parts, device_name))
