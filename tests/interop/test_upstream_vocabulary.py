"""Files of ``build-vocab`` in upstream 0.9.0: its training finds tables and counts in the folder, and reads the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from speculators.data import DataManifest, RowDataset, build_mapping, count_dataset, mapping_for, save_counts
from tests.interop.environments import run_peer
from tests.tiny import random_rows, tiny_verifier

pytestmark = pytest.mark.interop

VOCAB, SIZE = 64, 17


def test_upstream_reads_our_tables_and_counts(tmp_path: Path) -> None:
    data = RowDataset.save(tmp_path, random_rows(2, vocab=VOCAB), DataManifest())
    counted = count_dataset(data, VOCAB)
    save_counts(tmp_path / "token_freq.pt", counted)
    # Mandatory ids, so that the tables are not those that upstream would make itself.
    rare = [int(token) for token in np.argsort(counted.counts, kind="stable")[:3]]
    ours = mapping_for(tmp_path, counted, SIZE, VOCAB, mandatory_ids=rare)
    named = [str(tmp_path / f"{table}-{SIZE}-{ours.hash[:8]}.npy") for table in ("d2t", "t2d")]
    # Sizes without tables are built from our counts: with ties at the edge, and with ids that fill up.
    occurring = int((counted.counts > 0).sum())
    built = [build_mapping(counted.counts, size, VOCAB) for size in (occurring - 3, occurring + 5)]
    wanted = [(ours, None, None), (ours, *named), *((mapping, None, None) for mapping in built)]
    verifier = str(tiny_verifier(tmp_path, vocab=VOCAB, layers=1))
    questions = [
        {
            "data_path": str(tmp_path),
            "verifier_name_or_path": verifier,
            "draft_vocab_size": mapping.draft_vocab_size,
            "d2t_path": d2t,
            "t2d_path": t2d,
        }
        for mapping, d2t, t2d in wanted
    ]
    answers = run_peer("upstream", "upstream_vocabulary.py", json.dumps(questions))["answers"]
    counts = {str(token): int(count) for token, count in enumerate(counted.counts) if count}
    assert len(answers) == len(wanted)
    for (mapping, *_), theirs in zip(wanted, answers):
        assert theirs["d2t"] == mapping.d2t.tolist()
        assert theirs["t2d"] == mapping.t2d.tolist()
        assert theirs["dtypes"] == ["torch.int64", "torch.bool"]
        assert theirs["size"] == mapping.draft_vocab_size
        assert theirs["counts"] == counts
