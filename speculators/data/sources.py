"""Where records come from: files, folders, data sets that ``save_to_disk`` wrote, and data sets of a hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from speculators.data.hub_sets import HubSet, download_file, hub_state
from speculators.errors import DataError, last_line
from speculators.files import read_json

__all__ = ["ENDINGS", "Source", "find_sources", "saved_files", "source_files", "source_hash"]

#: Names of data files in a folder; a file that is named itself may have any name.
ENDINGS = (*(f".{kind}{packed}" for kind in ("json", "jsonl", "ndjson") for packed in ("", ".gz", ".zst")), ".parquet")

#: File that ``save_to_disk`` writes into the folder of a data set, and those it writes beside the rows.
STATE = "state.json"
BESIDE = frozenset({STATE, "dataset_info.json", "dataset_dict.json"})

PARQUET = b"PAR1"


@dataclass(frozen=True, slots=True)
class Source:
    """One file, one saved data set, or one split of a data set on a hub."""

    name: str  #: as it was named on the command line, or found in a folder that was
    kind: str  #: "json" (any JSON text), "parquet", "arrow" (a folder of ``save_to_disk``) or "hub"
    path: Path | None = None  #: file or folder; None for the hub
    hub: HubSet | None = None


def find_sources(data: Sequence[str | Path], beside: Path | None = None) -> list[Source]:
    """The sources that are meant by files, folders, ``hf:ID[:SUBSET[:SPLIT]]`` and ``hf://datasets/ORG/NAME/FILE``.

    Folders are searched with all folders below them, in a fixed order; hidden files and folders are left out.

    :param beside: a folder that is left out, too, where it lies in one that is searched: of what is made from the data.
    :raises DataError: for a path that is not there or whose name is not UTF-8, a folder without data, or a hub that cannot be
        reached.
    """
    found = [source for each in data for source in _find(each, beside)]
    for source in found:
        if any("\ud800" <= letter <= "\udfff" for letter in source.name):
            raise DataError(f"the name of the data file {source.name!a} is not UTF-8; rename it")
    return found


def _find(data: str | Path, beside: Path | None) -> list[Source]:
    text = str(data)
    if isinstance(data, Path) and text.startswith("hf:/datasets/"):  # what a Path makes of the two slashes
        text = text.replace("hf:/", "hf://", 1)
    if text.startswith("hf://"):
        path = download_file(text)
        return [Source(text, _kind(path), path)]
    if text.startswith("hf:"):
        return [Source(text, "hub", hub=HubSet.parse(text))]
    if not text.strip():
        raise DataError("the name of the data is empty; give a file, a folder or a data set of a hub")
    path = Path(text)
    if path.is_dir():
        found = list(_walk(path, beside))
        if not found:
            raise DataError(f"the folder {path} holds no data file ({', '.join(ENDINGS)}); name the data files themselves")
        return found
    if not path.exists():
        raise DataError(f"there is no data file {path}; check the path")
    if not path.is_file():  # what a pipe holds can be read once only, and sources are also hashed
        raise DataError(f"{path} is no ordinary file; write the data to one first")
    return [Source(text, _kind(path), path)]


def _walk(folder: Path, beside: Path | None) -> Iterator[Source]:
    if (folder / STATE).is_file():
        yield Source(str(folder), "arrow", folder)
        return
    entries = sorted((entry for entry in folder.iterdir() if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():  # a link may lead to a folder above
            if beside is None or not beside.is_dir() or not entry.samefile(beside):
                yield from _walk(entry, beside)
        elif entry.name.lower().endswith(ENDINGS) and entry.name not in BESIDE and entry.is_file():
            yield Source(str(entry), _kind(entry), entry)


def _kind(path: Path) -> str:
    try:
        with path.open("rb") as file:
            start = file.read(len(PARQUET))
    except OSError as error:
        raise DataError(f"the data file {path} cannot be read ({error.strerror or error}); check its permissions") from error
    return "parquet" if start == PARQUET or path.suffix.lower() == ".parquet" else "json"


def saved_files(folder: Path) -> list[Path]:
    """The Arrow files of a data set that ``save_to_disk`` wrote, in the order of its rows.

    :raises DataError: its list of files is missing or unreadable.
    """
    try:
        names = [entry["filename"] for entry in read_json(folder / STATE)["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"the saved data set {folder} cannot be read ({last_line(error)}); save it again") from error
    return [folder / name for name in names]


def source_files(source: Source) -> list[Path]:
    """The files whose content is the source's, in order; none for a hub's."""
    if source.path is None:
        return []
    return saved_files(source.path) if source.kind == "arrow" else [source.path]


def source_hash(source: Source) -> str:
    """sha256 of the content, as it lies on the disk; for a hub's data set, of the commit and the files that are read.

    :raises DataError: a file cannot be read, or a hub not be reached.
    """
    digest = hashlib.sha256()
    if source.hub is not None:
        digest.update(hub_state(source.hub).encode())
    for file in source_files(source):
        try:
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise DataError(f"the data file {file} cannot be read ({error.strerror or error}); check its disk") from error
    return digest.hexdigest()
