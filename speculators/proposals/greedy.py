"""The greedy proposal method."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from speculators.proposals.base import TokenProposalConfig

__all__ = ["GreedyTokenProposalConfig"]


@TokenProposalConfig.register("greedy")
class GreedyTokenProposalConfig(TokenProposalConfig):
    """Draft ``speculative_tokens`` tokens a round.

    :param speculative_tokens: tokens drafted a round; engines read it as the default window.
    :param verifier_accept_k: a drafted token is accepted if among the verifier's k most likely.
    :param accept_tolerance: by how much less likely than the best an accepted token may be.
    """

    proposal_type: Literal["greedy"] = "greedy"
    speculative_tokens: int = Field(default=5, ge=1)
    verifier_accept_k: int = Field(default=1, ge=1)
    accept_tolerance: float = Field(default=0.0, ge=0.0)
