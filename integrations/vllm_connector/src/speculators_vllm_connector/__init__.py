"""Hidden states out of a running vLLM server, for training speculative-decoding drafts.

Runs inside vLLM's processes and imports nothing but torch and safetensors beside vLLM. The connector itself is
:class:`speculators_vllm_connector.connector.HiddenStatesConnector`; this module imports nothing, so that vLLM's plugin loader,
which runs in every process, costs nothing.
"""

__version__ = "0.1.0"
