"""Verifiers in process: loading, hidden states for training, sessions for decoding, generation of answers."""
