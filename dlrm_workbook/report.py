"""One object at the door: everything that is known about a run or a recording.

>>> report = explain("outputs/2026-11-24/101500-profile-seed")  # doctest: +SKIP
>>> report.headline, report.lines, report.figure("parts")  # doctest: +SKIP

``dlrm help report`` lists what can be asked for: every name of
:data:`dlrm_workbook.show.views.VIEWS`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import write_json
from dlrm_core.parts import part_label
from dlrm_workbook.analysis import verdict, whatif
from dlrm_workbook.analysis.attribution import basis, iteration_count
from dlrm_workbook.analysis.context_tree import unmeasured
from dlrm_workbook.analysis.findings import findings
from dlrm_workbook.analysis.findings.finding import Finding
from dlrm_workbook.analysis.quality import quality
from dlrm_workbook.analysis.reference import at_reference
from dlrm_workbook.analysis.roofline import roofline
from dlrm_workbook.analysis.sentences import in_markdown, without_html
from dlrm_workbook.analysis.verdict import Stage
from dlrm_workbook.ground.profiling import GIVEN
from dlrm_workbook.ground.runs import DEFAULT_OUTPUT_ROOT
from dlrm_workbook.ground.units import milliseconds, percent
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.lines import MAIN
from dlrm_workbook.runner.notebook import NotebookRun, Source, find_profile
from dlrm_workbook.runner.summary import markdown_table
from dlrm_workbook.show.profile import HOW
from dlrm_workbook.show.tables import Shown, absent
from dlrm_workbook.show.views import VIEWS, outputs

MOST_FINDINGS, MOST_PARTS, MOST_CODE = 5, 10, 5
"""Findings, parts and lines of code that :meth:`Report.markdown` lists: 60 lines hold them."""


PART = ["component", "phase", "where", "time_ms", "share"]
CODE = ["file", "line", "function", "time_ms"]
"""Columns of its tables."""


class Report:
    """What a run or a recording tells; times are of one step, as the page calls it.

    Each name of :data:`VIEWS` is an attribute: a DataFrame that is computed when it is first asked
    for, and kept. ``dlrm help columns`` describes the columns. One that has nothing to show is
    empty; :meth:`absent` says why, and :meth:`show` prints that in its place.

    Attributes:
        source: where the profile came from: its ``folder``, a ``sentence`` that says what is
            explained, ``ranks`` (every rank's profile of a recording of several).
        profile: the profile at the pace of the page's step
            (:func:`dlrm_workbook.analysis.reference.at_reference`).
        folder: where results go; None: nowhere.
    """

    def __init__(self, source: Source, folder: Path | None = None) -> None:
        self.source: Source = source
        self.profile: Profile = at_reference(source.profile)
        self.folder = folder
        self._tables: dict[str, pd.DataFrame] = {}

    def table(self, name: str) -> pd.DataFrame:
        """The table of a view, the same one each time.

        Raises:
            InputError: there is no such view.
        """
        if name not in VIEWS:
            raise InputError(f"a report has no {name!r}; it has {', '.join(VIEWS)}")
        view = VIEWS[name]
        if name not in self._tables:
            if view.made:
                table = view.made(self)
            else:
                table = view.table(self.profile) if view.table else pd.DataFrame()
            self._tables[name] = table
        return self._tables[name]

    def __getattr__(self, name: str) -> pd.DataFrame:
        if name.startswith("_") or name not in VIEWS:
            raise AttributeError(f"a report has no {name!r}; it has {', '.join(VIEWS)}")
        return self.table(name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *VIEWS]

    def absent(self, name: str) -> str:
        """Why a view has nothing to show; empty where it has something, or nothing to say."""
        table, needs = self.table(name), VIEWS[name].needs
        if len(table):
            return ""
        reason = str(table.attrs.get("not_measured", ""))
        return reason or self.profile.not_measured.get(needs) or HOW.get(needs, "")

    def figure(self, name: str) -> Any:
        """The figure of a view, a ``plotly`` figure with a method ``save("parts.svg")``; a
        sentence where it has nothing to draw.

        Raises:
            InputError: there is no such view, or it has no figure.
        """
        table, view = self.table(name), VIEWS[name]
        if table.empty and view.is_drawn:
            return absent(self.absent(name))
        if view.drawn:
            return view.drawn(self)
        if view.figure:
            return view.figure(table)
        drawn = ", ".join(each for each, view in VIEWS.items() if view.is_drawn)
        raise InputError(f"{name!r} has no figure; these have one: {drawn}")

    def show(self, *names: str) -> Shown:
        """Views one below the other: sentences, figure and table of each, or why it has none."""
        return Shown([output for name in names for output in outputs(self, name)])

    def predict(self, change: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> pd.DataFrame:
        """The step under changed parameters, or under each of several changes; of our own training.

        See :func:`dlrm_workbook.analysis.whatif.predict`. Of a recording without parameters the
        table is empty, with the reason.
        """
        if not self.profile.meta.get("parameters"):
            return unmeasured(whatif.PREDICTED, self.absent("changes"))
        return whatif.predict(self.profile, change)

    def to_hatchet(self) -> Any:
        """The call tree of a mean iteration as a ``hatchet.GraphFrame``."""
        return self.profile.to_hatchet(iteration_count(self.profile))

    def write(self) -> str:
        """Write ``bottlenecks.json`` into :attr:`folder`; a sentence that says where."""
        path = (self.folder or Path()) / "bottlenecks.json"
        write_json(path, self.document)
        return f"Written: {path}"

    # ---- what views are made of ---------------------------------------------------------------

    @cached_property
    def headline(self) -> str:
        """The verdict in a few sentences of Markdown."""
        return verdict.verdict_text(self.profile, self.parts, self.ranked_findings, self.stages)

    @cached_property
    def quality(self) -> dict[str, str]:
        """``level`` (green, amber, red) and ``sentence``: what the figures are good for."""
        return quality(self.profile, self.parts, self.ranked_findings)

    def markdown(self, title: str = "") -> str:
        """The verdict for a terminal, a pull request or an agent: at most 60 lines of Markdown.

        Args:
            title: the heading; empty for none.
        """
        blocks = [f"# {in_markdown(title)}"] if title else []
        blocks += [
            self.headline,
            f"**Quality: {self.quality['level']}.** {self.quality['sentence']}",
            self.source.sentence if len(self.source.ranks) > 1 else "",
        ]
        whole = basis(self.profile)
        for place, one in enumerate(self.ranked_findings[:MOST_FINDINGS], 1):
            share = f"{percent(one.share_of_step)} of {whole}"
            lines = [f"{place}. **{in_markdown(one.title)}** ({share})", in_markdown(one.evidence)]
            lines += [f"Try: {in_markdown(one.advice)}"] if one.advice else []
            blocks.append("\n   ".join(filter(None, lines)))
        parts = self.parts[self.parts["time_ms"] > 0].nlargest(MOST_PARTS, "time_ms")
        rows = [
            [part_label(part, phase), where, milliseconds(time_ms), percent(share)]
            for part, phase, where, time_ms, share in parts[PART].to_numpy()
        ]
        tables = [markdown_table([["part", "where", "time", "share"], *rows])] if rows else []
        code = self.lines[self.lines["file"].ne("") & self.lines["thread"].eq(MAIN)].head(MOST_CODE)
        rows = [
            [f"{file}:{line}", function, milliseconds(time_ms)]
            for file, line, function, time_ms in code[CODE].to_numpy()
        ]
        tables += [markdown_table([["line", "function", "time"], *rows])] if rows else []
        text = without_html("\n\n".join(filter(None, blocks)))
        text = re.sub(r"&#(\d+);", lambda match: f"\\{chr(int(match[1]))}", text)
        return "\n\n".join([text, *tables])  # whose cells read as they are already

    @cached_property
    def ranked_findings(self) -> list[Finding]:
        """The findings as objects, worst first, with their evidence and advice."""
        ranked = findings(self.profile, self.parts, self.source.ranks)
        return verdict.findings_timed(self.profile, ranked)

    @cached_property
    def limits(self) -> pd.DataFrame:
        """Every part with its least time, NaN where no limit of the machine is known."""
        return roofline(self.profile, self.parts)

    @cached_property
    def stages(self) -> list[Stage]:
        """The step as it is, under each advised change on top of those before, and the limit."""
        return verdict.stages(self.profile, self.ranked_findings, self.limits)

    @cached_property
    def document(self) -> dict[str, Any]:
        """What ``bottlenecks.json`` holds."""
        document = verdict.document(
            self.profile, self.parts, self.ranked_findings, self.stages, self.limits, self.changes
        )
        named: dict[str, Any] = self.source.named(document)
        return named


def explain(
    profile_run: str | Path | Profile = "",
    run: NotebookRun | None = None,
    *,
    parts: Mapping[str, str] | None = None,
    device_name: str = "",
    model_file: str = "",
    output_root: str | Path = DEFAULT_OUTPUT_ROOT,
) -> Report:
    """Everything that is known about a run or a recording.

    Args:
        profile_run: a run's folder, one that ``dlrm record`` wrote, an HPCToolkit database, a
            Chrome trace of torch.profiler, or the traces of several ranks in a folder or an
            archive; empty or ``latest``: the newest finished run, else the sample; or a profile.
        run: the notebook that asks: its parameters and output root are used, results go to its
            folder, and its run.json names what is explained.
        parts: patterns of names to parts, as ``profiling.parts``, for other programs.
        device_name: the GPU of a recording that names none.
        model_file: parameters of the model that a recording without shapes trains.
        output_root: where finished runs are looked for.

    Raises:
        InputError: what is asked for cannot be opened, or holds no profile; the GPU is not
            listed, or the recording names its own.
    """
    if isinstance(profile_run, Profile):
        return Report(Source(profile_run, ""), run.folder if run else None)
    if run is None:
        root = Path(output_root)
        return Report(find_profile(str(profile_run), root, parts, device_name, model_file))
    asked = run.parameters.profiling
    model = run.parameters if asked.model_file == GIVEN else asked.model_file
    source = find_profile(str(profile_run), run.output_root, asked.parts, asked.device_name, model)
    run.explains(source)
    return Report(source, run.folder)


def command_explain(arguments: argparse.Namespace) -> int:
    """``dlrm explain RECORDING``: print the verdict as Markdown; nothing is written."""
    print(explain(arguments.path).markdown(Path(arguments.path).name))
    return 0
