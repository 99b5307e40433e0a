"""Small tokenizers of each kind that is out there, each with the template it goes with and what a verifier of it would write.

``KINDS`` names them. Vocabularies are a few hundred tokens, but split, merge and decode as the real ones do.
"""

from __future__ import annotations

import base64
import json
import re
import tempfile
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from speculators.data.tokenizers import load_tokenizer
from tests.data import kind_templates as templates

#: Words that are one token, so that goldens can be read; a leading space is part of the token.
WORDS = (
    *(" Paris", " are", " you", " am", " hello", " kind", " yes", " no", " is", " it", " json", "Assistant", "assistant"),
    *("system", "model", "ipython", "think", "final", "analysis", "commentary", "functions", "arguments", "parameters"),
    *("name", "user", "User", "Who", "Hello", "Be", "yes", "sure", "hi", "city", "SF", "sunny", "weather", "\n\n"),
)
#: How Llama-3, Qwen and those after them split text before merging; line breaks stay together.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: Kimi-K2's special tokens and their ids.
KIMI_TOKENS = {
    163584: "[BOS]",
    163585: "[EOS]",
    163586: "<|im_end|>",
    163587: "<|im_user|>",
    163588: "<|im_assistant|>",
    163594: "<|im_system|>",
    163595: "<|tool_calls_section_begin|>",
    163596: "<|tool_calls_section_end|>",
    163597: "<|tool_call_begin|>",
    163598: "<|tool_call_argument_begin|>",
    163599: "<|tool_call_end|>",
    163601: "<|im_middle|>",
    163606: "<think>",
    163607: "</think>",
    163838: "[UNK]",
    163839: "[PAD]",
}

Message = Mapping[str, Any]


def _same(answer: str) -> str:
    return answer


@dataclass(frozen=True)
class Kind:
    """A tokenizer with its template, and what the verifier behind it would have written for an assistant message."""

    make: Callable[[], Any]
    #: The text of a turn as generated, with the token that ends it, when the conversation ends with that turn.
    answer: Callable[[Message], str]
    ends: tuple[str, ...] = ()  #: tokens of the generation config's ``eos_token_id``
    system: bool = True  #: takes a system message
    alternates: bool = False  #: refuses anything but user, assistant, user, ...
    tools: bool = False  #: takes tools, tool calls and tools' answers
    reasoning: str = ""  #: key of a message's reasoning, if the template knows one
    options: Mapping[str, Any] = field(default_factory=dict)
    decoded: Callable[[str], str] = _same  #: the text that its tokens give back, where the tokenizer changes text
    markers: Sequence[str] = ()  #: special tokens that a text may hold by accident

    @property
    def tokenizer(self) -> Any:
        return self.make()

    @property
    def eos_ids(self) -> list[int]:
        return [self.tokenizer.convert_tokens_to_ids(token) for token in self.ends]


def _bytes(text: str) -> str:
    """Text in the letters that stand for bytes in byte-level vocabularies."""
    return "".join(piece for piece, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text))


def _merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Merges that build each word from the left, letter by letter."""
    pairs = [(word[:end], word[end]) for word in words for end in range(1, len(word))]
    return list(dict.fromkeys(pairs))


def _wrap(tokenizer: Tokenizer, specials: Sequence[str], template: str, **roles: str | None) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **roles)
    wrapped.chat_template = template
    return wrapped


def byte_level(
    template: str,
    specials: Sequence[str] = (),
    *,
    split: str | None = SPLIT,
    prefix_space: bool = False,
    normalizer: Any = None,
    **roles: str | None,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE: 256 bytes, the words, the special tokens; ``split=None`` splits as GPT-2 does."""
    merges = _merges([_bytes(word) for word in WORDS])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*letters, *(a + b for a, b in merges)]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    else:
        parts = [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(prefix_space, use_regex=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = _wrap(tokenizer, specials, template, **roles)
    bos = roles.get("bos_token")
    if bos is not None:
        beginning = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, wrapped.convert_tokens_to_ids(bos))])
        wrapped.backend_tokenizer.post_processor = beginning
    return wrapped


