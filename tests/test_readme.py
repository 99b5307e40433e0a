"""The README's Python example runs as it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.models.test_checkpoints import HIDDEN, draft
from tests.tiny import tiny_verifier

README = Path(__file__).parent.parent / "README.md"


def test_the_python_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    draft(tiny_verifier(tmp_path, hidden=HIDDEN)).save_pretrained(tmp_path / "checkpoints" / "checkpoint_best")
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert json.loads((tmp_path / "to-serve" / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(tmp_path / "to-serve" / "model.safetensors", framework="pt") as file:
        assert file.get_slice("fc.weight").get_dtype() == "BF16"
