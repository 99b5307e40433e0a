"""Is this the tokenizer the verifier was trained with? Loaded tokens against the files, and the template against the tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speculators.files import read_json

__all__ = ["Finding", "TokenizerFiles", "examine", "special_ids"]

#: Classes that take their whole behaviour from ``tokenizer.json``, so that they stand for any other.
_GENERIC = {"TokenizersBackend", "PreTrainedTokenizerFast"}
_QUESTION = {"role": "user", "content": "0"}


@dataclass(frozen=True)
class Finding:
    """One problem in a sentence; a fatal one means that rows would hold ids the verifier never saw for this text."""

    text: str
    fatal: bool = False


@dataclass(frozen=True)
class TokenizerFiles:
    """What a verifier's folder says about its tokenizer; empty where a file is missing."""

    tokenizer_json: Path | None = None
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    added_tokens: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def own_code(self) -> str:
        """The class that the folder brings along as code, such as ``tokenization_kimi.TikTokenTokenizer``; empty if none."""
        places = self.tokenizer_config.get("auto_map") or {}
        classes = places.get("AutoTokenizer") if isinstance(places, dict) else places
        return next((str(name) for name in reversed(classes or []) if name), "")

    @property
    def vocab_size(self) -> int | None:
        """Rows of the verifier's embedding."""
        text = self.config.get("text_config")
        sizes = (holder.get("vocab_size") for holder in (self.config, text) if isinstance(holder, dict))
        return next((size for size in sizes if isinstance(size, int)), None)


def examine(tokenizer: Any, files: TokenizerFiles, eos_ids: Collection[int], vocab_size: int | None = None) -> list[Finding]:
    """All findings, the fatal ones first.

    :param vocab_size: by default the one of ``config.json``.
    """
    findings = [
        *_moved_tokens(tokenizer, files),
        *_split_tokens(tokenizer),
        *_beyond_embedding(tokenizer, eos_ids, vocab_size or files.vocab_size),
        *_other_class(tokenizer, files),
        *_other_ids(tokenizer, files),
        *_two_bos(tokenizer),
        *_end_of_turn(tokenizer, eos_ids),
    ]
    return sorted(findings, key=lambda finding: not finding.fatal)


def _moved_tokens(tokenizer: Any, files: TokenizerFiles) -> Iterator[Finding]:
    """Added tokens whose loaded id is not the file's: a conversion that numbered them anew, or another class's."""
    for source, listed in _listed_tokens(files):
        moved = [(token, index) for index, token in listed if _id(tokenizer, token) != index]
        if moved:
            token, index = moved[0]
            others = f", and {len(moved) - 1} others moved as well" if len(moved) > 1 else ""
            said = f"{token!r} is {_id(tokenizer, token)} as loaded but {index} in {source}{others}; "
            if source == "tokenizer.json" and type(tokenizer).__name__ == files.own_code.rsplit(".", 1)[-1]:
                yield Finding(said + "the verifier's own code does not read that file, but servers may, so remove it")
                continue
            said += "use the tokenizer files that the verifier was published with, and --trust-remote-code if they bring code"
            yield Finding(said, fatal=True)


def _listed_tokens(files: TokenizerFiles) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    decoder = files.tokenizer_config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        yield "tokenizer_config.json", [(int(index), _content(token)) for index, token in decoder.items()]
    if files.tokenizer_json is not None:
        added = read_json(files.tokenizer_json).get("added_tokens") or []
        yield "tokenizer.json", [(int(token["id"]), str(token["content"])) for token in added]
    if files.added_tokens:
        yield "added_tokens.json", [(int(index), token) for token, index in files.added_tokens.items()]


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _split_tokens(tokenizer: Any) -> Iterator[Finding]:
    """Special tokens that the tokenizer does not find in text; the template writes them as text."""
    template = _template_text(tokenizer)
    split = []
    for index, token in sorted(tokenizer.added_tokens_decoder.items()):
        if token.special and (ids := _ids(tokenizer, token.content)) != [index]:
            split.append((token.content, index, ids))
    needed = [entry for entry in split if entry[0] in template]
    for token, index, ids in (needed or split)[:1]:
        yield Finding(
            f"the special token {token!r} ({index}) is encoded as {ids} when it stands in text; load the tokenizer with the "
            "class and files that the verifier was published with",
            fatal=bool(needed),
        )


