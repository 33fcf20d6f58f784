"""``python -m dlrm_core``: train, evaluate, infer, parameters."""

import sys

from dlrm_core.base.cli import main

if __name__ == "__main__":
    sys.exit(main())
