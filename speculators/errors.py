"""Errors a user can mend: one sentence that says what is wrong and what to do, and an exit code.

The command line prints the sentence of a :class:`SpeculatorsError` without a traceback and exits with its
``exit_code``; every other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

__all__ = ["ConfigError", "DataError", "LostProcessError", "SpeculatorsError", "StoppedError", "VerifierError", "last_line"]


class SpeculatorsError(Exception):
    """A failure at run time that the user can mend; exit code 1."""

    exit_code = 1


class StoppedError(SpeculatorsError):
    """A signal asked the run to stop; exit code 128 + signal, as shells have it."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"stopped by signal {signal}; run the same command again to go on")
        self.exit_code = 128 + signal


class LostProcessError(SpeculatorsError):
    """Another process of the same run is gone; whichever process notices says so. Exit code 1."""


class ConfigError(SpeculatorsError, ValueError):
    """A wrong or contradictory setting, found before any work was done; exit code 2."""

    exit_code = 2


class DataError(SpeculatorsError, ValueError):
    """Rows, prompts or mappings that cannot be used as they are; exit code 1."""


class VerifierError(SpeculatorsError, ValueError):
    """A verifier that is missing, unreadable or does not fit the draft or the data; exit code 1."""


def last_line(error: BaseException) -> str:
    """What another library's error says, for a sentence of ours: its last line, where the reason stands; its class if mute."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    name = type(error).__name__
    return f"{name}: {lines[-1]}" if lines and isinstance(error, LookupError) else (lines or [name])[-1]
