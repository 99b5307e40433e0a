"""Hidden states and answers from a Ray cluster: actors that run the verifier, wherever there is room, the source that reads
them, and the engine that asks them.
"""

from speculators.verifiers.rollout.answers import RayAnswerEngine
from speculators.verifiers.rollout.cluster import open_cluster
from speculators.verifiers.rollout.settings import RolloutSettings
from speculators.verifiers.rollout.source import RaySource

__all__ = ["RayAnswerEngine", "RaySource", "RolloutSettings", "open_cluster"]
