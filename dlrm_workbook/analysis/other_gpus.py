"""A recording on other GPUs, as the study of that predicts it, where it is installed."""

from __future__ import annotations

import pandas as pd

from dlrm_core.base.errors import MissingToolError
from dlrm_workbook.analysis.context_tree import unmeasured
from dlrm_workbook.ground.studies import study
from dlrm_workbook.recordings.profile import Profile


def other_gpus(profile: Profile) -> pd.DataFrame:
    """The step on each of a few GPUs (``dlrm_studies.other_gpu.other_gpus``)."""
    return _predicted("other_gpus", profile)


def parts_held_against(before: Profile, after: Profile) -> pd.DataFrame:
    """Parts predicted from one recording (``dlrm_studies.other_gpu.parts_held_against``)."""
    return _predicted("parts_held_against", before, after)


def held_against(before: Profile, after: Profile) -> pd.DataFrame:
    """Kernels predicted from one recording (``dlrm_studies.other_gpu.held_against``)."""
    return _predicted("held_against", before, after)


def _predicted(question: str, *profiles: Profile) -> pd.DataFrame:
    """What the study answers; an empty table with the reason where it is not installed."""
    try:
        table: pd.DataFrame = getattr(study("other GPUs"), question)(*profiles)
    except MissingToolError as error:
        return unmeasured([], str(error))
    return table
