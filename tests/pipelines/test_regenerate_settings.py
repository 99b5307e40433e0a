"""What regenerate-responses is told: distributions, sampling parameters, data."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from speculators.errors import ConfigError, DataError
from speculators.pipelines.regenerate_inputs import open_records
from speculators.pipelines.regenerate_settings import parse_distribution, parse_sampling, temperature_of
from speculators.sampling import SamplingParams


def test_distributions() -> None:
    half = parse_distribution('{"0.0": 3, "0.7": 1, "1.0": 0}', "--temperature", temperature_of)
    assert half is not None
    assert Counter(half.draw(place / 1000) for place in range(1000)) == {0.0: 750, 0.7: 250}
    one = parse_distribution("0.7", "--temperature", temperature_of)
    assert one is not None
    assert one.draw(0.999) == 0.7
    huge = ("nan", f'{{"0.1": 1{400 * "0"}}}', '{"0.1": 1e308, "0.2": 1e308}')
    for wrong in ("warm", "-1", '{"0.1": -1}', '{"0.1": 0}', "{}", '{"0.1": "x"}', '{"x": 1}', "{", '{"0.1": true}', *huge):
        with pytest.raises(ConfigError, match=r"^--temperature .*$"):
            parse_distribution(wrong, "--temperature", temperature_of)


def test_sampling_parameters() -> None:
    assert parse_sampling(None) == (SamplingParams(), {})
    assert parse_sampling('{"temperature": 0.5, "top_k": -1, "min_p": 0.1}') == (
        SamplingParams(temperature=0.5),
        {"min_p": 0.1},
    )
    for wrong, said in {"[]": "no JSON object", '{"top_p": 2}': "top_p", '{"seed": 1}': "--seed", '{"n": 2}': "itself"}.items():
        with pytest.raises(ConfigError, match=said):
            parse_sampling(wrong)


def test_inputs(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "why", "answer": "so"}\n{broken\n{"prompt": "x"}\n', encoding="utf-8")
    opened = open_records(str(data))
    assert opened.total == 3
    kinds = [type(record).__name__ for _, _, record in opened.records]
    assert kinds == ["dict", "DataError", "dict"]
    with pytest.raises(ConfigError, match="--split and --subset"):
        open_records(str(data), split="train")
    with pytest.raises(DataError, match=r"hf:openai/gsm8k:main:test cannot be (reached|read)"):
        open_records("gsm8k", split="test")
    with pytest.raises(DataError, match="there is no data file absent"):
        open_records("absent")
