"""Hidden states from a Ray cluster: actors that run the verifier, wherever there is room, and the source that reads them."""

from speculators.verifiers.rollout.cluster import open_cluster
from speculators.verifiers.rollout.settings import RolloutSettings
from speculators.verifiers.rollout.source import RaySource

__all__ = ["RaySource", "RolloutSettings", "open_cluster"]
