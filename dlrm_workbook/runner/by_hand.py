"""Notebook, page and verdict of a notebook that runs without ``dlrm run``.

JupyterLab and plain papermill keep what the cells show where this process cannot know. The kernel
sends all of it, though: each message is taken down on its way, and once the last cell has ended
the run's folder gets the notebook that they make, and its page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from dlrm_workbook.ground.runs import NOTEBOOKS, RunFolder
from dlrm_workbook.runner.parameters import find_notebook, read_notebook, write_notebook

SHOWN = frozenset({"stream", "display_data", "execute_result", "error"})
"""Messages of a kernel that are outputs of a cell."""


class CellRecorder:
    """The cells that this kernel has executed, with their outputs from now on; ``shell`` is
    IPython's, of a kernel that is executing a cell."""

    def __init__(self, shell: Any) -> None:
        from nbformat.v4 import new_code_cell, output_from_msg

        self._shell = shell
        self._new_cell, self._output_of = new_code_cell, output_from_msg
        self.cells = [new_code_cell(source) for source in shell.user_ns["In"][1:]]
        self._session = shell.kernel.session
        self._send = self._session.send
        self._session.send = self._pass_on
        self._at_end: Callable[[], None] | None = None
        shell.events.register("pre_run_cell", self._begin)
        shell.events.register("post_run_cell", self._end)

    def _pass_on(self, *arguments: Any, **named: Any) -> Any:
        message = self._send(*arguments, **named)
        # a process forked from the kernel sends nothing and has no message
        if message and message["header"]["msg_type"] in SHOWN and self.cells:
            self.cells[-1].outputs.append(self._output_of(message))
        return message

    def _begin(self, info: Any) -> None:
        self.cells.append(self._new_cell(info.raw_cell))

    def at_end(self, action: Callable[[], None]) -> None:
        """Do something once the cell that is running has ended, and record no more."""
        self._at_end = action

    def _end(self, result: Any) -> None:
        if self._at_end is None:
            return
        sys.stdout.flush()
        self._session.send = self._send
        self._shell.events.unregister("pre_run_cell", self._begin)
        self._shell.events.unregister("post_run_cell", self._end)
        self._at_end()


def recorder() -> CellRecorder | None:
    """A recorder of this kernel's cells; None where this process is no kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return CellRecorder(shell) if hasattr(shell, "kernel") else None


def executed_notebook(template: Any, cells: Iterable[Any]) -> Any:
    """A notebook with the outputs of the cells that were executed, in the order of the file.

    Args:
        template: the notebook as its file has it; it is filled.
        cells: executed, in their order; one executed again counts with its last outputs. Those
            that the file does not have, as papermill's parameters, stand where they ran.
    """
    last = {cell.source.strip(): cell for cell in cells}
    waiting = list(last)
    result = []
    for cell in template.cells:
        source = cell.source.strip()
        if cell.cell_type != "code":
            result.append(cell)
        elif source in waiting:
            before, waiting = waiting[: waiting.index(source)], waiting[waiting.index(source) + 1 :]
            result += [last[other] for other in before]
            cell.outputs = last[source].outputs
            result.append(cell)
    template.cells = result + [last[source] for source in waiting]
    return template


def publish_by_hand(folder: RunFolder, cells: Iterable[Any]) -> None:
    """Write notebook, page and verdict of a run into its folder, and close it."""
    from dlrm_workbook.runner.run import publish, recorded_notices

    notices: dict[str, Any] = recorded_notices(folder.path)
    summary: dict[str, Any] = {}
    outcome = folder.record | notices | {"status": "finished", "seconds": folder.elapsed()}
    try:
        template = read_notebook(find_notebook(folder.notebook, NOTEBOOKS))
        write_notebook(executed_notebook(template, cells), folder.ipynb)
        problem, summary = publish(folder, outcome)
    except Exception as error:  # the results are there; a page less must not cost them
        problem = f"the notebook could not be written: {error}"
    folder.close("finished", **({"error": problem} if problem else {}), **notices, **summary)
