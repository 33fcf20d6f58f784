"""Numbers as text: one function a quantity, so that a number reads alike wherever it stands.

Numbers have three digits that count. What is too small to show is ``<0.1%`` or ``1.2e-05``, never
a zero; what was not measured has words instead of a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

NOT_MEASURED = "not measured"

NOTHING = "–"
"""In the place of a number that does not apply."""


def digits(value: float) -> str:
    """Three digits that count, whole numbers from 100: 1,234; 12.3; 0.0123."""
    if abs(value) >= 99.95 or value == 0:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if abs(value) >= 0.001 else f"{value:.1e}"


def whole(value: float) -> str:
    return f"{value:,.0f}"


def thousands(count: float, unit: str = "") -> str:
    """With a decimal prefix and three digits that count: ``13.8 M``, ``27.2 kB``."""
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {prefix}{unit}"
    return f"{count:.3g} {unit}".rstrip()


def milliseconds(time: float) -> str:
    """``0.0310 ms``, ``4.20 ms``, ``1,234 ms``; below a microsecond ``0.500 µs``."""
    if 0 < abs(time) < 1e-3:
        return microseconds(1e3 * time)
    return f"{digits(time)} ms"


def signed_digits(difference: float) -> str:
    """``+1.20``, ``−3.00``; ``0`` where nothing changed."""
    sign = "+" if difference > 0 else "−" if difference < 0 else ""
    return f"{sign}{digits(abs(difference))}"


def signed_milliseconds(difference: float) -> str:
    """``+1.20 ms``, ``−3.00 ms``, ``−0.500 µs``; ``0 ms`` where nothing changed."""
    if 0 < abs(difference) < 1e-3:
        return f"{signed_digits(1e3 * difference)} µs"
    return f"{signed_digits(difference)} ms"


def microseconds(time: float) -> str:
    return f"{digits(time)} µs"


def duration(seconds: float) -> str:
    """A span of time as a person says it: ``0.42 s``, ``12.3 s``, ``4 min 05 s``."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def percent(share: float) -> str:
    """A share with one decimal; what is there but rounds to nothing is ``<0.1%``; NaN a dash."""
    if math.isnan(share):
        return NOTHING
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def signed_percent(share: float, *, decimals: int = 1) -> str:
    """A difference with its sign: ``+3.1%``, ``−0.4%``; no sign on ``0.0%``."""
    text = f"{abs(share):.{decimals}%}"
    if not text.strip("0.%"):
        return text
    return f"{'−' if share < 0 else '+'}{text}"


def ratio(value: float, *, figures: int = 3) -> str:
    """How many times: ``0.95x``, ``2.14x``, ``12.3x``, ``11,100x``; never an exponent. So many
    ``figures`` are true: 3 of a measured ratio, 2 of a predicted one."""
    if not 0 < abs(value) < math.inf:
        return f"{value:.0f}x"
    figures = 3 if 1 <= value < 1.1 else figures  # 1.04x, not 1.0x
    decimals = 2 if abs(value) < 1 else max(0, figures - 1 - math.floor(math.log10(abs(value))))
    return f"{float(f'{value:.{figures}g}') if value >= 1 else value:,.{decimals}f}x"


def speedup(mid: float, low: float, high: float, *, figures: int = 3) -> str:
    """``1.25x (1.20x to 1.31x)``; without the range where there is none."""
    known = math.isfinite(low) and math.isfinite(high)
    reach = f" ({ratio(low, figures=figures)} to {ratio(high, figures=figures)})" if known else ""
    return f"{ratio(mid, figures=figures)}{reach}"


def at_most(bound: float) -> str:
    """The one way in which a page writes an upper bound of a speed-up: ``at most 1.04x``."""
    return f"at most {ratio(bound, figures=2)}"


def faster(mid: float, low: float, high: float, *, figures: int = 3) -> str:
    """A speed-up in words: ``1.99x faster (1.95x to 2.23x)``, ``1.25x slower (1.20x to 1.31x)``.

    A range that reaches across 1 stays one of speed-ups: ``1.02x faster (0.97x to 1.08x)``. What
    differs by less than half a percent is neither: ``1.00x as fast (0.97x to 1.02x)``.

    Args:
        mid, low, high: time before over time after; ends that are not finite leave out the range.
        figures: as :func:`ratio` takes them.
    """
    if mid > 0 and max(mid, 1 / mid) < 1.005:
        way, ends = "as fast", (mid, low, high)
    elif mid >= 1 or not mid > 0:
        way, ends = "faster", (mid, low, high)
    else:
        way, ends = "slower", (1 / mid, 1 / high, 1 / low)
    gain, _, reach = speedup(*ends, figures=figures).partition(" ")
    return f"{gain} {way} {reach}".rstrip()


def from_to(low: float, high: float, text: Callable[[float], str] = digits) -> str:
    """``1.20 to 1.31``; a dash where an end is not known."""
    known = math.isfinite(low) and math.isfinite(high)
    return f"{text(low)} to {text(high)}" if known else NOTHING


def known_or(value: float | None, text: Callable[[float], str], absent: str = NOTHING) -> str:
    return absent if value is None or not math.isfinite(value) else text(float(value))


def yes_or_no(judged: bool | None) -> str:
    return NOTHING if judged is None else "yes" if judged else "no"


def value_text(value: Any) -> str:
    """A parameter's value for a reader: thousands separated, equal list items counted."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        if len(value) > 2 and all(item == value[0] for item in value):
            return f"{len(value)} × {value_text(value[0])}"
        # widths of layers are written as in parameters files
        if value and all(type(item) is int and item < 100_000 for item in value):
            return "-".join(map(str, value))
        return ", ".join(value_text(item) for item in value)
    return str(value)
