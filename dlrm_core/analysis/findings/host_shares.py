"""Shares of the wall time of the step's thread, as the host's rules count them."""

from __future__ import annotations

from dlrm_core.analysis.findings.evidence import Evidence
from dlrm_core.analysis.findings.ledger import Ledger

LOST_SHARE = 0.05
"""Of the step; below it a remedy gains less than a run's own scatter."""


def excess_share(evidence: Evidence, ledger: Ledger) -> float:
    """Share of the step that parts take beyond what they take alone, still unexplained."""
    left = float(ledger.left_ms.sum())
    return left / evidence.total_ms if evidence.total_ms > 0 else 0.0


def claimed_share(evidence: Evidence, ledger: Ledger) -> float:
    """Share of the step that rules have explained so far."""
    return ledger.explained_ms / evidence.total_ms if evidence.total_ms > 0 else 0.0


def blocked_share(evidence: Evidence, ledger: Ledger) -> float:
    """Share of the wall in which the step's thread waits, for its batch not counted."""
    blocked = evidence.share_of_wall("blocked_ms")
    waits_for_data = evidence.parameter("data.loader") == "prefetch"
    if waits_for_data or ledger.is_explained(("data", "forward")):
        blocked -= evidence.share("data")
    return max(0.0, blocked)


def waiting_said(evidence: Evidence) -> str:
    """A sentence on the time without a core; empty below 1 %."""
    queued = evidence.share_of_wall("run_queue_ms")
    if queued < 0.01:
        return ""
    return f" The step's thread was ready but had no core in {queued:.0%} of the time."


def switches_said(evidence: Evidence) -> str:
    """A sentence on how often the thread was taken off its core; empty if never."""
    switches = evidence.counted("involuntary_switches")
    return f" It was taken off its core {switches:,.1f} times an iteration." if switches else ""
