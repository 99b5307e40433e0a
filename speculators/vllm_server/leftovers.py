"""What servers that were killed leave in the folder they shared with a trainer.

The rule is the connector's (``speculators_vllm_connector.files``): a server owns one folder ``hs-*``, and holds a lock on the
file ``owner`` in it while it lives.
"""

from __future__ import annotations

import fcntl
import shutil
from contextlib import suppress
from pathlib import Path

__all__ = ["remove_if_empty", "sweep_dead_servers"]

_PREFIX = "hs-"
_OWNER = "owner"
_ROOT_LOCK = ".hs-owners.lock"


def sweep_dead_servers(root: Path) -> None:
    """Remove the folders in ``root`` whose servers are gone; those of servers that run, and everything else, stay."""
    if not (root / _ROOT_LOCK).is_file():
        return
    with suppress(OSError), (root / _ROOT_LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # while a server makes its folder, it is not yet its owner
        for folder in root.glob(f"{_PREFIX}*"):
            if folder.is_symlink() or not (folder / _OWNER).is_file():
                continue
            with suppress(OSError), (folder / _OWNER).open("rb") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def remove_if_empty(root: Path) -> None:
    """Remove a folder of ours that no server uses any more, unless a trainer has put something into it."""
    if root.is_dir() and {entry.name for entry in root.iterdir()} <= {_ROOT_LOCK}:
        shutil.rmtree(root, ignore_errors=True)
