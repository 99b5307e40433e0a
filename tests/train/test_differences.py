"""The tables in docs/differences.md say what the code says, and nothing else differs from upstream's defaults."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from speculators.train.config import TrainConfig, derive
from speculators.train.config.fields import FAMILIES, setting_info
from tests.train.upstream_defaults import UPSTREAM_DEFAULTS, UPSTREAM_DERIVED

DOCUMENT = Path(__file__).parents[2] / "docs" / "differences.md"
DERIVED_NAMES = ("num_layers", "draft_arch", "block_size", "sample_from_anchor", "per_position_loss_weight", "loss_fn")


def table(heading: str) -> list[list[str]]:
    section = DOCUMENT.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip().strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row] for row in rows[2:]]


def name_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def ours() -> dict[tuple[str, str], Any]:
    return {(group or "", name): field.get_default(call_default_factory=True) for group, name, field in TrainConfig.settings()}


def test_every_upstream_setting_is_there_in_its_group() -> None:
    upstream = {(group, name) for group, names in UPSTREAM_DEFAULTS.items() for name in names}
    assert upstream - set(ours()) == set()


def test_defaults_differ_exactly_where_the_document_says() -> None:
    ours_by_key = ours()
    differing = {
        name: (default, ours_by_key[group, name])
        for group, names in UPSTREAM_DEFAULTS.items()
        for name, default in names.items()
        if ours_by_key[group, name] != default
    }
    documented = {name_of(row[0]): (row[1], row[2]) for row in table("Defaults that differ")}
    assert {name: tuple(map(str, pair)) for name, pair in differing.items()} == documented


def test_own_flags_are_exactly_the_documented_ones() -> None:
    upstream = {name for names in UPSTREAM_DEFAULTS.values() for name in names}
    own = {name: str(default) for (_, name), default in ours().items() if name not in upstream}
    assert own == {name_of(row[0]): row[1] for row in table("Flags of our own")}
    marked = {name for _, name, field in TrainConfig.settings() if setting_info(field).own}
    assert marked == set(own)


def test_derived_defaults_differ_exactly_where_the_document_says() -> None:
    differing = set()
    for family in FAMILIES:
        derived = derive(TrainConfig.from_flat(speculator_type=family))
        for name, upstream in zip(DERIVED_NAMES, UPSTREAM_DERIVED[family]):
            if getattr(derived, name) != upstream:
                differing.add((name, family, json.dumps(upstream), json.dumps(getattr(derived, name))))
    assert differing == {tuple(row[:4]) for row in table("Derived defaults that differ")}


def test_names_are_unique_over_groups() -> None:
    names = [name for _, name, _ in TrainConfig.settings()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("group", [group for group in UPSTREAM_DEFAULTS if group])
def test_every_group_is_in_the_help(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        TrainConfig.resolve(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert re.search(rf"^{group}:$", text, re.MULTILINE)
    for name in UPSTREAM_DEFAULTS[group]:
        assert f"--{name.replace('_', '-')}" in text
