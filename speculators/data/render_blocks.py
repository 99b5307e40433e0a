"""The work of prepare-data on one block of records, done in any process: parse, render, and write rows and account.

What becomes of a record depends on the record, its place and the settings alone, never on the process or the block.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from speculators.data.accounting import CODES, WAITING, WARNINGS, Refusal
from speculators.data.block_files import BlockAccount, BlockRows, is_finished, pack_tokens, write_block
from speculators.data.conversations import Message, parse_conversation, record_id
from speculators.data.pretokenised import is_row, parse_row
from speculators.data.readers import Block, block_records
from speculators.data.rendered import Rendered, RenderError
from speculators.data.role_order import merge_roles, role_order_fault
from speculators.errors import DataError

if TYPE_CHECKING:
    from speculators.data.rendered import Renderer

__all__ = ["BlockDone", "BlockTask", "Job", "RenderRules", "block_path"]

#: Keys are whole numbers from 0 to this one, so that they are the same as signed and as unsigned ones.
LARGEST_KEY = 2**63 - 1


@dataclass(frozen=True)
class RenderRules:
    """What decides, beside the renderer, what becomes of a record."""

    seed: int
    seq_length: int
    minimum_valid_tokens: int
    role_order: str  #: template, merge or strict
    source_names: tuple[str, ...]
    source_hashes: tuple[str, ...]
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    vocab_size: int = 1 << 31  #: ids that the verifier has; rows given as ids hold no others


@dataclass(frozen=True)
class Job:
    """One block, and which of its records are to be rendered: those with a key from ``low`` to ``high``."""

    number: int  #: of the block, in reading order
    round: int  #: of the passes over the sources
    low: int
    high: int
    block: Block


@dataclass(frozen=True)
class BlockDone:
    """What a worker says of a block; what it made of it is in the files."""

    number: int
    records: int
    rows: int
    tokens: int


def block_path(folder: Path, round_: int, number: int) -> Path:
    """Where a block's files are, without their suffix."""
    return folder / f"block-{number:06d}-{round_}"


@dataclass
class BlockTask:
    """Renders blocks into a folder. Goes to worker processes by pickle."""

    make_renderer: Callable[[], Renderer]  #: called once in every process
    rules: RenderRules
    folder: Path
    _renderer: Renderer | None = None

    def __call__(self, job: Job) -> BlockDone:
        self._renderer = self._renderer or self.make_renderer()
        rows = _Builder(self._renderer, self.rules, job).build()
        write_block(block_path(self.folder, job.round, job.number), rows, job_facts(job))
        records = int((rows.account.outcomes != WAITING).sum())
        return BlockDone(job.number, records, len(rows.account.row_length), len(rows.tokens))


def job_facts(job: Job) -> dict[str, Any]:
    """What a block's file says of how it was made: a block is not made again for the same facts."""
    return {"low": job.low, "high": job.high, "source": job.block.source, "first": job.block.first}


def is_done(folder: Path, job: Job) -> bool:
    """Whether an earlier run has made this block."""
    return is_finished(block_path(folder, job.round, job.number), job_facts(job))


