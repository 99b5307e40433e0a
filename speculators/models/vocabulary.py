"""The draft vocabulary: which verifier ids the draft can propose, as the two tables of the checkpoint format.

``d2t`` holds *offsets*: ``verifier_id = draft_id + d2t[draft_id]``. ``t2d`` marks the kept verifier ids. Draft ids count the
kept verifier ids in ascending order, so either table determines the other. Shape letters: V verifier, D draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speculators.errors import ConfigError

__all__ = ["DraftVocabularyMixin", "d2t_from_t2d", "draft_ids_of", "t2d_from_d2t"]


def d2t_from_t2d(t2d: Tensor) -> Tensor:
    """Offsets ``[D]`` int64 of a mask ``[V]``."""
    kept = t2d.nonzero().squeeze(-1)
    return kept - torch.arange(kept.shape[0], device=kept.device)


def t2d_from_d2t(d2t: Tensor, verifier_vocab_size: int) -> Tensor:
    """Mask ``[V]`` of offsets ``[D]``.

    :raises ConfigError: an id falls outside the verifier's vocabulary, or ids are not ascending.
    """
    kept = d2t.long() + torch.arange(d2t.shape[0], device=d2t.device)
    ascending = bool((kept[1:] > kept[:-1]).all())
    if not ascending or kept.numel() == 0 or int(kept[0]) < 0 or int(kept[-1]) >= verifier_vocab_size:
        raise ConfigError(
            f"d2t does not map to ascending ids below the verifier's vocabulary size {verifier_vocab_size}; it must hold the "
            "offsets verifier_id - draft_id"
        )
    t2d = torch.zeros(verifier_vocab_size, dtype=torch.bool, device=d2t.device)
    t2d[kept] = True
    return t2d


def draft_ids_of(t2d: Tensor) -> Tensor:
    """Draft id of every verifier id ``[V]`` int64, -1 outside the draft vocabulary."""
    return torch.where(t2d, t2d.long().cumsum(dim=0) - 1, -1)


class DraftVocabularyMixin(nn.Module):
    """Adds the vocabulary tables to a model as buffers; none where the draft keeps the whole vocabulary.

    A new model's tables keep the first D ids, until :meth:`load_vocab_mappings`.
    """

    d2t: Tensor | None
    t2d: Tensor | None
    draft_id_table: Tensor | None

    def add_vocabulary(self, verifier_vocab_size: int, draft_vocab_size: int) -> None:
        """Register the buffers; call it once, in the constructor."""
        self.verifier_vocab_size = verifier_vocab_size
        self.draft_vocab_size = draft_vocab_size
        reduced = draft_vocab_size != verifier_vocab_size
        first_ids = torch.arange(verifier_vocab_size) < draft_vocab_size if reduced else None
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.long) if reduced else None)
        self.register_buffer("t2d", first_ids)
        self.register_buffer("draft_id_table", None if first_ids is None else draft_ids_of(first_ids), persistent=False)

    @property
    def reduced_vocabulary(self) -> bool:
        """Whether the draft's vocabulary is a part of the verifier's."""
        return self.draft_vocab_size != self.verifier_vocab_size

    def load_vocab_mappings(self, t2d: Tensor | None, d2t: Tensor | None) -> None:
        """Set the tables; nothing happens when the draft keeps the whole vocabulary, or when both are None.

        :param t2d: bool ``[V]``.
        :param d2t: int ``[D]``.
        :raises ConfigError: one is missing, sizes do not fit the model, or they contradict each other.
        """
        if (t2d is None) != (d2t is None):
            raise ConfigError("give both t2d and d2t, or neither")
        if t2d is None or d2t is None or not self.reduced_vocabulary:
            return
        t2d, d2t = torch.as_tensor(t2d).bool(), torch.as_tensor(d2t).long()
        if t2d.shape != (self.verifier_vocab_size,):
            raise ConfigError(f"t2d has shape {tuple(t2d.shape)}, but the verifier has {self.verifier_vocab_size} ids")
        if int(t2d.sum()) != self.draft_vocab_size:
            raise ConfigError(f"t2d keeps {int(t2d.sum())} ids, but draft_vocab_size is {self.draft_vocab_size}")
        if d2t.shape != (self.draft_vocab_size,):
            raise ConfigError(f"d2t has shape {tuple(d2t.shape)}, but draft_vocab_size is {self.draft_vocab_size}")
        if not torch.equal(d2t_from_t2d(t2d), d2t.to(t2d.device)):
            raise ConfigError("d2t and t2d contradict each other; they must come from one vocabulary mapping")
        device = self.t2d.device if self.t2d is not None and not self.t2d.is_meta else t2d.device
        self.t2d, self.d2t = t2d.to(device), d2t.to(device)
        self.draft_id_table = draft_ids_of(self.t2d)

    def draft_to_verifier(self, draft_ids: Tensor) -> Tensor:
        """Verifier ids of draft ids, any shape."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def verifier_to_draft(self, verifier_ids: Tensor) -> Tensor:
        """Draft ids of verifier ids, any shape; -1 for ids that the draft cannot propose."""
        if self.draft_id_table is None:
            return verifier_ids
        # The batch may still lie on the CPU when the trainer counts a step's denominators.
        return self.draft_id_table[verifier_ids.to(self.draft_id_table.device)].to(verifier_ids.device)
