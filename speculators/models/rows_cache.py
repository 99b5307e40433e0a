"""Keys and values of one request's context rows, kept for the rounds to come."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["RowsCache"]

#: Rows by which a full cache grows; it also at least doubles, so that appending is cheap.
GROWTH = 256


@dataclass(slots=True)
class RowsCache:
    """Per layer keys and values ``[capacity, heads, head size]``, of which ``length`` rows are filled."""

    length: int = 0
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def append(self, keys_values: list[tuple[Tensor, Tensor]]) -> None:
        """Add rows; one pair of ``[t, heads, head size]`` per layer."""
        needed = self.length + keys_values[0][0].shape[0]
        if not self.keys:
            self.keys = [keys.new_empty(0, *keys.shape[1:]) for keys, _ in keys_values]
            self.values = [values.new_empty(0, *values.shape[1:]) for _, values in keys_values]
        if needed > self.keys[0].shape[0]:
            capacity = max(needed + GROWTH, 2 * self.keys[0].shape[0])
            self.keys = [self._grown(keys, capacity) for keys in self.keys]
            self.values = [self._grown(values, capacity) for values in self.values]
        for layer, (keys, values) in enumerate(keys_values):
            self.keys[layer][self.length : needed] = keys
            self.values[layer][self.length : needed] = values
        self.length = needed

    def _grown(self, rows: Tensor, capacity: int) -> Tensor:
        grown = rows.new_empty(capacity, *rows.shape[1:])
        grown[: self.length] = rows[: self.length]
        return grown

    def rows(self, layer: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """One layer's keys and values from row ``start`` on."""
        return self.keys[layer][start : self.length], self.values[layer][start : self.length]