def _beyond_embedding(tokenizer: Any, eos_ids: Collection[int], vocab_size: int | None) -> Iterator[Finding]:
    if vocab_size is None:
        return
    template = _template_text(tokenizer)
    beyond = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if index >= vocab_size}
    needed = [index for index, token in beyond.items() if token in template or index in eos_ids]
    count = sum(index >= vocab_size for index in tokenizer.get_vocab().values())
    if needed:
        index = min(needed)
        yield Finding(
            f"{beyond[index]!r} is {index}, but the verifier's embedding has {vocab_size} rows; give the tokenizer that "
            "belongs to the verifier",
            fatal=True,
        )
    elif count:
        yield Finding(
            f"{count} ids of the tokenizer lie beyond the {vocab_size} rows of the verifier's embedding; rows that use them "
            "cannot be trained on"
        )


def _other_class(tokenizer: Any, files: TokenizerFiles) -> Iterator[Finding]:
    loaded = type(tokenizer).__name__
    own = files.own_code.rsplit(".", 1)[-1]
    declared = own or str(files.tokenizer_config.get("tokenizer_class") or "")
    generic = loaded in _GENERIC and files.tokenizer_json is not None
    if declared and not generic and loaded.removesuffix("Fast") != declared.removesuffix("Fast"):
        yield Finding(
            f"tokenizer_config.json names the class {declared}, but transformers loaded {loaded}; compare ids of known text "
            "with a server of the verifier" + (", or pass --trust-remote-code to load it as published" if own else "")
        )


def _other_ids(tokenizer: Any, files: TokenizerFiles) -> Iterator[Finding]:
    """A class of transformers may build its own splitting and ignore that of ``tokenizer.json``."""
    if files.tokenizer_json is None or files.own_code:
        return
    from tokenizers import Tokenizer

    plain = Tokenizer.from_file(str(files.tokenizer_json))
    for text in ("Hello  world", "it's 12345\n\n x", "a\tÜber 漢字 👍"):
        ours, theirs = _ids(tokenizer, text), plain.encode(text, add_special_tokens=False).ids
        if ours != theirs:
            yield Finding(
                f"{type(tokenizer).__name__} encodes {text!r} as {ours[:8]}, but tokenizer.json as {theirs[:8]}; if your "
                "server reads tokenizer.json, rows made here do not fit it"
            )
            return


def _two_bos(tokenizer: Any) -> Iterator[Finding]:
    bos = getattr(tokenizer, "bos_token_id", None)
    ids = _render(tokenizer, [_QUESTION])
    if bos is None or ids[:1] != [bos]:
        return
    if list(tokenizer("0")["input_ids"])[:1] == [bos]:
        yield Finding(
            f"both the template and the tokenizer begin a text with {tokenizer.bos_token!r}; rows rendered here have it once, "
            "but a template's text that is tokenised again has it twice"
        )


def _end_of_turn(tokenizer: Any, eos_ids: Collection[int]) -> Iterator[Finding]:
    """The template ends turns with a token that does not end an answer: a server would run on behind it."""
    zero = _render(tokenizer, [_QUESTION, {"role": "assistant", "content": "0"}])
    one = _render(tokenizer, [_QUESTION, {"role": "assistant", "content": "1"}])
    if not zero or not one or zero == one:  # the template has its own ideas; rendering says so for each conversation
        return
    same = 0
    while zero[-1 - same] == one[-1 - same]:
        same += 1
    after = zero[len(zero) - same :]
    marks = special_ids(tokenizer)
    special = [index for index in after if index in marks]
    if set(after) & set(eos_ids):
        return
    if special:
        named = tokenizer.convert_ids_to_tokens(special[0])
        yield Finding(
            f"the template ends the assistant's turn with {named!r} ({special[0]}), which is none of the verifier's end tokens "
            f"{sorted(eos_ids)}; add it to eos_token_id of generation_config.json, as the server needs it there, too"
        )
    else:
        yield Finding(
            "the template ends the assistant's turn with no end token, so a draft never learns to end an answer; check that "
            "the chat template is the verifier's"
        )


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of all special tokens: transformers' own list has those with a role (eos, bos, ...), not all that are flagged."""
    flagged = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return flagged.union(tokenizer.all_special_ids)


def _template_text(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template or "")


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Ids of a conversation; none when there is no template or it does not take it."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    try:
        return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
    except Exception:  # a template may raise anything; each conversation's own rendering reports it
        return []


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _id(tokenizer: Any, token: str) -> int | None:
    index = tokenizer.convert_tokens_to_ids(token)
    return index if isinstance(index, int) and tokenizer.convert_ids_to_tokens(index) == token else None  # not the unknown's
