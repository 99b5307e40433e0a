"""Starting vLLM: the right command for a version and a purpose, and processes that are watched and cleanly stopped.

vLLM lives in an environment of its own; nothing here imports it.
"""