def sentence_piece(template: str, specials: Sequence[str], *, prefix_space: bool, **roles: str) -> PreTrainedTokenizerFast:
    """Sentencepiece BPE with byte fallback: special tokens first, spaces as U+2581; ``prefix_space`` adds one in front."""
    words = [word.replace(" ", "\u2581") for word in WORDS]
    letters = [*(f"<0x{byte:02X}>" for byte in range(256)), "\n", "\u2581", *(chr(code) for code in range(33, 127))]
    merges = _merges([*words, "[INST]", "\u2581[INST]", "[/INST]", "\u2581[/INST]", "\u2581\u2581"])
    tokens = dict.fromkeys([*specials, *letters, *(a + b for a, b in merges)])
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    spaces = [normalizers.Prepend("\u2581")] if prefix_space else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix_space else []
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    bos = roles["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, vocab[bos])])
    return _wrap(tokenizer, specials, template, **roles)


def write_kimi(folder: Path, **config: Any) -> Path:
    """A folder as Kimi-K2's: ``tiktoken.model``, code of its own, added tokens at their real ids, no ``tokenizer.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = [(a + b).encode() for a, b in _merges(WORDS)]
    ranks = dict.fromkeys([*(bytes([byte]) for byte in range(256)), *merged])
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))
    (folder / "tiktoken.model").write_text("".join(lines), encoding="ascii")
    (folder / "tokenization_kimi.py").write_text(templates.KIMI_CODE.replace("SPLIT", repr(SPLIT)), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(templates.KIMI, encoding="utf-8")
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    decoder = {str(index): {"content": token, **flags, "special": "think" not in token} for index, token in KIMI_TOKENS.items()}
    settings = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": decoder,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | config), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 163840}), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 163586}), encoding="utf-8")
    return folder


@cache
def kimi() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(str(write_kimi(Path(folder) / "kimi")), trust_remote_code=True).tokenizer


@cache
def chatml(template: str = templates.CHATML) -> Any:
    roles = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    return byte_level(template, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], split=None, **roles)


@cache
def qwen3(template: str = templates.QWEN3) -> Any:
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = byte_level(template, specials, normalizer=normalizers.NFC(), eos_token="<|im_end|>")
    # Added, but not special: they stay when special tokens are skipped.
    words = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


@cache
def llama3() -> Any:
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]
    return byte_level(templates.LLAMA3, specials, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")


@cache
def gemma() -> Any:
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return sentence_piece(templates.GEMMA, specials, prefix_space=False, **roles)


@cache
def inst() -> Any:
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return sentence_piece(templates.INST, ["<unk>", "<s>", "</s>"], prefix_space=True, **roles)


@cache
def harmony() -> Any:
    names = ("startoftext", "endoftext", "return", "constrain", "channel", "start", "end", "message", "call")
    return byte_level(templates.HARMONY, [f"<|{name}|>" for name in names], eos_token="<|return|>")


@cache
def deepseek() -> Any:
    begin, end = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
    specials = [begin, end, "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"]
    return byte_level(templates.DEEPSEEK, specials, bos_token=begin, eos_token=end)


@cache
def plain() -> Any:
    return byte_level(templates.PLAIN)


@cache
def prefixed() -> Any:
    specials = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    return byte_level(templates.PREFIXED, specials, split=None, prefix_space=True, eos_token="<|end|>")


def _text(message: Message) -> str:
    return message.get("content") or ""


def _calls(message: Message) -> list[tuple[str, str, Any]]:
    """Identifier, name and arguments of a message's tool calls."""
    calls = message.get("tool_calls") or []
    return [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]


def _json(arguments: Any) -> str:
    """Arguments that are text already stay as they are."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _qwen3_answer(message: Message) -> str:
    why, text = message.get("reasoning_content") or "", _text(message)
    if not why and "</think>" in text:
        head, text = text.split("</think>")[0], text.split("</think>")[-1].lstrip("\n")
        why = head.rstrip("\n").split("<think>")[-1].lstrip("\n")
    answer = "<think>\n" + why.strip("\n") + "\n</think>\n\n" + text.lstrip("\n")
    for place, (_, name, arguments) in enumerate(_calls(message)):
        answer += "\n" if place or text else ""
        answer += f'<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n</tool_call>'
    return answer + "<|im_end|>"


def _llama3_answer(message: Message) -> str:
    for _, name, arguments in _calls(message):
        return f'{{"name": "{name}", "parameters": {json.dumps(arguments, ensure_ascii=False)}}}<|eot_id|>'
    return _text(message).strip() + "<|eot_id|>"


def _kimi_answer(message: Message) -> str:
    answer = _text(message)
    if message.get("tool_calls"):
        calls = (
            f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
            for name, _, arguments in _calls(message)
        )
        answer += "<|tool_calls_section_begin|>" + "".join(calls) + "<|tool_calls_section_end|>"
    return answer + "<|im_end|>"


def _harmony_answer(message: Message) -> str:
    thinking = message.get("thinking")
    answer = f"<|channel|>analysis<|message|>{thinking}<|end|><|start|>assistant" if thinking else ""
    for _, name, arguments in _calls(message):
        given = json.dumps(arguments, ensure_ascii=False)  # text is written as a JSON string, quotes and all
        return answer + f" to=functions.{name}<|channel|>commentary json<|message|>{given}<|call|>"
    return answer + f"<|channel|>final<|message|>{message['content']}<|return|>"


def _prefixed(answer: str) -> str:
    """As the tokenizer writes it: a space before the text, and before each stretch between special tokens."""
    return re.sub(r"(?:^|(?<=<\|end\|>))(?! |<\|end\|>|$)", " ", answer)


def _spaced(answer: str) -> str:
    """As sentencepiece writes it: a space before each stretch that follows a special token."""
    return re.sub(r"(?<=</s>)(?!</s>|$)", " ", answer)


def _composed(answer: str) -> str:
    return unicodedata.normalize("NFC", answer)


_CHATML_MARKERS = ("<|im_end|>", "<|im_start|>")
_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"

KINDS: dict[str, Kind] = {
    "chatml": Kind(chatml, lambda m: m["content"] + "<|im_end|>", markers=_CHATML_MARKERS),
    "qwen3": Kind(
        qwen3,
        _qwen3_answer,
        tools=True,
        reasoning="reasoning_content",
        decoded=_composed,
        markers=(*_CHATML_MARKERS, "<think>"),
    ),
    "qwen3-no-thinking": Kind(
        qwen3,
        lambda m: _qwen3_answer(m).removeprefix("<think>\n\n</think>\n\n"),
        tools=True,
        options={"enable_thinking": False},
        decoded=_composed,
        markers=_CHATML_MARKERS,
    ),
    "qwen3-thinking": Kind(
        lambda: qwen3(templates.QWEN3_THINKING),
        lambda m: _qwen3_answer(m).removeprefix("<think>\n"),
        tools=True,
        reasoning="reasoning_content",
        decoded=_composed,
        markers=_CHATML_MARKERS,
    ),
    "llama3": Kind(llama3, _llama3_answer, tools=True, markers=("<|eot_id|>", "<|end_of_text|>")),
    "gemma": Kind(
        gemma,
        lambda m: m["content"].strip() + "<end_of_turn>",
        ends=("<eos>", "<end_of_turn>"),
        system=False,
        alternates=True,
        markers=("<end_of_turn>", "<eos>"),
    ),
    "inst": Kind(
        inst,
        lambda m: f" {m['content']}</s>",
        system=False,
        alternates=True,
        decoded=_spaced,
        markers=("</s>", "[/INST]"),
    ),
    "kimi": Kind(kimi, _kimi_answer, ends=("<|im_end|>",), tools=True, markers=("<|im_end|>", "[EOS]")),
    "harmony": Kind(
        harmony,
        _harmony_answer,
        ends=("<|return|>", "<|endoftext|>", "<|call|>"),
        tools=True,
        reasoning="thinking",
        markers=("<|end|>", "<|return|>"),
    ),
    "deepseek": Kind(deepseek, lambda m: m["content"].split("</think>")[-1] + _END, markers=(_END,)),
    "tagged": Kind(lambda: chatml(templates.TAGGED), lambda m: m["content"] + "<|im_end|>", markers=_CHATML_MARKERS),
    "plain": Kind(plain, lambda m: f" {m['content']}"),
    "prefixed": Kind(prefixed, lambda m: m["content"] + "<|end|>", decoded=_prefixed, markers=("<|end|>",)),
}


def token_places(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of a text, and the first character of it that each stands for and the one behind the last."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    characters = [place for place, letter in enumerate(text) for _ in letter.encode()]
    places, first = [], 0
    for index in ids:
        last = first + len(tokenizer.model.decode_single_token_bytes(index))
        places.append((characters[first], characters[last - 1] + 1))
        first = last
    return ids, places
