"""Lossless decoding with a draft, its statistics, the comparison with plain decoding, and its prediction from rows."""

from speculators.decoding.acceptance import Chance, RandomChance, accept_block, verify_greedy
from speculators.decoding.decoder import Decoded, Decoder, Seconds
from speculators.decoding.near_ties import NEAR_TIE_MARGIN, GreedyComparison, GreedyDifference, NearTie, compare_greedy
from speculators.decoding.statistics import AcceptanceStatistics, Round

__all__ = [
    "NEAR_TIE_MARGIN",
    "AcceptanceStatistics",
    "Chance",
    "Decoded",
    "Decoder",
    "GreedyComparison",
    "GreedyDifference",
    "NearTie",
    "RandomChance",
    "Round",
    "Seconds",
    "accept_block",
    "compare_greedy",
    "verify_greedy",
]
