"""``speculators inspect-data``: the terminal's text, the page, exit codes, and hostile rows."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import datasets
import numpy as np
import pytest

from speculators.__main__ import main
from speculators.data.rendering import render_conversation
from speculators.data.rows import DataManifest, RowBatch, SourceRecord, write_rows
from speculators.data.tokenizers import load_tokenizer
from tests.data.test_token_text import byte_level
from tests.tiny import CHATML, tiny_tokenizer

HOSTILE = "<script>alert(1)</script> \"'&amp; \x1b[31mred\x07 \u202eevil \u2028 é日👍 </b></i></div>"

GOLDEN = """\
3 rows of 2 conversations, 91 tokens, 48.4 % of them supervised
tokens of a row: 25 to 40, median 26, 95 % of rows up to 40
supervised tokens of a row: 12 to 20, median 12, 95 % of rows up to 20
source chat.jsonl: 2 rows (66.7 %), 66 tokens
source code.jsonl: 1 row (33.3 %), 25 tokens
verifier verifier
tokenizer TOKENIZER_HASH, chat template TEMPLATE_HASH
records: 3 kept, 2 the same as an earlier record
source code.jsonl is broken: breaks off in record 7
shown with the tokenizer of verifier
[[supervised]], «end of turn», ⏎ a line feed, · a space alone

row 0: chat.jsonl, record 10, conversation 0, all turns, 26 tokens, 12 \n\
supervised (46.2 %)
<|im_start|>user⏎
hello<|im_end|>⏎
<|im_start|>assistant⏎
[[good·day··.«<|im_end|>»]]⏎

row 1: chat.jsonl, record 11, conversation 0, message 1, 40 tokens, 20 \n\
supervised (50.0 %)
<|im_start|>user⏎
hello·again<|im_end|>⏎
<|im_start|>assistant⏎
[[it's·a⏎
long·answer.«<|im_end|>»]]⏎

nothing looks wrong
"""


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)


def write(folder: Path, conversations: list[list[tuple[str, str]]], tokenizer: object, **manifest: object) -> Path:
    """A data set of conversations of (question, answer); two rows a conversation, from two sources."""

    def batches():
        for index, turns in enumerate(conversations):
            messages = [
                {"role": role, "content": text}
                for turn in turns
                for role, text in zip(("user", "assistant"), turn, strict=True)
            ]
            rendered = render_conversation(tokenizer, messages)
            yield RowBatch(
                rendered.input_ids,
                rendered.loss_mask,
                np.array([len(rendered.input_ids)]),
                conversation=np.array([index // 2]),
                source=np.array([index // 2 % 2], dtype=np.int32),
                record=np.array([10 + index]),
                turn=np.array([-1 if index % 2 == 0 else 1], dtype=np.int32),
            )

    sources = [SourceRecord(name="chat.jsonl"), SourceRecord(name="code.jsonl", broken="breaks off in record 7")]
    facts = DataManifest.model_validate({"sources": sources, **manifest})
    write_rows(folder, batches(), facts)
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a tokenizer, ``verifier``, and ``data``, three rows made with it."""
    monkeypatch.chdir(tmp_path)
    tiny_tokenizer().save_pretrained("verifier")
    loaded = load_tokenizer("verifier")
    talks = [[("hello", "good day  .")], [("hello again", "it's a\nlong answer.")], [("2+2?", "it is 4 now")]]
    counts = {"kept": 3, "duplicate": 2}
    hashes = {"tokenizer_hash": loaded.hash, "template_hash": loaded.template_hash}
    write(tmp_path / "data", talks, loaded.tokenizer, verifier="verifier", counts=counts, **hashes)
    return tmp_path


def out(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["inspect-data", *arguments]) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out if not code else captured.out + captured.err


