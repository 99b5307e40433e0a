"""The settings of ``speculators quickstart`` and the time each of its steps gets."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["QuickstartSettings", "TimeShares"]


@dataclass(frozen=True)
class TimeShares:
    """Minutes per step for a run of 15; other runs scale them all alike."""

    load: float = 0.5
    generate: float = 4.5
    train: float = 6.9  #: hidden states included
    decode: float = 2.5

    @property
    def total(self) -> float:
        """What is shared out; the rest of the 15 minutes are the short steps and what was estimated too low."""
        return 15.0


@dataclass(frozen=True)
class QuickstartSettings:
    """What a quickstart does. The defaults are the command's; tests make everything smaller.

    :param minutes: the whole time budget.
    :param prompts: folder of prompt files; ``examples/prompts`` when None.
    :param verifier: folder of the verifier; the packaged one when None.
    """

    minutes: float = 15.0
    seed: int = 0
    prompts: Path | None = None
    verifier: Path | None = None
    human_eval: bool = True
    held_out_share: float = 0.1
    max_prompt_tokens: int = 256
    generate_batch: int = 64
    draft_vocab_size: int = 4096
    num_layers: int = 2
    block_size: int = 8
    markov_rank: int = 64
    total_seq_len: int = 1024
    max_anchors: int = 256
    learning_rate: float = 1e-3
    decode_prompts: int = 8
    decode_tokens: int = 64
    shares: TimeShares = TimeShares()

    @property
    def long(self) -> bool:
        """Whether there is time for longer answers and for repeated timings."""
        return self.minutes >= 30

    @property
    def answer_tokens(self) -> int:
        """Longest answer to a training prompt."""
        return 256 if self.long else 128

    @property
    def decode_counts(self) -> tuple[int, ...]:
        """Numbers of draft tokens to decode with; more of them to find the best one where there is time."""
        most = self.block_size  # anchor-first blocks predict as many tokens as they have slots
        wanted = (2, 3, 4, 7) if self.long else (3, 7)
        return tuple(n for n in wanted if n <= most) or (most,)

    @property
    def decode_repeats(self) -> int:
        return 3 if self.long else 1

    def seconds(self, step: str) -> float:
        """Time budget of a step."""
        return 60.0 * self.minutes * float(getattr(self.shares, step)) / self.shares.total

    def record(self) -> dict[str, Any]:
        """What a continued run must agree in, as JSON values."""
        values = asdict(self)
        return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
