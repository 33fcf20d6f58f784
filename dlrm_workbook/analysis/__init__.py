"""DataFrames in, DataFrames out.

What each column of a table means, its unit and formula are said once, in
``dlrm_workbook/show/columns.md`` (``dlrm help columns MODULE.FUNCTION``); docstrings add in which
order rows come, what they add up to, and when there are none.
"""
