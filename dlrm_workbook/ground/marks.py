"""Ranges that recordings of programs that are not ours hold, beside the names of their authors.

Whoever records such a program marks its iterations, its groups of modules and the parts that
its author names; whoever reads the recording knows these marks again. Our own step has the
names of :mod:`dlrm_core.parts`, which alone this needs: a measured program may import it.
"""

from __future__ import annotations

from collections.abc import Iterable

from dlrm_core.parts import COMPONENTS, PHASES

STEP_MARK = "dlrm step"
"""Empty range where one iteration ends and the next begins."""

PART_PREFIX = "dlrm part: "
"""Begins the range that ``record.part`` opens; the part follows, as a person writes it."""

GROUP_PREFIX = "dlrm module: "
"""Begins the range around a group of modules."""

MOST_GROUPS = 12
"""The modules of one model are sorted into at most so many groups."""


def deepest_level(paths: Iterable[tuple[str, ...]]) -> int:
    """The longest length at which no more than :data:`MOST_GROUPS` paths end; 2 at least."""
    lengths = sorted(len(path) for path in set(paths))
    return max([2, *(n for n in set(lengths) if sum(x <= n for x in lengths) <= MOST_GROUPS)])


def parse_part(text: str) -> tuple[str, str]:
    """(component, phase) of a part as a person writes it; the phase may be left out: ``embedding
    backward`` is ``("embedding", "backward")``, ``loss`` is ``("loss", "")``. A ValueError says
    that there is no such part, and what was expected."""
    component, _, phase = text.partition(" ")
    if component not in COMPONENTS or phase not in ("", *PHASES):
        raise ValueError(
            f"expected one of {', '.join(COMPONENTS)}, with one of {', '.join(PHASES)} after it "
            "where wanted"
        )
    return component, phase
