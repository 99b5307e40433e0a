"""Set before torch is imported: test processes beside one another (`pytest -n`) must not each take all the cores."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
