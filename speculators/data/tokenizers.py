"""Opening a tokenizer, knowing it again by hash, and the check that it is the one the verifier was trained with."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculators.data.tokenizer_checks import Finding, TokenizerFiles, examine
from speculators.errors import VerifierError, last_line
from speculators.files import read_json

__all__ = [
    "LoadedTokenizer",
    "begins_with_two_bos",
    "check_tokenizer",
    "largest_vocabulary",
    "load_tokenizer",
    "template_hash",
    "tokenizer_hash",
    "vocabulary_size",
]

#: Texts whose ids are part of a tokenizer's identity: two tokenizers with one vocabulary differ here if they normalise,
#: split or merge differently. They must never change, or every data set made before is "another tokenizer's".
PROBES = (
    "Hello, world! It's 10:45 and the price is $1,234.56 (about 20%).",
    "  two leading spaces, two\t\ttabs,\n\nan empty line, CRLF\r\n and spaces at the end  ",
    "def f(x_1: int) -> list[str]:\n    return [str(i) for i in range(x_1)]  # 100000000",
    "Ünïcödé: cafe\u0301 café ﬁ ½ Ω ŝ İstanbul straße ДА нет",
    "漢字と仮名、한국어 ไทย हिन्दी العربية עברית",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f \u200b\u00a0\ufeff \u2581 \u0120",
    "<s>[INST] <|im_start|>user<think></think> <|eot_id|> <end_of_turn> <\uff5cAssistant\uff5c></s>",
    "",
    " ",
    "\n",
)


@dataclass(frozen=True, eq=False)
class LoadedTokenizer:
    """A tokenizer with what the rest of the library asks of it.

    Pickled to a worker process it is the folder's name, not the object: tokenizers of remote code do not pickle, and a
    large vocabulary takes longer to send than to read.
    """

    tokenizer: Any
    name: str  #: the verifier's folder or hub id
    eos_ids: tuple[int, ...]  #: ids that end an answer: of the generation config (else the config) and the tokenizer's own
    hash: str  #: :func:`tokenizer_hash`
    template_hash: str  #: :func:`template_hash`
    trust_remote_code: bool = False
    warnings: tuple[str, ...] = ()  #: what :func:`check_tokenizer` found that is no reason to refuse

    def __reduce__(self) -> tuple[Any, ...]:
        facts = (self.eos_ids, self.hash, self.template_hash, self.warnings)
        template = getattr(self.tokenizer, "chat_template", None)
        return _load_again, (_absolute(self.name), self.name, self.trust_remote_code, template, facts)


def load_tokenizer(model: str, trust_remote_code: bool = False) -> LoadedTokenizer:
    """The tokenizer of a verifier, checked against the files it comes from.

    :param model: Hugging Face folder, or a hub id.
    :param trust_remote_code: whether code that comes with the tokenizer may run; nobody is asked on the terminal.
    :raises VerifierError: when there is none, it needs code that is not trusted, or it cannot be the verifier's.
    """
    if not model or (not Path(model).is_dir() and not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", model)):  # nor a hub id
        raise VerifierError(f"there is no verifier folder {model!r}; check --model")
    files = _files(model)
    if files.own_code and not trust_remote_code and not files.tokenizer_json:
        raise VerifierError(
            f"the tokenizer of {model} is code that comes with it ({files.own_code}); read that code, and pass "
            "--trust-remote-code if it may run"
        )
    tokenizer = _from_pretrained(model, trust_remote_code)
    eos_ids = tuple(sorted({*_eos_ids(files, model), *_own_eos(tokenizer)}))
    findings = examine(tokenizer, files, eos_ids)
    fatal = [finding.text for finding in findings if finding.fatal]
    if fatal:
        more = f" (and {len(fatal) - 1} more such problem{'s' if len(fatal) > 2 else ''})" if len(fatal) > 1 else ""
        raise VerifierError(f"the tokenizer of {model} is not the verifier's: {fatal[0]}{more}")
    return LoadedTokenizer(
        tokenizer=tokenizer,
        name=model,
        eos_ids=eos_ids,
        hash=tokenizer_hash(tokenizer),
        template_hash=template_hash(tokenizer),
        trust_remote_code=trust_remote_code,
        warnings=tuple(finding.text for finding in findings),
    )


def check_tokenizer(loaded: LoadedTokenizer, vocab_size: int | None = None) -> list[str]:
    """What is wrong or surprising about a tokenizer, one sentence each; :func:`load_tokenizer` refuses the worst of it.

    :param vocab_size: rows of the verifier's embedding; by default what its ``config.json`` says.
    """
    return [finding.text for finding in _findings(loaded, vocab_size)]


def vocabulary_size(tokenizer: Any) -> int:
    """Ids of a tokenizer: one more than its largest, which is above its number of tokens where ids have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def largest_vocabulary(loaded: LoadedTokenizer) -> int:
    """Number of ids that the verifier can have: those of the tokenizer or the rows of its embedding, whichever are more."""
    rows = _files(loaded.name).vocab_size if Path(loaded.name).is_dir() else None
    return max(vocabulary_size(loaded.tokenizer), rows or 0)


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of what turns text into ids: equal hashes give equal ids for equal text.

    Vocabulary, added tokens and the ids of :data:`PROBES`; neither the chat template (:func:`template_hash`) nor the way a
    library's release writes a tokenizer to disk.
    """
    added = [
        (index, token.content, token.special, token.lstrip, token.rstrip, token.normalized, token.single_word)
        for index, token in sorted(tokenizer.added_tokens_decoder.items())
    ]
    probes = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in PROBES]
    return _digest({"vocabulary": sorted(tokenizer.get_vocab().items()), "added": added, "probes": probes})


def template_hash(tokenizer: Any) -> str:
    """Hash of the chat template, or of all of them when they are named; of nothing when there is none."""
    return _digest(getattr(tokenizer, "chat_template", None))


def begins_with_two_bos(ids: Sequence[int], tokenizer: Any) -> bool:
    """Whether ids begin as those of a rendered template do that was tokenised with special tokens once more."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos is not None and len(ids) > 1 and int(ids[0]) == int(ids[1]) == bos


