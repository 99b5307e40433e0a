"""The files of a regeneration: one row an answer, what went wrong beside them, and the settings they were made with.

Rows are appended as answers are done, so at any time the file holds the first answers of every conversation begun. The last
row of a conversation says how it ended; a conversation without such a row is gone on with by the next run.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from speculators.errors import ConfigError, DataError
from speculators.files import naming, read_json, sweep_temporaries, write_text_atomically, writing

__all__ = ["AnswerFiles", "check_settings", "errors_file", "run_file"]

Record = dict[str, Any]

#: Seconds between forcing rows onto the disk: what a loss of power costs. A kill costs nothing that was appended.
_SYNC_SECONDS = 5.0


def errors_file(outfile: Path) -> Path:
    """The file of conversations without answers, or with fewer than wanted."""
    return outfile.with_name(f"{outfile.stem}.errors.jsonl")


def run_file(outfile: Path) -> Path:
    """The file of settings."""
    return outfile.with_name(f"{outfile.stem}.run.json")


def check_settings(
    outfile: Path, fixed: Mapping[str, Any], settings: Mapping[str, Any], sources: Mapping[str, str], *, resume: bool
) -> None:
    """See whether a run may go on behind the rows of an earlier one, and write its settings down.

    :param fixed: what may never differ between rows of one file: verifier, tokenizer, template.
    :param settings: what may differ if the user says so.
    :param sources: name -> hash of the data; the names may differ.
    :param resume: they say so.
    :raises ConfigError: for rows of another verifier, of other settings, or of nobody knows what.
    """
    place = run_file(outfile)
    compared = {**settings, "data": list(sources.values())}
    now = json.loads(json.dumps({"fixed": fixed, "settings": compared, "sources": sources}))  # as it will be read again
    if outfile.exists() and outfile.stat().st_size > 0:
        try:
            before = read_json(place)
            fixed_before, settings_before = before["fixed"], before["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{outfile} exists, and no {place.name} beside it says how it was made; choose another --outfile"
            ) from None
        if fixed_before != now["fixed"]:
            names = ", ".join(_differing(fixed_before, now["fixed"]))
            raise ConfigError(f"{outfile} holds answers of another verifier or tokenizer ({names}); choose another --outfile")
        if settings_before != now["settings"] and not resume:
            names = ", ".join(_differing(settings_before, now["settings"]))
            raise ConfigError(
                f"{outfile} was begun with other settings ({names}); give the same ones, pass --resume to go on with these, "
                "or choose another --outfile"
            )
    with writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(place, json.dumps(now, indent=2, ensure_ascii=False) + "\n")


def _differing(before: Any, now: Mapping[str, Any]) -> list[str]:
    old = before if isinstance(before, dict) else {}
    return sorted(key for key in {*old, *now} if old.get(key) != now.get(key))


class AnswerFiles:
    """The rows of a file, known by conversation, and its errors; both are appended to.

    A torn last line, which a kill may leave, is dropped when the file is opened.

    :raises DataError: for a file with a broken line, or with rows that do not follow each other as a run appends them.
    """

    def __init__(self, outfile: Path) -> None:
        self.outfile = outfile
        self.ended: dict[str, str] = {}  #: primary id -> how the conversation ended
        self.finish_reasons: Counter[str] = Counter()  #: of the rows in the file
        self.tokens = 0  #: generated, of the rows in the file
        self._begun: dict[str, list[int]] = {}  # primary id -> where its rows begin, of conversations that have not ended
        outfile.parent.mkdir(parents=True, exist_ok=True)
        sweep_temporaries(outfile.parent, of=run_file(outfile))
        sweep_temporaries(outfile.parent, of=errors_file(outfile))
        self._scan()
        self._keep_lasting_errors()
        self._rows: IO[bytes] = outfile.open("ab")
        self._errors: IO[bytes] = errors_file(outfile).open("ab")
        self._synced = time.monotonic()

    def _scan(self) -> None:
        if not self.outfile.exists():
            return
        whole = 0
        with self.outfile.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self._know(json.loads(line), whole)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise DataError(
                        f"line {number} of {self.outfile} is no row that this run could go on behind ({error}); choose another "
                        "--outfile"
                    ) from None
                whole += len(line)
        if whole < self.outfile.stat().st_size:
            os.truncate(self.outfile, whole)

    def _know(self, row: Record, place: int) -> None:
        primary_id, metadata = row["primary_id"], row["metadata"]
        places = self._begun.setdefault(primary_id, [])
        if primary_id in self.ended or metadata["turn"] != len(places):
            raise DataError(f"turn {metadata['turn']} of {primary_id} stands out of its order")
        self.finish_reasons[metadata["finish_reason"]] += 1
        self.tokens += metadata["usage"]["completion_tokens"]
        places.append(place)
        if metadata["ended"] is not None:
            self.ended[primary_id] = metadata["ended"]
            del self._begun[primary_id]

    def _keep_lasting_errors(self) -> None:
        """Forget the errors of conversations that this run takes up again."""
        place = errors_file(self.outfile)
        if not place.exists():
            return
        kept = []
        for line in place.read_bytes().splitlines(keepends=True):
            try:
                error = json.loads(line)
                primary_id, outcome = error["primary_id"], error["outcome"]
            except (ValueError, KeyError, TypeError):
                continue
            if outcome == "dropped":
                self.ended[primary_id] = outcome
                self._begun.pop(primary_id, None)
            if primary_id in self.ended:
                kept.append(line)
        write_text_atomically(place, b"".join(kept).decode())

    def begun(self, primary_id: str) -> Iterator[Record]:
        """The rows that a conversation which has not ended has in the file, in the order of its turns."""
        places = self._begun.get(primary_id, ())
        if places:
            with self.outfile.open("rb") as stream:
                for place in places:
                    stream.seek(place)
                    yield json.loads(stream.readline())

    def append(self, row: Record) -> None:
        """Add a row."""
        self._write(self._rows, self.outfile, row)
        self.finish_reasons[row["metadata"]["finish_reason"]] += 1
        self.tokens += row["metadata"]["usage"]["completion_tokens"]

    def append_error(self, error: Record) -> None:
        """Add a line to the file of errors."""
        self._write(self._errors, errors_file(self.outfile), error)

    def _write(self, stream: IO[bytes], path: Path, record: Record) -> None:
        try:
            line = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
        except UnicodeEncodeError:  # half a surrogate pair, in an id or a name of the record
            line = json.dumps(record, separators=(",", ":")).encode()
        with naming(path):
            stream.write(line + b"\n")

    def flush(self) -> None:
        """Hand what was appended to the system, and now and then to the disk.

        :raises OSError: that names the file.
        """
        sync = time.monotonic() - self._synced > _SYNC_SECONDS
        for stream, path in ((self._rows, self.outfile), (self._errors, errors_file(self.outfile))):
            with naming(path):
                stream.flush()
                if sync:
                    os.fsync(stream.fileno())
        if sync:
            self._synced = time.monotonic()

    def close(self) -> None:
        for stream, path in ((self._rows, self.outfile), (self._errors, errors_file(self.outfile))):
            with naming(path):
                stream.close()
        if not errors_file(self.outfile).stat().st_size:
            errors_file(self.outfile).unlink()

    def __enter__(self) -> AnswerFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
