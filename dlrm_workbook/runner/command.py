"""``dlrm run``: notebooks, a sweep of them, or a run that was stopped and goes on.

A sweep runs every point's notebooks and then makes one page over all of them.
"""

from __future__ import annotations

import resource
import shlex
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json
from dlrm_core.config import Parameters, load_parameters
from dlrm_workbook.analysis.verdict import compare_command
from dlrm_workbook.ground.ledger import require_same
from dlrm_workbook.ground.processes import only_process
from dlrm_workbook.ground.profiling import GIVEN
from dlrm_workbook.ground.runs import (
    DEFAULT_OUTPUT_ROOT,
    RunError,
    RunFolder,
    claim_run_folder,
    named_run,
)
from dlrm_workbook.runner.parameters import explained_options, require_use, split_overrides
from dlrm_workbook.runner.progress import columns
from dlrm_workbook.runner.run import CHAIN, Plan, closed_by_signals, run_notebooks
from dlrm_workbook.runner.summary import plain_text

RESUMABLE = {"compare": "comparison", "scaling": "measurement"}
"""Notebook to what it makes, where it finds its own rounds in its folder."""

SWEEP_NAME = "sweep"
"""Name of the notebook of a sweep's summary page."""

LEAST_FILES = 128
"""A process that runs a notebook opens about 100: its kernel's sockets, pipes and files."""


def command_run(arguments: Any) -> int:
    """``dlrm run``: exit code 0 only if every notebook finished.

    The run folder is the last line on standard output; exit codes of failures are
    those of :class:`RunError`.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < LEAST_FILES:
        raise InputError(
            f"notebooks need {LEAST_FILES} open files, of which ulimit -n allows {files}"
        )
    if getattr(arguments, "like", None) and arguments.notebook == "bottlenecks":
        arguments.parameter = [f"profiling.model_file={GIVEN}", *arguments.parameter]
    for_sections, own = split_overrides(arguments.parameter)
    require_use([arguments.notebook], for_sections, own)
    if arguments.resume and arguments.file is None:
        raise InputError("--resume needs the parameters file that the run began with (-f FILE)")
    parameters = load_parameters(arguments.file, for_sections)
    # another program is not trained by the notebook that trains our model
    chain = CHAIN[1:] if parameters.profiling.command else CHAIN
    # and is compared with itself under remedies, in one process, which its page shows
    whole = arguments.notebook == "all" or (arguments.notebook == "compare" and len(chain) < 3)
    names = chain if whole else (arguments.notebook,)
    if names == (SWEEP_NAME,) and parameters.sweep and "sweep_folder" not in own:
        names = ("profile",)  # the page over all points comes after them
    swept = bool(parameters.sweep) and names != (SWEEP_NAME,)
    try:
        if arguments.resume and not swept and arguments.notebook in RESUMABLE:
            folder = resume_notebook(arguments, parameters, own)
        elif swept or arguments.resume:
            return run_sweep(arguments, names, parameters, own)
        else:
            folder = run_notebooks(
                names,
                arguments.file,
                arguments.parameter,
                arguments.output_root,
                cell_timeout=arguments.cell_timeout,
                command=arguments.argv,
            )
    except RunError as error:
        print(f"dlrm run: {error}", file=sys.stderr)
        print(error.folder.path, flush=True)
        return error.code
    print(closing_words(folder.path, columns(sys.stderr)), file=sys.stderr)
    print(folder.path, flush=True)
    return 0


def closing_words(folder: Path, width: int) -> str:
    """What a run found, where its page is and what to type next, as far as there is any.

    Sentences are wrapped at ``width`` letters; a link and a command stay on a line each.
    """

    def prose(text: str) -> str:
        return textwrap.fill(text, width - 1, break_long_words=False, break_on_hyphens=False)

    lines = []
    record = read_json(folder / "run.json")
    notebook = record["notebook"]
    bottlenecks_json = folder / "bottlenecks.json"
    found = read_json(bottlenecks_json) if bottlenecks_json.is_file() else {}
    quality = found.get("quality") or {}
    if found.get("headline"):
        lines += ["", prose(plain_text(found["headline"])), ""]
    if quality and quality["level"] != "green":
        lines += [prose(f"How sure (more on the page): {quality['sentence']}"), ""]
    lines.append(f"Page: {(folder / f'{notebook}.html').as_uri()}")
    change = next((each["change"] for each in found.get("findings", []) if each["change"]), None)
    given = explained_options(record, folder)
    if change and given:
        lines.append(f"Next: {compare_command(change, given)}")
    return "\n".join(lines)


def resume_notebook(arguments: Any, parameters: Parameters, own: Mapping[str, str]) -> RunFolder:
    """``dlrm run NOTEBOOK --resume FOLDER``: go on in that folder.

    Raises:
        InputError: the folder holds no unfinished run of it with these parameters; nothing
            has been run then.
        RunError: the notebook did not finish.
    """
    name = arguments.notebook
    plan = Plan.of([name], own)
    root = DEFAULT_OUTPUT_ROOT if arguments.output_root is None else arguments.output_root
    plan.locate(Path(root))
    plan.check(parameters)
    given = plan.given(name, parameters, {})
    named = named_run(arguments.resume, name, root, finished=False)
    place = named.expanduser().absolute()
    record = unfinished_record(place, name, given)
    with only_process(place / "rounds"):
        pass  # nobody measures here: the process that began is gone, and its kernel too
    folder = RunFolder.reopen(place, record)
    with closed_by_signals([folder]):
        plan.execute(name, folder, given, arguments.cell_timeout)
    return folder


def unfinished_record(folder: Path, notebook: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The ``run.json`` of a run that is to go on with these parameters.

    Raises:
        InputError: there is no such run, it has finished, or it began otherwise.
    """
    result = RESUMABLE[notebook]
    if not (folder / "run.json").is_file():
        raise InputError(f"{folder} is no run folder (it has no run.json)")
    record = read_json(folder / "run.json")
    if not isinstance(record, dict) or record.get("notebook") != notebook:
        raise InputError(f"{folder} is no run of {notebook}")
    if record.get("status") == "finished":
        raise InputError(f"{folder}: this {result} has finished; start another")
    advice = f"a {result} is resumed with the parameters it began with"
    require_same(str(folder), record.get("parameters") or {}, given, advice)
    return record


