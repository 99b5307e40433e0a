"""Loading a tokenizer: what it is known by, what is refused, and what is said."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from speculators.data.tokenizers import (
    LoadedTokenizer,
    begins_with_two_bos,
    check_tokenizer,
    load_tokenizer,
    template_hash,
    tokenizer_hash,
)
from speculators.errors import VerifierError
from tests.data.kinds import KIMI_TOKENS, KINDS, write_kimi
from tests.tiny import CHATML, tiny_tokenizer

MOVED = r"'.*' is \d+ as loaded but \d+ in tokenizer.*\.json, and \d+ others moved as well; .*trust-remote-code"


def saved(folder: Path, tokenizer: Any = None, **files: Any) -> str:
    """A folder with the tokenizer and JSON files beside it, such as ``generation_config={...}``."""
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def edit(folder: str, name: str, change: Any) -> None:
    path = Path(folder) / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_the_hash_is_of_what_turns_text_into_ids(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    same = tokenizer_hash(tokenizer)
    assert same == tokenizer_hash(tiny_tokenizer()) == tokenizer_hash(tiny_tokenizer("another template"))
    # Written to disk and read again by another class, it is the same tokenizer.
    assert load_tokenizer(saved(tmp_path)).hash == same
    others = []
    changed = tiny_tokenizer()
    changed.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.NFC()])
    others.append(changed)
    changed = tiny_tokenizer()
    changed.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    others.append(changed)
    changed = tiny_tokenizer()
    changed.add_tokens([AddedToken("tool", normalized=False)])
    others.append(changed)
    assert len({same, *map(tokenizer_hash, others)}) == 4


def test_the_templates_hash() -> None:
    hashes = [template_hash(tiny_tokenizer(template)) for template in (CHATML, CHATML + " ", None)]
    assert len(set(hashes)) == 3
    named = tiny_tokenizer({"default": CHATML, "tool_use": "x"})
    other = tiny_tokenizer({"tool_use": "y", "default": CHATML})
    again = tiny_tokenizer({"tool_use": "x", "default": CHATML})
    assert template_hash(named) == template_hash(again) != template_hash(other)


def test_end_ids_come_from_the_generation_config_and_the_tokenizer(tmp_path: Path) -> None:
    own = tiny_tokenizer().eos_token_id
    assert load_tokenizer(saved(tmp_path / "a")).eos_ids == (own,)
    assert load_tokenizer(saved(tmp_path / "b", config={"eos_token_id": 3})).eos_ids == (own, 3)
    several = saved(tmp_path / "c", config={"eos_token_id": 3}, generation_config={"eos_token_id": [4, own]})
    assert load_tokenizer(several).eos_ids == (own, 4)
    nested = saved(tmp_path / "d", config={"text_config": {"eos_token_id": 3}})
    assert load_tokenizer(nested).eos_ids == (own, 3)


def test_a_loaded_tokenizer_travels_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "verifier", generation_config={"eos_token_id": 4})
    monkeypatch.chdir(tmp_path)
    loaded = load_tokenizer("verifier")
    loaded.tokenizer.chat_template = "{{ 'another' }}"
    sent = pickle.dumps(loaded)
    assert len(sent) < 2000
    monkeypatch.chdir("/")  # the name was relative
    again = pickle.loads(sent)
    assert isinstance(again, LoadedTokenizer)
    assert (again.name, again.eos_ids, again.hash) == ("verifier", loaded.eos_ids, tokenizer_hash(again.tokenizer))
    assert again.tokenizer.chat_template == "{{ 'another' }}"


@pytest.mark.parametrize("model", ["", "nowhere/", "a b", "a/b/c"])
def test_no_folder(model: str) -> None:
    with pytest.raises(VerifierError, match=r"there is no verifier folder .* check --model"):
        load_tokenizer(model)


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match=r"cannot be loaded \(.*\); give a verifier's folder"):
        load_tokenizer(str(tmp_path))
    folder = saved(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(VerifierError, match=r"generation_config\.json cannot be read"):
        load_tokenizer(folder)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(VerifierError, match="holds no JSON object"):
        load_tokenizer(folder)


def test_moved_special_ids_are_refused(tmp_path: Path) -> None:
    """As a conversion moved Kimi-K2.6's ``</think>`` from 163607 to 163604: every row would hold a wrong id."""
    folder = saved(tmp_path)
    decoder = {"7": {"content": "<|im_start|>", "special": True}, "8": {"content": "<|im_end|>", "special": True}}
    edit(folder, "tokenizer_config.json", lambda config: config.update(added_tokens_decoder=decoder))
    with pytest.raises(VerifierError, match=r"'<\|im_start\|>' is 1 as loaded but 7 in tokenizer_config.json, and 1 others"):
        load_tokenizer(folder)


def test_kimis_own_code_runs_only_with_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    folder = str(write_kimi(tmp_path / "kimi"))
    with pytest.raises(VerifierError, match=r"code that comes with it \(tokenization_kimi\.TikTok.*pass --trust-remote-code"):
        load_tokenizer(folder)
    loaded = load_tokenizer(folder, trust_remote_code=True)
    assert not loaded.tokenizer.is_fast
    assert loaded.eos_ids == (163585, 163586)  # [EOS] of the tokenizer, <|im_end|> of the generation config
    assert loaded.tokenizer.convert_tokens_to_ids(["<think>", "</think>"]) == [163606, 163607]
    assert loaded.warnings == ()
    again = pickle.loads(pickle.dumps(loaded))
    assert (again.hash, again.trust_remote_code) == (tokenizer_hash(again.tokenizer), True)
    (tmp_path / "kimi" / "generation_config.json").unlink()
    (warning,) = load_tokenizer(folder, trust_remote_code=True).warnings
    assert "ends the assistant's turn with '<|im_end|>' (163586)" in warning


