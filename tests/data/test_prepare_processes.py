"""prepare-data in blocks and processes: the same bytes whatever their number, resumed behind a kill, in constant memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from speculators.data import render_blocks, rounds
from speculators.data.prepare import prepare_data
from speculators.data.rows import RowDataset
from tests.data.preparing import chat, config, loaded, write_lines
from tests.tiny import tiny_tokenizer

REPOSITORY = Path(__file__).parents[2]


def conversations(count: int) -> list[object]:
    """Some of them broken, repeated, or of several turns."""
    records: list[object] = [
        chat(f"question {number % 50}", *[f"answer {turn}" for turn in range(1 + number % 3)], id=str(number // 2))
        for number in range(count)
    ]
    records[count // 2] = "{broken"
    records[count // 3] = {"prompt": "nobody answers"}
    return records


def contents(folder: Path) -> dict[str, bytes]:
    """All files that a user sees."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith(".")}


@pytest.mark.parametrize("changes", [{}, {"max_samples": 60, "rows": "turn"}], ids=["all", "some"])
def test_the_bytes_do_not_depend_on_processes_and_blocks(
    changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_lines(tmp_path / "data.jsonl", conversations(150))
    results = []
    for workers, size in ((0, 1 << 20), (0, 1500), (2, 3000)):
        monkeypatch.setattr(rounds, "BLOCK_BYTES", size)
        output = tmp_path / f"{workers}-{size}"
        prepare_data(config(data, output, num_preprocessing_workers=workers, **changes), loaded())
        results.append(contents(output))
    assert len(results[0]) == 7
    assert results[0] == results[1] == results[2]
    assert results[0]["rejected.jsonl"].count(b"\n") > 1


def test_a_run_that_was_stopped_goes_on_behind_its_last_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "BLOCK_BYTES", 1500)
    data = write_lines(tmp_path / "data.jsonl", conversations(150))
    prepare_data(config(data, tmp_path / "whole"), loaded())
    made: list[int] = []
    render = render_blocks.BlockTask.__call__

    def counted(self: render_blocks.BlockTask, job: render_blocks.Job) -> render_blocks.BlockDone:
        if len(made) == 4:
            raise KeyboardInterrupt  # as a kill: nothing of the library catches it
        made.append(job.number)
        return render(self, job)

    monkeypatch.setattr(render_blocks.BlockTask, "__call__", counted)
    with pytest.raises(KeyboardInterrupt):
        prepare_data(config(data, tmp_path / "output"), loaded())
    work = next((tmp_path / "output").glob(".prepare-*/"))
    torn = next(work.glob("block-000001-0.rows"))
    torn.write_bytes(torn.read_bytes()[:-1] + b"?")  # a disk that lost the end of a file when the power went
    monkeypatch.setattr(render_blocks.BlockTask, "__call__", render)
    again: list[int] = []
    monkeypatch.setattr(render_blocks.BlockTask, "__call__", lambda self, job: (again.append(job.number), render(self, job))[1])
    prepare_data(config(data, tmp_path / "output"), loaded())
    assert made == [0, 1, 2, 3]
    assert again[:3] == [1, 4, 5]
    assert contents(tmp_path / "output") == contents(tmp_path / "whole")


#: Prepares files in this process alone and prints, for each, the most anonymous memory beyond that at the start, in KiB, and
#: its tokens. The first is for what stays from then on: modules, and pieces of memory that were freed and are used again.
MEASURE = """
import sys, threading, time
from pathlib import Path
from speculators.data import rounds
from speculators.data.prepare import prepare_data
from tests.data.preparing import config, loaded

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watch():
    while True:
        peaks.append(max(anonymous(), peaks.pop()))
        time.sleep(0.01)

rounds.BLOCK_BYTES = 1 << 16
tokenizer = loaded()
peaks = [0]
threading.Thread(target=watch, daemon=True).start()
for data in sys.argv[1:]:
    peaks[0] = start = anonymous()
    settings = config(Path(data), Path(data + ".rows"), skip_token_freq=True, num_preprocessing_workers=0)
    tokens = int(prepare_data(settings, tokenizer).dataset.lengths.sum())
    print(peaks[0] - start, tokens)
"""


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    files = []
    for rows in (300, 1200, 6000):
        # Rows of ids: rendering would take most of the time and keeps nothing from one conversation to the next but a cache.
        ids = ([number // 2500, number // 50 % 50, number % 50, *[5] * 497] for number in range(rows))
        records = ({"input_ids": each, "loss_mask": [1] * 500} for each in ids)
        files.append(write_lines(tmp_path / f"{len(files)}.jsonl", records))
    arguments = [sys.executable, "-c", MEASURE, *map(str, files)]
    done = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    _, small, large = ([int(word) for word in line.split()] for line in done.stdout.splitlines())
    assert large[1] == 5 * small[1] == 3_000_000
    # The rows that came on top would take 9 bytes a token even without anything around them.
    assert large[0] - small[0] < 0.4 * 9 * (large[1] - small[1]) / 1024, (small, large)


def descendants(process: int) -> list[int]:
    """Worker processes of a running command."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == process:
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def running(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.chaos
@pytest.mark.timeout(180)
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_killed_leaves_nobody_behind_and_is_gone_on_with(sent: signal.Signals, tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_tokenizer().save_pretrained(model)
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 64}))
    answer = "a long answer, over and over. " * 20
    data = write_lines(tmp_path / "data.jsonl", (chat(f"question {number}", answer) for number in range(20_000)))

    def command(output: str) -> list[str]:
        arguments = ["--model", model, "--data", data, "--output", tmp_path / output, "--num-preprocessing-workers", 2]
        return [sys.executable, "-m", "speculators", "prepare-data", *map(str, arguments)]

    subprocess.run(command("whole"), cwd=REPOSITORY, check=True, capture_output=True)
    # Whoever started the tests in the background has Ctrl-C ignored, which processes inherit.
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        command("output"), cwd=REPOSITORY, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=heeding
    )
    try:
        deadline = time.monotonic() + 60
        while len(list((tmp_path / "output").glob(".prepare-*/block-*.npz"))) < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        workers = descendants(process.pid)
        # Ctrl-C goes to the whole group, as a terminal sends it.
        os.killpg(process.pid, sent) if sent is signal.SIGINT else process.send_signal(sent)
        said = process.communicate(timeout=30)[1].decode()
    finally:
        process.kill()
        process.wait()
    assert len(workers) == 2
    deadline = time.monotonic() + 10
    while any(running(worker) for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived the command"
        time.sleep(0.02)
    if sent is signal.SIGINT:
        assert process.returncode == 130
        assert "Traceback" not in said
    finished = len(list((tmp_path / "output").glob(".prepare-*/block-*.npz")))
    assert finished >= 3
    subprocess.run(command("output"), cwd=REPOSITORY, check=True, capture_output=True)
    assert contents(tmp_path / "output") == contents(tmp_path / "whole")
    assert len(RowDataset.load(tmp_path / "output")) == 20_000
