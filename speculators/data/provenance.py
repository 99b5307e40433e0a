"""Whose tokenizer made the rows: asked wherever rows and a verifier come together."""

from __future__ import annotations

import hashlib
import json
import warnings
from typing import Any

from speculators.data.manifest import DataManifest
from speculators.data.tokenizers import template_hash, tokenizer_hash
from speculators.errors import DataError

__all__ = ["require_tokenizer"]


def require_tokenizer(manifest: DataManifest, tokenizer: Any, verifier: str, rows: str = "the rows") -> None:
    """Refuse rows that another tokenizer than the verifier's made; warn of rows with another chat template.

    Nothing is said of rows whose manifest does not tell, as those of others, or for a verifier without tokenizer files: for
    these there is :meth:`~speculators.data.rows.RowDataset.check_vocabulary` alone.

    :param manifest: of the rows.
    :param tokenizer: the verifier's, or None.
    :param verifier: its name or path, for the sentence.
    :param rows: what the sentence calls the rows, such as their folder.
    :raises DataError: when equal text would get other ids.
    """
    if tokenizer is None:
        return
    made = f"{rows} were made with the tokenizer of {manifest.verifier or 'another verifier'}"
    again = f"run prepare-data again with --model {verifier}"
    if manifest.combined_hash not in ("", _combined_hash(tokenizer)):
        _warn(
            f"{made}, by an earlier version that cannot tell whether it or its chat template alone differs from that of "
            f"{verifier}; {again} if it is another tokenizer"
        )
    if not manifest.tokenizer_hash:
        return
    found = tokenizer_hash(tokenizer)
    if manifest.tokenizer_hash != found:
        raise DataError(
            f"{made} (hash {manifest.tokenizer_hash}), and that of {verifier} gives other ids ({found}); {again}, or name the "
            "verifier that they were made for"
        )
    if manifest.template_hash not in ("", template_hash(tokenizer)):
        _warn(f"{made} and another chat template than that of {verifier}; {again} unless the other template is meant")


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=3)


def _combined_hash(tokenizer: Any) -> str:
    """What earlier versions recorded: one hash of vocabulary and chat template."""
    content = {"vocabulary": sorted(tokenizer.get_vocab().items()), "template": tokenizer.chat_template}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
