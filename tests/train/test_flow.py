"""The live view of the flow, and the bar it stands under."""

from __future__ import annotations

import io
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from speculators.data import Row
from speculators.progress import bar
from speculators.train import StepInfo, train
from speculators.train.flow import FlowView, short
from speculators.verifiers.source import HiddenStates
from tests.train.helpers import RowByRowSource, loaded_verifier, settings, tiny_rows

SOURCE = {
    "kind": "vllm",
    "endpoints_alive": 2,
    "engine": "0.11",
    "tokens_per_s": 12345.0,
    "bytes_per_s": 2.5e9,
    "queue": 3.0,
    "asked": 7.0,
    "in_flight_bytes": 1.0e6,
    "in_flight_bytes_max": 2.0e6,
    "waited_share": 0.0123,
    "replay_bytes": 0.0,
    "rows_left_out": 0.0,
}


def drawn(view: FlowView, terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    with bar("Training", 4, console=console, below=view) as steps:
        steps.update(2, "loss 1.0")
        view.update(1.25, 3.5, SOURCE)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_terminal_shows_what_flows() -> None:
    text = drawn(FlowView(), terminal=True)
    for words in (
        "loss 1.2500",
        "3.50 steps/s",
        "12.3 ktokens/s",
        "2.5 GB/s",
        "queue 3 of 7",
        "waited 1.2 %",
        "states from vllm",
        "endpoints alive 2",
        "engine 0.11",
    ):
        assert words in text
    assert "left out" not in text


def test_a_log_file_gets_no_panel() -> None:
    text = drawn(FlowView(), terminal=False)
    assert "Training" in text
    assert "states from" not in text


@pytest.mark.parametrize(("number", "text"), [(0, "0 "), (999, "999 "), (1500, "1.5 k"), (2.5e6, "2.5 M"), (3e12, "3 T")])
def test_numbers_are_short(number: float, text: str) -> None:
    assert short(number) == text


def test_a_run_that_is_stopped_is_saved_before_it_waits_for_a_server_that_hangs(tmp_path: Path) -> None:
    verifier, saved = loaded_verifier(tmp_path), threading.Event()
    checkpoint = tmp_path / "run" / "0" / "training_state.json"

    class Hanging(RowByRowSource):
        def fetch(self, rows: Sequence[Row]) -> list[HiddenStates]:
            if self.stuck:
                for _ in range(500):
                    if checkpoint.exists():
                        saved.set()
                        break
                    time.sleep(0.01)
            return super().fetch(rows)

    source = Hanging(verifier)
    source.stuck = False

    def stop(info: StepInfo) -> None:
        source.stuck = True
        time.sleep(0.05)  # a request that hangs is under way, others are answered
        signal.raise_signal(signal.SIGTERM)

    result = train(
        settings(tmp_path, epochs=50, prefetch_factor=1),
        dataset=tiny_rows(),
        verifier=verifier,
        source=source,
        progress=False,
        on_step=lambda info: stop(info) if info.global_step == 1 else None,
    )
    assert result.reason == "interrupted"
    assert saved.is_set()
