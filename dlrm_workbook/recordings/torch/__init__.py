"""Recordings by torch.profiler: what makes them needs torch, what reads them does not."""

RECORDED_KEY = "recorded"
"""Key of the line in which a process that records a run says that the folder is whole."""

UNKNOWN_MODEL = "the program is not this workbook's, so its model and its data are not known"
"""Why a foreign program has no evidence that is found by running parts of the model alone."""

RECORDING_VERSION = 1
"""Version of the folder that a session leaves."""

RECORDED_PASS = "torch.profiler"
"""Name of the pass in which a recording is made."""
