"""The manifest of a data set: where its rows come from, and whose tokenizer made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from speculators.errors import DataError

__all__ = ["MANIFEST", "SCHEMA", "AnswerRecord", "DataManifest", "SourceRecord", "read_manifest"]

#: Name of the manifest in a data set's folder.
MANIFEST = "manifest.json"

#: What is written. Schema 1 had names for sources, no options, and one hash over vocabulary and chat template together.
SCHEMA = 2


class AnswerRecord(BaseModel):
    """How the supervised answers came about."""

    model_config = ConfigDict(extra="forbid")

    on_policy: bool  #: whether the verifier wrote them
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int | None = None


class SourceRecord(BaseModel):
    """One file or hub data set that records were read from."""

    name: str
    hash: str = ""  #: of its content
    records: int | None = None  #: how many it held; None when not counted
    broken: str | None = None  #: where and why reading it ended early


class DataManifest(BaseModel):
    """Where a data set comes from; written beside its rows."""

    model_config = ConfigDict(populate_by_name=True)

    schema_version: int = Field(default=SCHEMA, alias="schema")
    verifier: str = ""  #: name or path of the model whose tokenizer rendered the rows
    tokenizer_hash: str = ""  #: of all that turns text into ids; empty when not known
    template_hash: str = ""  #: of the chat template
    combined_hash: str = Field(default="", exclude=True)  #: of vocabulary and chat template together, as schema 1 has it
    answers: AnswerRecord | None = None  #: None when not known (answers found in the data, or a foreign data set)
    sources: list[SourceRecord] = []  #: in the order that the rows' ``source`` counts
    options: dict[str, Any] = {}  #: the settings of the run that wrote the rows
    seed: int = 0
    counts: dict[str, int] = {}  #: what became of every input record
    settings_hash: str = ""  #: of everything the rows are a function of; equal means a rerun would write the same rows
    fingerprint: str = ""  #: of the rows themselves; filled in when they are written

    @field_validator("sources", mode="before")
    @classmethod
    def _named_only(cls, value: Any) -> Any:
        """Sources by name alone, as schema 1 has them."""
        return [{"name": each} if isinstance(each, str) else each for each in value] if isinstance(value, list) else value

    @model_validator(mode="before")
    @classmethod
    def _hash_of_schema_1(cls, values: Any) -> Any:
        """What schema 1 calls the tokenizer's hash is another thing, and compares with no other."""
        if not isinstance(values, dict) or values.get("schema", values.get("schema_version")) != 1:
            return values
        return {**values, "tokenizer_hash": "", "combined_hash": values.get("tokenizer_hash", "")}

    def text(self) -> str:
        """The file's content."""
        return self.model_dump_json(indent=2, by_alias=True) + "\n"


def read_manifest(path: Path) -> DataManifest | None:
    """What the file holds; None when there is none, as with a foreign data set.

    :raises DataError: for a file that is no manifest, or one of a later schema.
    """
    try:
        manifest = DataManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
        raise DataError(f"{path} cannot be read ({why}); make the data set again with prepare-data --overwrite") from error
    if manifest.schema_version > SCHEMA:
        raise DataError(
            f"{path} has schema {manifest.schema_version}, newer than the {SCHEMA} of this version; "
            "update speculators or make the data set again"
        )
    return manifest
