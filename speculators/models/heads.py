"""Output heads of a block: Markov bias from the previous token, and the confidence of acceptance.

The heads read the *post-norm* states of the predicting slots. Shape letters: A anchors, N predicted tokens of a block, H
hidden size, V verifier and D draft vocabulary, R Markov rank.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

__all__ = ["ConfidenceHead", "DraftHeads", "MarkovHead", "MarkovHeadType"]

MarkovHeadType = Literal["vanilla", "gated", "rnn"]

#: Standard deviation of fresh head weights: the initial bias then has one of about sqrt(R) * 0.02 ** 2 = 0.006.
HEAD_STD = 0.02


class MarkovHead(nn.Module):
    """Adds to the logits of a token a low-rank term of the token before it (DSpark paper, section 3).

    With e = W1[previous token] (R entries) and h the slot's state:

    - ``vanilla``: bias = W2 e
    - ``gated``: bias = W2 (sigmoid(G [h; e] + b) * e)
    - ``rnn``: (g, c, o) = J [s; e; h] + b; s' = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c); bias = W2 tanh(o); s starts at 0
      at the block's first slot, which in the fill-in layout reads the anchor and predicts nothing

    W1 is indexed by verifier ids (the previous token may be any), W2 projects to the draft vocabulary.
    """

    def __init__(
        self, head_type: MarkovHeadType, hidden_size: int, rank: int, verifier_vocab_size: int, draft_vocab_size: int
    ) -> None:
        super().__init__()
        self.head_type = head_type
        self.rank = rank
        self.markov_w1 = nn.Embedding(verifier_vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if head_type == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif head_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def embed(self, previous_ids: Tensor) -> Tensor:
        """W1 rows ``[..., R]`` of verifier ids ``[...]``."""
        return self.markov_w1(previous_ids)

    def start(self, num_blocks: int) -> Tensor:
        """State before depth 0, ``[A, R]``."""
        return self.markov_w1.weight.new_zeros(num_blocks, self.rank)

    def step(self, hidden: Tensor, previous_ids: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """W2's input ``[A, R]`` at one depth, and the next state ``[A, R]``.

        :param hidden: ``[A, H]``.
        :param previous_ids: ``[A]``, verifier ids.
        :param state: ``[A, R]``; only ``rnn`` reads and changes it.
        """
        embedded = self.embed(previous_ids)
        if self.head_type == "vanilla":
            return embedded, state
        if self.head_type == "gated":
            gate = self.gate_proj(torch.cat([hidden, embedded], dim=-1)).sigmoid()
            return gate * embedded, state
        keep, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        keep = keep.sigmoid()
        return output.tanh(), keep * state + (1 - keep) * candidate.tanh()

    def codes(self, hidden: Tensor, previous_ids: Tensor, state: Tensor | None = None) -> Tensor:
        """W2's inputs ``[A, N, R]`` with known previous tokens (teacher forcing).

        :param hidden: ``[A, N, H]``.
        :param previous_ids: ``[A, N]``, verifier ids.
        :param state: ``[A, R]`` before depth 0; zero when None.
        """
        if self.head_type != "rnn":
            return self.step(hidden, previous_ids, self.start(0))[0]
        # The parts of J that do not see the state are one matmul for all depths.
        from_state, from_rest = self.joint_proj.weight.split([self.rank, self.joint_proj.in_features - self.rank], dim=1)
        rest = torch.cat([self.embed(previous_ids), hidden], dim=-1)
        inputs = nn.functional.linear(rest, from_rest, self.joint_proj.bias)
        codes = []
        state = self.start(hidden.shape[0]) if state is None else state
        for depth in range(hidden.shape[1]):
            mixed = inputs[:, depth] + nn.functional.linear(state, from_state)
            keep, candidate, output = mixed.chunk(3, dim=-1)
            keep = keep.sigmoid()
            state = keep * state + (1 - keep) * candidate.tanh()
            codes.append(output.tanh())
        return torch.stack(codes, dim=1)


class ConfidenceHead(nn.Module):
    """Logit of the probability that the verifier accepts the token: a linear map of the slot's state, and W1[previous token].

    :param rank: R if the Markov embedding is an input, else 0.
    :param detach: keep the confidence loss from reaching the backbone and W1.
    """

    def __init__(self, hidden_size: int, rank: int, detach: bool) -> None:
        super().__init__()
        self.detach = detach
        self.proj = nn.Linear(hidden_size + rank, 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """``[...]`` of states ``[..., H]`` and W1 rows ``[..., R]``."""
        inputs = hidden if embedded is None else torch.cat([hidden, embedded], dim=-1)
        return self.proj(inputs.detach() if self.detach else inputs).squeeze(-1)


class DraftHeads:
    """A draft's output heads as the loss calls them (:class:`speculators.losses.BlockHeads`).

    :param markov_state: of an ``rnn`` Markov head before depth 0, ``[A, R]``; zero when None.
    """

    def __init__(
        self,
        lm_head: nn.Linear,
        markov: MarkovHead | None = None,
        confidence: ConfidenceHead | None = None,
        confidence_with_markov: bool = False,
        markov_state: Tensor | None = None,
    ) -> None:
        self.lm_head = lm_head
        self.markov = markov
        self.confidence = confidence
        self.confidence_with_markov = confidence_with_markov
        self.markov_state = markov_state

    def after(self, hidden: Tensor, anchor_ids: Tensor, silent: int) -> DraftHeads:
        """The heads for blocks whose first slots predict nothing: an ``rnn`` Markov head reads them too (as in upstream's
        training), with the anchor as the token before.

        :param hidden: of all slots, ``[A, K, H]``.
        :param anchor_ids: ``[A]``, verifier ids.
        :param silent: slots that predict nothing.
        """
        if self.markov is None or self.markov.head_type != "rnn":
            return self
        state = self.markov.start(hidden.shape[0])
        for slot in range(silent):
            state = self.markov.step(hidden[:, slot], anchor_ids, state)[1]
        return self._with_state(state)

    def rows(self, blocks: slice) -> DraftHeads:
        """The heads for some of the blocks."""
        return self if self.markov_state is None else self._with_state(self.markov_state[blocks])

    def _with_state(self, state: Tensor) -> DraftHeads:
        return DraftHeads(self.lm_head, self.markov, self.confidence, self.confidence_with_markov, state)

    def logits(self, hidden: Tensor, previous_ids: Tensor) -> Tensor:
        """Base logits plus Markov bias ``[A, N, D]`` of states ``[A, N, H]`` and previous verifier ids ``[A, N]``."""
        base = self.lm_head(hidden)
        if self.markov is None:
            return base
        codes = self.markov.codes(hidden, previous_ids, self.markov_state)
        flat = torch.addmm(base.flatten(0, -2), codes.flatten(0, -2), self.markov.markov_w2.weight.t())
        return flat.view_as(base)

    def linear_parts(self, hidden: Tensor, previous_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The same logits as pairs (input ``[A, N, k]``, weight ``[D, k]``) whose products add up to them."""
        parts = [(hidden, self.lm_head.weight)]
        if self.markov is not None:
            parts.append((self.markov.codes(hidden, previous_ids, self.markov_state), self.markov.markov_w2.weight))
        return parts

    def confidence_logits(self, hidden: Tensor, previous_ids: Tensor) -> Tensor | None:
        """``[A, N]`` (any leading shape), or None without a confidence head."""
        if self.confidence is None:
            return None
        embedded = self.markov.embed(previous_ids) if self.markov is not None and self.confidence_with_markov else None
        return self.confidence(hidden, embedded)