def test_text_without_colours(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = out(capsys, "data", "--rows", "0", "1")
    loaded = load_tokenizer("verifier")
    expected = GOLDEN.replace("TOKENIZER_HASH", loaded.hash).replace("TEMPLATE_HASH", loaded.template_hash)
    assert shown == expected
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_a_table_of_token_ids(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = out(capsys, "data", "--rows", "1", "--token-ids").splitlines()
    table = [line.split() for line in lines[lines.index(next(line for line in lines if line.startswith("position"))) :]]
    assert table[0] == ["position", "id", "text", "mask"]
    loaded = load_tokenizer("verifier")
    tokens = loaded.tokenizer
    assert table[1] == ["0", str(tokens.convert_tokens_to_ids("<|im_start|>")), "<|im_start|>", "0"]
    rows = [line for line in table[1:] if len(line) == 4]
    assert [row[0] for row in rows] == [str(place) for place in range(40)]
    assert "".join(row[2] for row in rows if row[3] == "1") == "it's·a⏎long·answer.<|im_end|>"


def test_colours_instead_of_marks(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = out(capsys, "data", "--rows", "0")
    assert "[[" not in coloured
    assert "\x1b[32mg\x1b[0m" in coloured  # supervised text, token by token
    assert "\x1b[1;7;32m<|im_end|>\x1b[0m" in coloured
    assert "\x1b[2mh\x1b[0m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert "[[" in out(capsys, "data", "--rows", "0")


def test_which_rows_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rows(*arguments: str) -> list[str]:
        return re.findall(r"^row (\d+):", out(capsys, "data", *arguments), re.MULTILINE)

    assert rows() == ["2", "1", "0"]  # the shortest, the longest, and what is left
    assert rows("--rows", "2", "0") == rows("--rows=2,0") == ["2", "0"]
    assert rows("--conversation", "0") == ["0", "1"]
    assert rows("--source", "code.jsonl") == ["2"]
    assert rows("--count", "1") == ["2"]
    assert rows("--count", "0") == []


def test_wrong_input_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: str, code: int) -> str:
        shown = out(capsys, *arguments, code=code).splitlines()
        assert len(shown) == 1
        return shown[0]

    assert "absent holds no data set; make one with" in error("absent", code=1)
    assert "there is no row 3; the data set has the rows 0 to 2" in error("data", "--rows", "0", "3", code=2)
    assert "--rows takes whole numbers from 0 on" in error("data", "--rows", "x", code=2)
    assert "give one of them" in error("data", "--rows", "0", "--conversation", "1", code=2)
    assert "no row is of the conversation 7" in error("data", "--conversation", "7", code=1)
    assert "there is no source prose; the data set has chat.jsonl, code.jsonl" in error("data", "--source", "prose", code=2)
    assert "there is no verifier folder 'a/b/c'; check --model" in error("data", "--model", "a/b/c", code=1)
    (folder / "page").mkdir()
    assert "page" in out(capsys, "data", "--count", "0", "--html", "page", code=1)
    assert list(folder.glob(".page*")) == []


def test_another_tokenizer_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    byte_level().save_pretrained("other")
    error = out(capsys, "data", "--model", "other", code=1)
    assert error.startswith("error: the rows were made with the tokenizer of verifier (hash ")
    assert error.count("\n") == 1


def test_another_template_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_tokenizer(CHATML + " ").save_pretrained("verifier")
    assert "another chat template" in " ".join(out(capsys, "data", "--count", "0").split())


def test_ids_are_shown_when_the_verifier_is_gone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree("verifier")
    shown = out(capsys, "data", "--rows", "0")
    assert "token ids are shown, for " in shown
    assert "⟨1⟩⟨52⟩⟨5⟩" in shown
    assert "nothing looks wrong" in shown


def test_upstreams_data_sets_are_shown_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny_tokenizer()
    rendered = [
        render_conversation(tokenizer, [{"role": "user", "content": text}, {"role": "assistant", "content": text}])
        for text in ("one", "three")
    ]
    masks = [np.where(np.arange(len(each.loss_mask)) >= each.loss_mask.argmax(), 1, 0) for each in rendered]  # to the very end
    table = {"input_ids": [each.input_ids.tolist() for each in rendered], "loss_mask": [mask.tolist() for mask in masks]}
    datasets.Dataset.from_dict(table).with_format("torch").save_to_disk("upstream")
    shown = out(capsys, "upstream", "--html", "page.html")
    assert "the data set names no verifier; pass --model to see text" in " ".join(shown.split())
    assert "does not say" in Path("page.html").read_text(encoding="utf-8")
    shown = " ".join(out(capsys, "upstream", "--model", "verifier").split())
    assert "the newline after <|im_end|> is supervised in 2 rows" in shown
    assert "[[three«<|im_end|>»⏎ ]]" in shown
    assert main(["inspect-data", "upstream", "--model", "verifier", "--strict"]) == 1
    assert main(["inspect-data", "data", "--strict"]) == 0


class _Page(HTMLParser):
    """Checks that elements are closed as they were opened, and collects what there is."""

    VOID = ("meta", "br", "use", "path")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture
def hostile(folder: Path) -> Path:
    """Rows whose texts, source names and options try to break out, and a page of them."""
    tokenizer = byte_level()
    tokenizer.chat_template = CHATML.replace("<|im_start|>", "").replace("<|im_end|>", "<|end|>")
    tokenizer.save_pretrained("bytes")
    facts = {"verifier": "bytes", "options": {"</code><script>": HOSTILE}, "counts": {"kept": 2, "<script>": 1}}
    sources = [SourceRecord(name=f"a$b{HOSTILE}.jsonl"), SourceRecord(name="plain.jsonl", broken=HOSTILE)]
    write(folder / "hostile", [[(HOSTILE, HOSTILE)], [("hi", "there")], [("hi", HOSTILE)]], tokenizer, **facts, sources=sources)
    return folder


def test_hostile_rows_cannot_act_in_the_terminal(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("--token-ids",)):
        shown = out(capsys, "hostile", *arguments)
        assert all(char.isprintable() or char == "\n" for char in shown)
        assert "␛" in shown
        assert "<U+202E>" in shown
    assert "é日👍" in out(capsys, "hostile", "--rows", "0").replace("\n", "")


def test_the_page_holds_everything_and_fetches_and_runs_nothing_else(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out(capsys, "hostile", "--html", "page.html")
    text = Path("page.html").read_text(encoding="utf-8")
    page = _Page(text)
    assert page.open == []
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == tags.count("style") == 1
    assert {"img", "link", "iframe", "object", "base"}.isdisjoint(tags)
    sections = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    assert sections == ["overview", "warnings", "account", "lengths", "sources", "coverage", "rows"]
    assert tags.count("svg") == 3
    for _, attributes in page.elements:
        assert not any(name.startswith("on") or name == "src" for name in attributes)
        assert all((attributes.get(name) or "#").startswith("#") for name in ("href", "xlink:href"))
    assert "default-src 'none'" in text
    assert all(char.isprintable() or char == "\n" for char in text)
    written = "".join(page.texts)
    assert "<script>alert(1)</script> \"'&amp; ␛[31mred␇ <U+202E>evil <U+2028> é日👍 </b></i></div>" in written
    assert "url(" not in text.replace("url(#", "")


def test_the_page_counts_tokens_as_the_rows_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out(capsys, "data", "--html", "page.html", "--count", "0")
    page = _Page(Path("page.html").read_text(encoding="utf-8"))
    parts = [attributes for tag, attributes in page.elements if attributes.get("class") == "part"]
    assert [len(str(part["data-ids"]).split()) for part in parts] == [25, 40, 26]
    assert {part["data-at"] for part in parts} == {"0"}
    rows = [attributes["id"] for tag, attributes in page.elements if attributes.get("class") == "row"]
    assert rows == ["row-2", "row-1", "row-0"]
    out(capsys, "data", "--html", "page.html", "--count", "0", "--html-rows", "1")
    assert Path("page.html").read_text(encoding="utf-8").count('class="row"') == 1


def test_a_page_of_fifty_long_rows_stays_small(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = [[("a" * 900, "b" * (1500 + index))] for index in range(60)]
    write(folder / "long", answers, tiny_tokenizer(), verifier="verifier")
    out(capsys, "long", "--html", "page.html", "--count", "1")
    text = Path("page.html").read_text(encoding="utf-8")
    assert text.count('class="row"') == 50
    assert text.count("tokens left out") >= 50
    assert len(text.encode()) < 3_000_000


def _chromium() -> str | None:
    return next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


@pytest.mark.browser
def test_the_page_in_a_browser(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its policy lets its script run, and pointing at a token says its id and position."""
    chromium = _chromium()
    if chromium is None:
        pytest.skip("there is no Chromium on this machine")
    out(capsys, "hostile", "--html", "page.html", "--count", "0")

    def opened(name: str, fragment: str = "") -> str:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={hostile / 'profile'}"]
        url = (hostile / name).as_uri() + fragment
        command = [chromium, *flags, "--virtual-time-budget=2000", "--dump-dom", url]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    text = Path("page.html").read_text(encoding="utf-8")
    folded = text.replace('class="row" id="row-0" open', 'class="row" id="row-0"')
    Path("folded.html").write_text(folded, encoding="utf-8")
    assert 'id="row-0" open' not in folded
    assert 'id="row-0" open' in opened("folded.html", "#row-0")  # the script ran, under the policy
    point = (
        "<script>const token = document.querySelector('#row-0 [data-n=\"3\"]');"
        "token.dispatchEvent(new MouseEvent('mouseover', {bubbles: true}));</script></body>"
    )
    without_policy = re.sub(r"<meta http-equiv[^>]*>", "", text)
    Path("pointed.html").write_text(without_policy.replace("</body>", point), encoding="utf-8")
    found = re.search(r'<div id="tip"[^>]*>([^<]*)</div>', opened("pointed.html"))
    assert found is not None
    # The space and the first byte of U+202E are one token, its other bytes two.
    assert re.fullmatch(r"ids 257, 128, 174 · position (\d+)\u2013(\d+) · context", found[1])