def _findings(loaded: LoadedTokenizer, vocab_size: int | None) -> list[Finding]:
    return examine(loaded.tokenizer, _files(loaded.name), loaded.eos_ids, vocab_size)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _absolute(name: str) -> str:
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _load_again(place: str, name: str, trust_remote_code: bool, template: Any, facts: tuple[Any, ...]) -> LoadedTokenizer:
    """The same tokenizer in another process: checked and hashed already, with the template it had."""
    tokenizer = _from_pretrained(place, trust_remote_code)
    tokenizer.chat_template = template
    eos_ids, known_hash, known_template, warnings = facts
    return LoadedTokenizer(tokenizer, name, eos_ids, known_hash, known_template, trust_remote_code, warnings)


def _from_pretrained(model: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=bool(trust_remote_code))  # None would ask on stdin
    except Exception as error:  # whatever a broken or foreign folder makes transformers raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "trust_remote_code" in str(error) and not trust_remote_code:
            raise VerifierError(
                f"the tokenizer of {model} needs code that comes with it; read that code, and pass --trust-remote-code if "
                "it may run"
            ) from error
        raise VerifierError(f"the tokenizer of {model} cannot be loaded ({reason}); give a verifier's folder") from error


def _files(model: str) -> TokenizerFiles:
    """The files that say what the tokenizer is, as far as the folder or the hub's cache has them."""
    return TokenizerFiles(
        tokenizer_json=_path(model, "tokenizer.json"),
        tokenizer_config=_read(model, "tokenizer_config.json"),
        added_tokens=_read(model, "added_tokens.json"),
        config=_read(model, "config.json"),
    )


def _path(model: str, name: str) -> Path | None:
    folder = Path(model)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from transformers.utils import cached_file

    try:
        found = cached_file(model, name)
    except (OSError, ValueError):  # not there, or the hub is out of reach: loading the tokenizer says which
        return None
    return None if found is None else Path(found)


def _read(model: str, name: str) -> dict[str, Any]:
    path = _path(model, name)
    if path is None:
        return {}
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise VerifierError(f"{path} cannot be read ({last_line(error)}); download the verifier's file again") from error
    if not isinstance(content, dict):
        raise VerifierError(f"{path} holds no JSON object; download the verifier's file again")
    return content


def _eos_ids(files: TokenizerFiles, model: str) -> list[int]:
    """Ids that end an answer: the generation config's, which knows end-of-turn tokens, else the model config's."""
    text = files.config.get("text_config")
    for holder in (_read(model, "generation_config.json"), files.config, text if isinstance(text, dict) else {}):
        ids = holder.get("eos_token_id")
        if ids is not None:
            return [ids] if isinstance(ids, int) else [int(index) for index in ids]
    return []


def _own_eos(tokenizer: Any) -> list[int]:
    own = getattr(tokenizer, "eos_token_id", None)
    return [] if own is None else [own]
