"""The records that are answered again."""

from __future__ import annotations

import hashlib
from pathlib import Path

from speculators.data.prompts import find_data_files, iterate_records
from speculators.pipelines.regenerate import Records

__all__ = ["open_records"]


def open_records(dataset: str) -> Records:
    """The records of a file or folder.

    :raises DataError: for a path that is not there, or a file that cannot be read.
    """
    files = find_data_files([Path(dataset)])
    hashes = {}
    total = 0
    for file in files:
        with file.open("rb") as stream:
            hashes[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
        total += sum(1 for _ in iterate_records(file))
    records = ((file.name, index, record) for file in files for index, record in iterate_records(file))
    return Records(records, hashes, total)
