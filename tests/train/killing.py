"""``speculators train`` in which the process of the rank given first kills itself in the middle; see test_processes."""

import os
import signal
import sys

from speculators.__main__ import main
from speculators.train.trainer import Trainer


def dying(trainer: Trainer) -> None:
    if trainer.position.global_step == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    updated(trainer)


updated = Trainer.apply_gradient
if os.environ["RANK"] == sys.argv[1]:
    Trainer.apply_gradient = dying  # type: ignore[method-assign]
sys.exit(main(["train", *sys.argv[2:]]))
