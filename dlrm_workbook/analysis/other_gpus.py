"""A recording on other GPUs, as the study of that predicts it, where it is installed."""

from __future__ import annotations

import pandas as pd

from dlrm_core.base.errors import MissingToolError
from dlrm_workbook.analysis.context_tree import unmeasured
from dlrm_workbook.ground.studies import study
from dlrm_workbook.recordings.profile import Profile


def other_gpus(question: str, *profiles: Profile) -> pd.DataFrame:
    """What a function of ``dlrm_studies.other_gpu`` answers: ``other_gpus`` of one profile,
    ``parts_held_against`` or ``held_against`` of two. Empty, with the reason, without the study."""
    try:
        table: pd.DataFrame = getattr(study("other GPUs"), question)(*profiles)
    except MissingToolError as error:
        return unmeasured([], str(error))
    return table
