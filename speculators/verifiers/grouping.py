"""Which rows share a pass: like lengths together, so that little is spent on padding."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["consecutive_groups", "length_groups"]

#: Most padding in a group, as a share of its padded tokens.
MAX_WASTE = 0.1


def consecutive_groups(lengths: Sequence[int], token_budget: int) -> list[slice]:
    """Cut sorted lengths (rising or falling) into groups that are padded to their longest member.

    :param token_budget: most tokens of a group, padding included; a longer row is a group of its own.
    """
    groups, first, total = [], 0, 0
    for place, length in enumerate(lengths):
        padded = max(lengths[first], length) * (place - first + 1)
        if place > first and (padded > token_budget or padded - total - length > MAX_WASTE * padded):
            groups.append(slice(first, place))
            first, total = place, 0
        total += length
    if len(lengths) > first:
        groups.append(slice(first, len(lengths)))
    return groups


def length_groups(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Places of ``lengths`` in groups of like length, each at most ``token_budget`` tokens when padded to its longest (or a
    single row); a pure function of the lengths."""
    order = sorted(range(len(lengths)), key=lambda place: (lengths[place], place))
    return [order[group] for group in consecutive_groups([lengths[place] for place in order], token_budget)]
