"""The fused dense part on any CPU: without tiles its products are slow, but the same."""

import functools

from dlrm_kernels import dense
from dlrm_kernels.tiles import layout, machine


def use_slow_tiles(set_attribute=setattr, everywhere=False):
    """Have the kernels do without tiles where this CPU has none.

    Args:
        set_attribute: ``monkeypatch.setattr``; left out, for the rest of the process.
        everywhere: whether they do without those of a CPU that has some.
    """
    if everywhere or machine.why_no_tiles():
        set_attribute(layout, "Engine", functools.partial(layout.Engine, tiles=False))
        for module in (machine, dense):
            set_attribute(module, "why_no_tiles", lambda: "")
