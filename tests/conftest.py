"""Settings of the whole test run."""

import os

# Two test processes that share two cores must not burn them in OpenMP's spin loops.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from hypothesis import settings

# No deadlines: the machines that run this are shared. Same examples every time.
settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")
