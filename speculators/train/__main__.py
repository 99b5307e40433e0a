"""``python -m speculators.train``, the form that ``torchrun`` and ``accelerate launch`` take."""

import runpy
import sys

if __name__ == "__main__":
    # By name: the command line stands above this package, which imports nothing of it.
    sys.argv[1:1] = ["train"]
    runpy.run_module("speculators", run_name="__main__")
