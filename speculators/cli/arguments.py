"""Reading ``--num-speculative-tokens 3 7``: one flag, several values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

from speculators.errors import ConfigError

__all__ = ["ListsCommand", "MultiValueCommand", "parse_counts", "parse_numbers", "repeat_flag", "spread_lists"]

#: Flags of ``evaluate``, ``inspect-data`` and ``launch-vllm`` that take one or more integers.
MULTI_VALUE_FLAGS = ("--num-speculative-tokens", "--rows", "--target-layer-ids")


def repeat_flag(arguments: Sequence[str], flag: str) -> list[str]:
    """Rewrite ``flag a b`` as ``flag a flag b``, as far as what follows are numbers or comma lists of numbers.

    A positional argument that is itself a number is then better given before the flag, or after ``--``.
    """
    result: list[str] = []
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        result.append(argument)
        index += 1
        if argument == "--":
            return result + list(arguments[index:])
        if argument != flag:
            continue
        first = index
        while index < len(arguments) and (index == first or _is_counts(arguments[index])):
            result.extend([arguments[index]] if index == first else [flag, arguments[index]])
            index += 1
    return result


def spread_lists(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Rewrite ``flag a b`` as ``flag a flag b``, for a command that has no positional arguments."""
    result: list[str] = []
    current: str | None = None
    for argument in arguments:
        if current is not None and not argument.startswith("-") and result[-1] != current:
            result.append(current)
        elif argument.startswith("-"):
            current = argument if argument in flags else None
        result.append(argument)
    return result


def parse_counts(values: Sequence[str], flag: str) -> list[int]:
    """Numbers of speculative tokens out of ``["3", "7"]`` or ``["3,7"]``, ascending and without repeats.

    :raises ConfigError: when one is not a whole number of at least 1.
    """
    counts: set[int] = set()
    for value in values:
        for part in value.split(","):
            if not part.strip().isdigit() or int(part) < 1:
                raise ConfigError(f"{flag} takes whole numbers of at least 1, such as `{flag} 3 7`, not '{value}'")
            counts.add(int(part))
    return sorted(counts)


def parse_numbers(values: Sequence[str], flag: str) -> list[int]:
    """Numbers from 0 on out of ``["3", "7"]`` or ``["3,7"]``, in their order and without repeats.

    :raises ConfigError: when one is no whole number.
    """
    numbers: dict[int, None] = {}
    for part in (part.strip() for value in values for part in value.split(",")):
        if not part.isascii() or not part.isdigit():
            raise ConfigError(f"{flag} takes whole numbers from 0 on, such as `{flag} 0 5 17`, not '{part}'")
        numbers[int(part)] = None
    return list(numbers)


def _is_counts(text: str) -> bool:
    return all(part.isdigit() for part in text.split(","))


class MultiValueCommand(TyperCommand):
    """A command whose :data:`MULTI_VALUE_FLAGS` take several values after one flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for flag in MULTI_VALUE_FLAGS:
            args = repeat_flag(args, flag)
        return super().parse_args(ctx, args)


class ListsCommand(TyperCommand):
    """A command without positional arguments, whose repeatable flags also take several values after one flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = [name for option in self.params if getattr(option, "multiple", False) for name in option.opts]
        return super().parse_args(ctx, spread_lists(args, flags))
