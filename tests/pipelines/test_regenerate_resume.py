"""No run loses or doubles a row, whatever cut it, and none goes on behind what it should not."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speculators.errors import ConfigError, DataError, VerifierError
from speculators.pipelines.answer_files import errors_file, run_file
from speculators.pipelines.regenerate_settings import RegenerateSettings
from tests.pipelines.scripted import (
    CONVERSATIONS,
    DRAWN,
    ScriptedEngine,
    by_id,
    rows,
    run,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted, with drawn settings."""
    outfile = tmp_path_factory.mktemp("whole") / "out.jsonl"
    run(outfile, how=DRAWN)
    return outfile


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1), died=st.one_of(st.none(), st.integers(0, 12)))
def test_a_run_goes_on_behind_any_cut(share: float, died: int | None, whole: Path, tmp_path: Path) -> None:
    """Cut at any byte, perhaps a second time by a lost engine: the rows are those of the run that nothing interrupted."""
    outfile = tmp_path / "out.jsonl"
    for name in (outfile, errors_file(outfile)):
        name.unlink(missing_ok=True)
    shutil.copy(run_file(whole), run_file(outfile))
    content = whole.read_bytes()
    outfile.write_bytes(content[: int(share * len(content))])
    if died is not None:
        engine = ScriptedEngine(dies_after=died)
        try:
            run(outfile, engine, how=DRAWN)
        except VerifierError as error:
            assert "what is done is kept" in str(error)  # noqa: PT017
    kept = outfile.read_bytes().count(b"\n")
    engine = ScriptedEngine()
    report = run(outfile, engine, how=DRAWN)
    assert by_id(outfile) == by_id(whole)
    assert len(engine.asked) == len(by_id(whole)) - kept, "an answer that was there was asked for again"
    assert report.records == len(CONVERSATIONS)


def _slowly(outfile: Path) -> None:
    run(outfile, ScriptedEngine(seconds=0.01), how=DRAWN)


def test_kill_minus_nine(whole: Path, tmp_path: Path) -> None:
    outfile = tmp_path / "out.jsonl"
    context = multiprocessing.get_context("fork")
    kills = 0
    for _ in range(30):
        child = context.Process(target=_slowly, args=(outfile,))
        child.start()
        child.join(0.03 + 0.02 * kills)
        if child.exitcode is not None:
            break
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        kills += 1
    assert kills >= 2
    assert child.exitcode == 0
    assert by_id(outfile) == by_id(whole)


def test_other_settings_are_refused_unless_they_are_wanted(tmp_path: Path) -> None:
    outfile = tmp_path / "out.jsonl"
    with pytest.raises(VerifierError):
        run(outfile, ScriptedEngine(dies_after=4))
    before = outfile.read_bytes()
    more = RegenerateSettings(max_tokens=30)
    with pytest.raises(ConfigError, match=r"begun with other settings \(max_tokens\); .*--resume"):
        run(outfile, how=more)
    with pytest.raises(ConfigError, match=r"answers of another verifier or tokenizer \(verifier\)"):
        run(outfile, ScriptedEngine(name="other"), resume=True)
    with pytest.raises(ConfigError, match=r"other settings \(data\)"):
        run(outfile, given=CONVERSATIONS[:8])
    assert outfile.read_bytes() == before
    run(outfile, how=more, resume=True)
    assert Counter(row["metadata"]["sampling_params"]["max_tokens"] for row in rows(outfile))[20] == 4
    run(outfile, how=more)
    run_file(outfile).unlink()
    with pytest.raises(ConfigError, match=r"no out.run.json beside it says how it was made"):
        run(outfile, how=more)


def test_a_file_that_is_no_file_of_ours_is_refused(tmp_path: Path) -> None:
    outfile = tmp_path / "out.jsonl"
    run(outfile)
    lines = outfile.read_bytes().splitlines(keepends=True)
    for wrong in (b"{}\n", lines[0], b"[1]\n", b"\0\0\n"):
        outfile.write_bytes(b"".join([*lines[:3], wrong, *lines[3:]]))
        before = outfile.read_bytes()
        with pytest.raises(DataError, match=r"line 4 of .* is no row that this run could go on behind"):
            run(outfile)
        assert outfile.read_bytes() == before


def test_draws_are_a_function_of_seed_conversation_and_turn(tmp_path: Path, whole: Path) -> None:
    shuffled = tmp_path / "shuffled.jsonl"
    run(shuffled, given=CONVERSATIONS[::-1], how=DRAWN)
    drawn = {name: row["metadata"]["sampling_params"] for name, row in by_id(whole).items()}
    assert drawn == {name: row["metadata"]["sampling_params"] for name, row in by_id(shuffled).items()}
    assert {params["temperature"] for params in drawn.values()} == {0.0, 0.7}
    assert len({params["seed"] for params in drawn.values()}) == len(drawn)
    other = tmp_path / "other.jsonl"
    run(other, how=RegenerateSettings(max_tokens=9, seed=1, temperature=DRAWN.temperature))
    assert drawn != {name: row["metadata"]["sampling_params"] for name, row in by_id(other).items()}


def test_limits_of_conversations(tmp_path: Path) -> None:
    outfile = tmp_path / "out.jsonl"
    assert run(outfile, how=RegenerateSettings(max_tokens=20, limit=3)).records == 3
    assert run(outfile, how=RegenerateSettings(max_tokens=20, limit=5)).records == 5
    assert len({row["primary_id"] for row in rows(outfile)}) == 5
