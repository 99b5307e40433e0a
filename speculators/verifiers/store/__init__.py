"""Hidden states on the disk: mapped shards, an index, and a source that reads them; see docs/hidden-states/store.md."""

from speculators.verifiers.store.records import ShardRecord, StoredRow, StoreRecord
from speculators.verifiers.store.shards import DamagedShardError
from speculators.verifiers.store.source import StoreSource
from speculators.verifiers.store.store import StatesStore
from speculators.verifiers.store.writer import StoreFullError, StoreWriter

__all__ = [
    "DamagedShardError",
    "ShardRecord",
    "StatesStore",
    "StoreFullError",
    "StoreRecord",
    "StoreSource",
    "StoreWriter",
    "StoredRow",
]
