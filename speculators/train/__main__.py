"""``python -m speculators.train``, the form that ``torchrun`` and ``accelerate launch`` take."""

import sys

from speculators.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