def _hash(*words: object) -> bytes:
    return hashlib.blake2b("\0".join(map(str, words)).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def order_key(seed: int, conversation_id: str | None, source_hash: str, index: int) -> int:
    """Where a conversation stands in the data set: a hash of the seed and its id, or of its place where it has none.

    Records with one id (turns or generations of one conversation) share it, whatever files they are in.
    """
    words = ("id", conversation_id) if conversation_id is not None else ("record", source_hash, index)
    return int.from_bytes(_hash(seed, *words)[:8], "little") & LARGEST_KEY


class _Builder:
    """Gathers one block's account and rows."""

    def __init__(self, renderer: Renderer, rules: RenderRules, job: Job) -> None:
        self.renderer = renderer
        self.rules = rules
        self.job = job
        self.outcomes: list[int] = []
        self.keys: list[int] = []
        self.digests: list[bytes] = []
        self.left_out: list[int] = []
        self.rows: list[tuple[int, Rendered, int]] = []  # place of the record, row, flags
        self.reasons: dict[int, str] = {}

    def build(self) -> BlockRows:
        for place, (index, record) in enumerate(block_records(self.job.block)):
            self._take(place, index, record)
        keys = np.array(self.keys, dtype=np.int64)
        order = sorted(range(len(self.rows)), key=lambda row: (self.keys[self.rows[row][0]], self.rows[row][0]))
        rows = [self.rows[row] for row in order]
        tokens = [pack_tokens(rendered.input_ids, rendered.loss_mask) for _, rendered, _ in rows]
        account = BlockAccount(
            source=self.job.block.source,
            first=self.job.block.first,
            broken=self.job.block.broken or "",
            outcomes=np.array(self.outcomes, dtype=np.uint8),
            keys=keys,
            digests=np.frombuffer(b"".join(self.digests), dtype="<u8").reshape(-1, 2),
            left_out=np.array(self.left_out, dtype=np.int32),
            row_record=np.array([place for place, _, _ in rows], dtype=np.int32),
            row_turn=np.array([rendered.turn for _, rendered, _ in rows], dtype=np.int32),
            row_length=np.array([len(rendered.input_ids) for _, rendered, _ in rows], dtype=np.int32),
            row_flags=np.array([flags for _, _, flags in rows], dtype=np.uint8),
        )
        return BlockRows(account, np.concatenate([np.zeros(0, np.uint32), *tokens]), self.reasons)

    def _take(self, place: int, index: int, record: Any) -> None:
        """Render one record if its turn has come, and note what became of it."""
        rules, source = self.rules, self.job.block.source
        found = _read(record, rules, rules.source_names[source], index)
        key = order_key(rules.seed, found.conversation_id, rules.source_hashes[source], index)
        outcome, left_out = WAITING, 0
        # Unreadable records are said whether or not they would be needed: they tell of a fault in the file.
        if self.job.low <= key <= self.job.high or (found.refusal and found.refusal.outcome == "unreadable"):
            try:
                rows, cut, left_out = self._render(found)
                outcome = CODES["truncated" if cut else "kept"]
                self.rows += [(place, row, _flags(row, rules)) for row in rows]
            except Refusal as refusal:
                outcome = CODES[refusal.outcome]
                self.reasons[place] = str(refusal)
        self.outcomes.append(outcome)
        self.keys.append(key)
        self.digests.append(found.digest)
        self.left_out.append(left_out)

    def _render(self, found: _Found) -> tuple[list[Rendered], bool, int]:
        """The rows that are kept, whether any of the record was cut, and how many turns gave no row."""
        if found.refusal:
            raise found.refusal
        rendered = found.rows
        if rendered is None:
            try:
                rendered = self.renderer.rows(found.messages, found.tools, found.options)
            except RenderError as error:
                raise Refusal(error.outcome, str(error)) from None
        return _fit(rendered, self.rules)


def _fit(rendered: Sequence[Rendered], rules: RenderRules) -> tuple[list[Rendered], bool, int]:
    """Cut rows to the longest allowed, and keep those with enough supervised tokens."""
    longest = rules.seq_length
    kept: list[Rendered] = []
    most = 0
    for each in rendered:
        row = each
        if len(each.input_ids) > longest:
            row = Rendered(each.input_ids[:longest], each.loss_mask[:longest], each.supervised_turns, each.turn)
        supervised = int(row.loss_mask.sum())
        most = max(most, supervised)
        if supervised >= max(rules.minimum_valid_tokens, 1):
            kept.append(row)
    cut = any(len(each.input_ids) > longest for each in rendered)
    if kept:
        return kept, cut, len(rendered) - len(kept)
    if most:
        raise Refusal("too_short", f"{most} supervised tokens")
    if any(each.loss_mask.any() for each in rendered):
        starts = min(int(np.argmax(each.loss_mask)) for each in rendered if each.loss_mask.any())
        raise Refusal("prompt_too_long", f"the first supervised token is number {starts + 1}")
    raise Refusal("nothing_supervised", "the loss mask is zero everywhere")


def _flags(row: Rendered, rules: RenderRules) -> int:
    """Bits of :data:`WARNINGS` for a kept row."""
    ids, mask = row.input_ids, row.loss_mask
    odd = {
        "two_bos": rules.bos_id is not None and len(ids) > 1 and ids[0] == rules.bos_id == ids[1],
        "no_prompt": bool(mask[0]),
        "no_end_of_turn": bool(rules.eos_ids)
        and len(ids) < rules.seq_length
        and int(ids[np.flatnonzero(mask)[-1]]) not in rules.eos_ids,
    }
    return sum(1 << bit for bit, key in enumerate(WARNINGS) if odd[key])


@dataclass
class _Found:
    """A record as far as it can be read without rendering: messages, rows given as token ids, or why neither."""

    conversation_id: str | None = None
    digest: bytes = bytes(16)
    messages: list[Message] = field(default_factory=list)
    tools: list[Any] | None = None
    options: dict[str, Any] | None = None  #: of the chat template, for this record
    rows: list[Rendered] | None = None
    refusal: Refusal | None = None


def _read(record: Any, rules: RenderRules, source: str, index: int) -> _Found:
    if isinstance(record, DataError):
        return _Found(refusal=Refusal("unreadable", str(record)))
    try:
        if is_row(record):
            ids, mask = parse_row(record, f"record {index} of {source}", rules.vocab_size)
            digest = hashlib.blake2b(pack_tokens(ids, mask).tobytes(), digest_size=16).digest()
            return _Found(record_id(record), digest, rows=[Rendered(ids, mask, 1)])
        conversation = parse_conversation(record, source, index)
    except DataError as error:
        return _Found(refusal=Refusal("not_a_conversation", str(error)))
    content = [conversation.messages, conversation.tools, conversation.later_turns, conversation.options]
    digest = _hash(json.dumps(content, sort_keys=True, ensure_ascii=False, default=str))
    messages, fault = conversation.messages, None
    if rules.role_order == "merge":
        messages = merge_roles(messages)
    if rules.role_order != "template":
        fault = role_order_fault(messages)
    found = _Found(conversation.conversation_id, digest, messages, conversation.tools, conversation.options)
    if not any(message["role"] == "assistant" for message in messages):
        found.refusal = Refusal("no_assistant_turn")
    elif fault is not None:
        found.refusal = Refusal("role_order", fault)
    return found
