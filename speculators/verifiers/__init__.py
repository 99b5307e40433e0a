"""Verifiers in process: loading, hidden states for training, sessions for decoding, generation of answers."""

from speculators.verifiers.generation import generate_answers
from speculators.verifiers.loading import Verifier, load_verifier
from speculators.verifiers.packaged import cache_directory, packaged_verifier
from speculators.verifiers.prefetching import prefetch
from speculators.verifiers.self_check import SelfCheck, check_source, check_states
from speculators.verifiers.session import TransformersSession, VerifierOutput, VerifierSession
from speculators.verifiers.source import CachedSource, HiddenStates, HiddenStateSource, StatesDescription
from speculators.verifiers.transformers_source import TransformersSource

__all__ = [
    "CachedSource",
    "HiddenStateSource",
    "HiddenStates",
    "SelfCheck",
    "StatesDescription",
    "TransformersSession",
    "TransformersSource",
    "Verifier",
    "VerifierOutput",
    "VerifierSession",
    "cache_directory",
    "check_source",
    "check_states",
    "generate_answers",
    "load_verifier",
    "packaged_verifier",
    "prefetch",
]
