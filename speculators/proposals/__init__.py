"""Token proposal methods: how a draft proposes tokens and how the verifier accepts them, as written in ``config.json``.

Only the greedy method exists in the format. Its values are what a serving engine reads to size the draft's window.
"""

from __future__ import annotations

from speculators.proposals.base import TokenProposalConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig

__all__ = ["GreedyTokenProposalConfig", "TokenProposalConfig"]
