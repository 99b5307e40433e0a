"""Runs in upstream's environment: what its training takes for the draft vocabulary of a folder.

Argument: a JSON list of its settings, one for each question. Prints the tables it takes, and the counts it reads.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from speculators.train.cli import parse_vocab_mappings


def answer(question: dict[str, Any]) -> dict[str, Any]:
    d2t, t2d, size = parse_vocab_mappings(argparse.Namespace(**question, token_freq_path=None, trust_remote_code=False))
    counts = torch.load(f"{question['data_path']}/token_freq.pt", weights_only=True)
    return {
        "d2t": d2t.tolist(),
        "t2d": t2d.tolist(),
        "dtypes": [str(d2t.dtype), str(t2d.dtype)],
        "size": size,
        "counts": {str(token): count for token, count in counts.items()},
    }


print(json.dumps({"answers": [answer(question) for question in json.loads(sys.argv[1])]}))