def test_kimis_fast_conversion_is_refused(tmp_path: Path) -> None:
    """A ``tokenizer.json`` made of it numbers the added tokens without gaps: every id behind the first gap is wrong."""
    folder = write_kimi(tmp_path)
    vocab = {f"<{index}>": index for index in range(163584)}
    converted = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    converted.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in KIMI_TOKENS.values()])
    converted.save(str(folder / "tokenizer.json"))
    with pytest.raises(VerifierError, match="needs code that comes with it; read that code, and pass --trust-remote-code"):
        load_tokenizer(str(folder))
    (warning,) = load_tokenizer(str(folder), trust_remote_code=True).warnings  # loaded right, but the file is still there
    assert "in tokenizer.json, and" in warning
    assert "servers may, so remove it" in warning
    edit(str(folder), "tokenizer_config.json", lambda config: config.pop("auto_map"))
    edit(str(folder), "tokenizer_config.json", lambda config: config.update(tokenizer_class="PreTrainedTokenizerFast"))
    with pytest.raises(VerifierError, match=MOVED):
        load_tokenizer(str(folder))


def test_another_class_than_the_files_is_said(tmp_path: Path) -> None:
    loaded = load_tokenizer(str(write_kimi(tmp_path)), trust_remote_code=True)

    class Other(type(loaded.tokenizer)):  # type: ignore[misc]
        pass

    loaded.tokenizer.__class__ = Other
    assert "names the class TikTokenTokenizer, but transformers loaded Other" in check_tokenizer(loaded)[0]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_said_of_each_kind(name: str, tmp_path: Path) -> None:
    """With the generation config of its kind, nothing but what is true of it; folders give back what was saved."""
    kind = KINDS[name]
    if name == "kimi":
        folder = str(write_kimi(tmp_path))
    else:
        ends = {"generation_config": {"eos_token_id": kind.eos_ids}} if kind.ends else {}
        folder = saved(tmp_path, kind.tokenizer, **ends)
    loaded = load_tokenizer(folder, trust_remote_code=name == "kimi")
    assert loaded.hash == tokenizer_hash(kind.tokenizer)
    assert loaded.template_hash == template_hash(kind.tokenizer)
    expected = {"plain": "with no end token"} | dict.fromkeys(["llama3", "gemma", "inst", "deepseek"], "has it twice")
    assert len(loaded.warnings) == (name in expected)
    assert all(expected[name] in warning for warning in loaded.warnings)


def test_a_special_token_that_is_cut_up_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    loaded = load_tokenizer(saved(tmp_path, tokenizer))
    assert check_tokenizer(loaded) == []
    real = type(loaded.tokenizer).__call__

    class Deaf(type(loaded.tokenizer)):  # type: ignore[misc]
        def __call__(self, text: str, **how: Any) -> Any:
            return real(self, text.replace("<|im_end|>", "end").replace("<|mask|>", "mask"), **how)

    loaded.tokenizer.__class__ = Deaf
    found = check_tokenizer(loaded)
    assert "'<|im_end|>' (2) is encoded as [" in found[0]  # in the template, so named before the mask token


def test_ids_beyond_the_embedding(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    size = len(tokenizer)
    tokenizer.add_tokens(["<extra>", "<more>"])
    loaded = load_tokenizer(saved(tmp_path, tokenizer, config={"vocab_size": size + 2}))
    assert loaded.warnings == ()
    (warning,) = check_tokenizer(loaded, size)
    assert f"2 ids of the tokenizer lie beyond the {size} rows of the verifier's embedding" in warning
    with pytest.raises(VerifierError, match=r"'<\|im_end\|>' is 2, but the verifier's embedding has 2 rows"):
        load_tokenizer(saved(tmp_path / "small", config={"vocab_size": 2}))


def test_an_end_of_turn_that_ends_no_answer_is_said(tmp_path: Path) -> None:
    """As Gemma's, whose tokenizer's eos is the end of text."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    (warning,) = load_tokenizer(saved(tmp_path / "a", tokenizer)).warnings
    assert "with '<|im_end|>' (2), which is none of the verifier's end tokens [0]" in warning
    assert load_tokenizer(saved(tmp_path / "b", tokenizer, generation_config={"eos_token_id": [0, 2]})).warnings == ()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    (warning,) = load_tokenizer(saved(tmp_path / "c", tokenizer)).warnings
    assert "ends the assistant's turn with no end token" in warning


def test_another_pre_tokeniser_than_the_files_is_said(tmp_path: Path) -> None:
    loaded = load_tokenizer(saved(tmp_path))
    loaded.tokenizer.backend_tokenizer.normalizer = None
    (warning,) = check_tokenizer(loaded)
    assert "encodes 'Hello  world' as [" in warning
    assert "but tokenizer.json as [" in warning


def test_two_bos() -> None:
    tokenizer = tiny_tokenizer()
    assert not begins_with_two_bos([0, 0], tokenizer)  # there is none
    tokenizer.bos_token = "<|im_start|>"
    assert begins_with_two_bos([1, 1, 5], tokenizer)
    assert not begins_with_two_bos([1, 5, 1], tokenizer)
    assert not begins_with_two_bos([1], tokenizer)
