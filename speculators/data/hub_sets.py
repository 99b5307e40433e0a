"""Data sets of a hub, through ``datasets`` and ``huggingface_hub``; offline, those in their caches and folders on the disk.

Both libraries are imported when a hub is asked for: every process that renders imports this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from speculators.errors import ConfigError, DataError, last_line

__all__ = ["HubSet", "download_file", "hub_state", "stream_tables"]

#: Split that is read when none is named and there are several.
DEFAULT_SPLIT = "train"

FILE_PREFIX = "hf://datasets/"


@dataclass(frozen=True, slots=True)
class HubSet:
    """One data set of a hub, or a local folder that ``load_dataset`` reads."""

    name: str
    subset: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubSet:
        """Of ``hf:ID``, ``hf:ID:SPLIT`` or ``hf:ID:SUBSET:SPLIT``.

        :raises ConfigError: for any other text, and for a slice of a split, which a stream cannot take.
        """
        if text.endswith("]"):
            raise ConfigError(f"{text!r} names a part of a split; name all of it and say how many rows with --max-samples")
        name, *suffixes = text.removeprefix("hf:").split(":")
        if not name or len(suffixes) > 2:
            raise ConfigError(f"{text!r} is no data set of a hub; write hf:ID, hf:ID:SPLIT or hf:ID:SUBSET:SPLIT")
        subset, split = ([None, None, *suffixes])[-2:]
        return cls(name, subset or None, split or None)

    def __str__(self) -> str:
        return ":".join(["hf", self.name, *([self.subset] if self.subset else []), *([self.split] if self.split else [])])


@contextmanager
def _reaching(what: str) -> Iterator[None]:
    """Turn whatever goes wrong on the way to a hub into one sentence."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except (ConnectionError, TimeoutError, HfHubHTTPError) as error:
        raise DataError(f"{what} cannot be reached ({last_line(error)}); check the name, the network and your token") from error
    except FileNotFoundError as error:
        raise DataError(f"{what} was not found ({last_line(error)}); check the name, the network and your token") from error
    except (OSError, ValueError, LookupError, RuntimeError, ImportError, DatasetsError) as error:
        raise DataError(f"{what} cannot be read ({last_line(error)}); check how it is named") from error


def download_file(address: str) -> Path:
    """The local copy of ``hf://datasets/ORG/NAME[@REVISION]/FILE``.

    :raises ConfigError: for an address of another form.
    :raises DataError: when it is not in the cache and cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download

    organisation, _, rest = address.removeprefix(FILE_PREFIX).partition("/")
    name, _, file = rest.partition("/")
    if not address.startswith(FILE_PREFIX) or not (organisation and name and file):
        forms = f"{FILE_PREFIX}ORG/NAME/FILE, or hf:ORG/NAME for all of it"
        raise ConfigError(f"{address!r} is no file of a data set; write {forms}")
    name, _, revision = name.partition("@")
    with _reaching(f"the file {address}"):
        return Path(hf_hub_download(f"{organisation}/{name}", file, repo_type="dataset", revision=revision or None))


def hub_state(hub: HubSet) -> str:
    """Hash of what is read: addresses that name their commit, or the content of files that lie on this disk.

    :raises DataError: the hub cannot be reached.
    """
    import datasets

    with _reaching(f"the data set {hub}"):
        builder = datasets.load_dataset_builder(hub.name, hub.subset)
    digest = hashlib.sha256(f"{hub.subset} {hub.split}".encode())
    files = [str(file) for found in (builder.config.data_files or {}).values() for file in found]
    for file in files or [str(builder.cache_dir)]:
        if Path(file).is_file():
            with open(file, "rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        else:
            digest.update(file.encode())
    return digest.hexdigest()


def stream_tables(hub: HubSet, rows: int) -> Iterator[pa.Table]:
    """The data set's rows in order, as tables of ``rows`` rows.

    :raises DataError: the hub cannot be reached, or has no such subset or split.
    """
    import datasets

    what = f"the data set {hub}"
    with _reaching(what):
        loaded: Any = datasets.load_dataset(hub.name, hub.subset, split=hub.split, streaming=True)
    if isinstance(loaded, dict):
        names = list(map(str, loaded))
        if len(names) > 1 and DEFAULT_SPLIT not in names:
            raise DataError(f"{what} has the splits {', '.join(names)}; name one, as in {hub}:{names[0]}")
        loaded = loaded[names[0] if len(names) == 1 else DEFAULT_SPLIT]
    with _reaching(what):
        yield from loaded.with_format("arrow").iter(batch_size=rows)
