"""The settings of ``speculators quickstart`` and how they follow from the time it is given."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["QuickstartSettings"]


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
    draft_vocab_size: int = 8192
    num_layers: int = 2
    block_size: int = 8
    markov_rank: int = 64
    # Many small steps and a high rate learn fastest in minutes, and most of them on short blocks: a round ends with the first
    # token that is refused, so the first tokens of a block decide.
    total_seq_len: int = 512
    max_anchors: int = 32
    short_block_size: int = 2
    short_block_share: float = 0.7
    learning_rate: float = 3e-3
    weight_decay: float = 0.2
    states_cache_gib: float = 3.0  #: of hidden states; with model, optimiser and logits the run stays below 6 GB
    decode_prompts: int = 8
    decode_tokens: int = 64
    generate_share: float = 0.33  #: of the time, for answers
    least_train_share: float = 0.2  #: of the time, for training, whatever the other steps take

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

    @property
    def seconds(self) -> float:
        """The whole time budget."""
        return 60.0 * self.minutes

    @property
    def decodes(self) -> int:
        """Decodes of a held-out prompt per prompt: plainly and at every n, repeated, and once without the Markov head."""
        return (1 + len(self.decode_counts)) * self.decode_repeats + 1

    def train_seconds(self, used: float, seconds_per_step: float) -> float:
        """Time left for training.

        :param used: seconds that the steps before took.
        :param seconds_per_step: of plain decoding; a round of drafting and its tokens are about as fast.
        """
        left = self.seconds - used - self._fixed_seconds(seconds_per_step)
        return max(left, self.least_train_share * self.seconds)

    def least_seconds(self, used: float, seconds_per_step: float) -> float:
        """What the run takes at least: its parts that do not follow the time budget, answering and the least training.

        :param used: seconds that loading took.
        :param seconds_per_step: as for :meth:`train_seconds`.
        """
        shares = self.generate_share + self.least_train_share
        return used + shares * self.seconds + self._fixed_seconds(seconds_per_step)

    def _fixed_seconds(self, seconds_per_step: float) -> float:
        """Decoding the held-out prompts, loading and saving."""
        decoding = self.decodes * self.decode_prompts * self.decode_tokens * seconds_per_step
        # A tenth more for prefills and comparisons, half a minute for loading and saving.
        return 1.1 * decoding + min(30.0, 0.05 * self.seconds)

    def record(self) -> dict[str, Any]:
        """What a continued run must agree in, as JSON values."""
        values = asdict(self)
        return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}
