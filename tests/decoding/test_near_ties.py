"""Near ties are recorded and forgiven below the margin in float32, never in float64; everything else is a difference."""

from __future__ import annotations

import pytest
import torch

from speculators.decoding import Decoder, NearTie, compare_greedy
from tests.decoding.tables import Output, TableDrafter, Tables, TableSession

PROMPT = [1, 2]


class WideSession(TableSession):
    """A verifier whose passes over several tokens come out a little different from those over one."""

    def __init__(self, tables: Tables, error: float) -> None:
        super().__init__(tables)
        self.error = error

    def verify(self, tokens: list) -> list[Output]:
        outputs = super().verify(tokens)
        for part, output in zip(tokens, outputs):
            if len(part) > 1:
                output.logits[:, ::2] -= self.error
        return outputs


def tied_tables(gap: float, dtype: torch.dtype) -> Tables:
    """After every text the two best tokens, an even one and the odd one above it, are ``gap`` apart; the even one wins."""
    tables = Tables(vocab=8, draft_ids=range(8), depths=3, seed=0, dtype=dtype)
    best = torch.randint(0, 4, (8, 8), generator=torch.Generator().manual_seed(5)) * 2
    tables.p.scatter_(-1, best[..., None], 10.0)
    tables.p.scatter_(-1, best[..., None] + 1, 10.0 - gap)
    return tables


def compared(gap: float, error: float, dtype: torch.dtype = torch.float32) -> tuple[list[int], list[int], object]:
    tables = tied_tables(gap, dtype)
    plain = Decoder(lambda: WideSession(tables, error)).decode(PROMPT, 10).tokens
    decoder = Decoder(lambda: WideSession(tables, error), TableDrafter(tables), 3)
    drafted = decoder.decode(PROMPT, 10).tokens
    return plain, drafted, compare_greedy(decoder, PROMPT, plain, drafted, 10, prompt_index=4)


def test_equal_outputs_are_identical() -> None:
    plain, drafted, result = compared(gap=0.5, error=0.01)
    assert plain == drafted
    assert result.identical_to_baseline
    assert result.near_ties == []


def test_near_ties_are_recorded_and_the_comparison_goes_on() -> None:
    plain, drafted, result = compared(gap=4e-4, error=8e-4)
    assert plain != drafted
    assert result.identical_to_baseline
    # The first token comes from the prefill; every restart begins with one more of these, then meets the next near tie.
    assert [tie.position for tie in result.near_ties] == [1, 3, 5, 7, 9]
    for tie in result.near_ties:
        assert tie.prompt == 4
        assert tie.margin == pytest.approx(4e-4, rel=0.01)
        assert tie.to_dict() == {"prompt": 4, "position": tie.position, "margin": tie.margin}


@pytest.mark.parametrize(("gap", "error", "dtype"), [(2e-3, 4e-3, torch.float32), (4e-4, 8e-4, torch.float64)])
def test_other_differences_are_not_forgiven(gap: float, error: float, dtype: torch.dtype) -> None:
    plain, drafted, result = compared(gap, error, dtype)
    assert not result.identical_to_baseline
    assert result.near_ties == []
    assert (result.difference.prompt, result.difference.position) == (4, 1)
    assert (result.difference.baseline, result.difference.candidate) == (plain[1], drafted[1])
    assert result.difference.margin == pytest.approx(gap, rel=0.01)


def test_a_token_that_is_not_among_the_tied_is_a_difference() -> None:
    """Two tied tokens excuse each other, not a third."""
    tables = tied_tables(gap=1e-4, dtype=torch.float32)
    decoder = Decoder(lambda: TableSession(tables), TableDrafter(tables), 3)
    plain = decoder.decode(PROMPT, 6).tokens
    wrong = [*plain]
    wrong[3] = (plain[3] + 2) % 8
    assert not compare_greedy(decoder, PROMPT, plain, wrong, 6).identical_to_baseline


def test_an_output_that_ends_early_is_a_difference() -> None:
    tables = tied_tables(gap=0.5, dtype=torch.float32)
    decoder = Decoder(lambda: TableSession(tables), TableDrafter(tables), 3)
    plain = decoder.decode(PROMPT, 6).tokens
    result = compare_greedy(decoder, PROMPT, plain, plain[:4], 6)
    assert result.difference is not None
    assert result.difference.candidate is None
    assert not compare_greedy(decoder, PROMPT, plain[:4], plain, 6).identical_to_baseline


def test_a_near_tie_at_the_last_token_ends_the_comparison() -> None:
    tables = tied_tables(gap=1e-4, dtype=torch.float32)
    decoder = Decoder(lambda: TableSession(tables), TableDrafter(tables), 3)
    plain = decoder.decode(PROMPT, 6).tokens
    candidate = [*plain[:5], plain[5] + 1]
    result = compare_greedy(decoder, PROMPT, plain, candidate, 6)
    assert result.identical_to_baseline
    assert result.near_ties == [NearTie(0, 5, pytest.approx(1e-4, rel=0.05))]