def run_sweep(
    arguments: Any, names: tuple[str, ...], parameters: Parameters, own: Mapping[str, str]
) -> int:
    """``dlrm run`` of a parameters file with a sweep.

    Returns:
        0 only if every point and the summary page finished; 128 + signal after an
        interruption. The sweep's folder is the last line on standard output.

    Raises:
        InputError: a point cannot work, or ``--resume`` names another sweep; nothing has
            been run then.
    """
    # only here: it brings pandas along, which no other run of this process needs
    from dlrm_workbook.trials.sweep.plan import Sweep, describe_failures, sweep_points

    if not parameters.sweep:
        raise InputError(f"--resume: {arguments.file} has no sweep section")
    if names == ("bottlenecks",):
        raise InputError("a sweep of bottlenecks has nothing to explain; sweep all, or profile")
    points = sweep_points(parameters)
    root = DEFAULT_OUTPUT_ROOT if arguments.output_root is None else arguments.output_root
    plan = Plan.of(names, own)
    plan.locate(Path(root))
    for point in points:
        try:
            plan.check(point.parameters)
        except InputError as error:
            raise InputError(f"sweep point {point.number} ({point.label}): {error}") from None
    summary = Plan.of([SWEEP_NAME], {})
    preset, typed = parameters.preset, shlex.join(arguments.argv)
    if arguments.resume:
        sweep = Sweep.open(named_run(arguments.resume, SWEEP_NAME, root, finished=False))
        sweep.require_same(parameters, names, own)
        folder = RunFolder.reopen(sweep.folder, read_json(sweep.folder / "run.json"))
    else:
        given = parameters.to_sections() | {"sweep": dict(parameters.sweep)}
        folder = claim_run_folder(root, SWEEP_NAME, preset, parameters=given, command=typed)
        sweep = Sweep.begin(folder.path, parameters, names, own, typed)

    runs = [folder]

    def run_point(point: Parameters, place: Path, done: dict[str, Path]) -> None:
        """Run a point's notebooks that have not finished there, each in a folder of its name."""
        for name in names:
            finished = finished_run(place, name)
            if finished is None:
                given = plan.given(name, point, done)
                run = claim_run_folder(
                    place, name, preset, parameters=given, command=typed, place=place / name
                )
                runs.append(run)
                plan.execute(name, run, given, arguments.cell_timeout)
                finished = run.path
            done[name] = finished

    with closed_by_signals(runs):
        code = sweep.run(run_point)
        left = describe_failures(sweep)
        if code >= 128:
            folder.close("interrupted", error=left)
            resume = [] if "--resume" in arguments.argv else ["--resume", str(folder.path)]
            again = shlex.join([*arguments.argv, *resume])
            print(f"dlrm run: the sweep was interrupted; go on with: {again}", file=sys.stderr)
        else:
            given = summary.given(SWEEP_NAME, parameters, {}) | {"sweep_folder": str(folder.path)}
            try:
                summary.execute(SWEEP_NAME, folder, given, None)
                if left:
                    # the page is there, but the folder must not pass for that of a whole sweep
                    folder.close("failed", error=left)
            except RunError as error:
                print(f"dlrm run: {error}", file=sys.stderr)
                code = error.code
    if left:
        print(f"dlrm run: {left}", file=sys.stderr)
    print(folder.path, flush=True)
    return code


def finished_run(place: Path, notebook: str) -> Path | None:
    """The run of a notebook that finished in a point's folder; None if there is none."""
    for folder in sorted(place.glob(f"{notebook}*")):
        run_json = folder / "run.json"
        # a run that was killed stays 'running', and has a folder of the same name
        if run_json.is_file() and read_json(run_json).get("status") == "finished":
            return folder
    return None
