"""Hidden states from live vLLM servers (``--hidden-states vllm``).

A row's token ids go to a server that runs vLLM's method ``extract_hidden_states``; its answer names a file, or another place,
from which the states are read. Nothing a server says is taken for granted.
"""

from speculators.verifiers.vllm.settings import VllmSettings
from speculators.verifiers.vllm.source import VllmSource

__all__ = ["VllmSettings", "VllmSource"]
