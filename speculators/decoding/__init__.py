"""Lossless decoding with a draft, its statistics, the comparison with plain decoding, and its prediction from rows."""

from speculators.decoding.acceptance import Chance, RandomChance, accept_block, verify_greedy
from speculators.decoding.decoder import Decoded, Decoder, Seconds
from speculators.decoding.near_ties import NEAR_TIE_MARGIN, GreedyComparison, GreedyDifference, NearTie, compare_greedy
from speculators.decoding.prediction import AcceptancePrediction, predict_acceptance
from speculators.decoding.replay import ReplayedRow, replay_row, require_own_answers
from speculators.decoding.statistics import AcceptanceStatistics, Round

__all__ = [
    "NEAR_TIE_MARGIN",
    "AcceptancePrediction",
    "AcceptanceStatistics",
    "Chance",
    "Decoded",
    "Decoder",
    "GreedyComparison",
    "GreedyDifference",
    "NearTie",
    "RandomChance",
    "ReplayedRow",
    "Round",
    "Seconds",
    "accept_block",
    "compare_greedy",
    "predict_acceptance",
    "replay_row",
    "require_own_answers",
    "verify_greedy",
]
