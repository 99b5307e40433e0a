"""What the tests of all formats check: configs key by key, drafts token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.convert.foreign import FOREIGN_IDS, MASK, qwen3_keys, read
from tests.convert.reference import drafted, ours

#: Contexts and newest tokens.
ROUNDS = [((5, 9, 2, 33, 17, 40, 8), 12), ((7,), 1), ((61, 60, 3), 50), ((1, 1, 2, 9, 30), 44)]
ROUNDS += [(tuple(range(3, 31)), anchor) for anchor in (60, 2, 25, 38)]


def assumed(report: Any) -> dict[str, Any]:
    return {assumption.key: assumption.value for assumption in report.notes.assumed}


def same_drafts(source: Path, result: Path, verifier: str, **facts: Any) -> None:
    """Foreign rules on the foreign file and our drafter on the converted one give the same tokens, which are not all one."""
    config, tensors = read(source)
    facts = {"foreign_ids": FOREIGN_IDS, "mask_token_id": MASK, "block_size": 5} | facts
    expected = [drafted(config, tensors, verifier, prompt, anchor, **facts) for prompt, anchor in ROUNDS]
    assert ours(result, verifier, ROUNDS) == expected
    assert len({token for tokens in expected for token in tokens}) > 4


def check_decoder(config: dict[str, Any], **changes: Any) -> None:
    """The decoder of a converted config, key by key."""
    decoder = config["transformer_layer_config"]
    expected = {key: value for key, value in qwen3_keys().items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    expected |= {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}, "layer_types": ["full_attention"] * 2}
    for key, value in (expected | changes).items():
        assert decoder.get(key) == value, key


def check_record(config: dict[str, Any], algorithm: str, tokens: int, verifier: str) -> None:
    assert config["speculators_model_type"] == algorithm
    assert config["speculators_config"] == {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        ],
        "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
    }
    assert config["dtype"] == "bfloat16"
    assert "auto_map" not in config
