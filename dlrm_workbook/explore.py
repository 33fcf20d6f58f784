"""The names that a notebook of one's own begins with, by one import that stays as it is.

The functions live in the rooms of the workbook, which may be rebuilt; docs/pages.md shows
what to do with them, ``dlrm help columns`` what the columns of their tables are.
"""

from dlrm_workbook.analysis.attribution import attribute
from dlrm_workbook.analysis.views import flat
from dlrm_workbook.analysis.whatif import predict
from dlrm_workbook.runner.notebook import load_profile, recordings
from dlrm_workbook.show import bottlenecks as figures
from dlrm_workbook.show.tables import show

__all__ = ["attribute", "figures", "flat", "load_profile", "predict", "recordings", "show"]
