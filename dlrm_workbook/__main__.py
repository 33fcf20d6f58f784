"""``python -m dlrm_workbook`` is ``dlrm``."""

import sys

from dlrm_workbook.cli import main

if __name__ == "__main__":
    sys.exit(main())
