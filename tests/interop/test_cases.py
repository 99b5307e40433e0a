"""Every field of every family's config has a parity case, or a reason not to; so a new option without one fails here."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from speculators.config import SpeculatorModelConfig
from tests.interop.cases import EXEMPT, Case, accepted, cases_of, families, fields_without_case, varied_fields

FAMILIES = families()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_takes_its_values(family: str) -> None:
    lacking = fields_without_case(FAMILIES[family])
    assert not lacking, (
        f"{family}: no parity case sets {lacking} to two values; give them some in VALUES of tests/interop/cases.py, or a "
        "reason in EXEMPT"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_is_a_config_that_the_family_accepts(family: str) -> None:
    cases = cases_of(FAMILIES[family])
    assert all(accepted(FAMILIES[family], case.options) for case in cases)
    assert len({(case.field, case.name) for case in cases}) == len(cases)
    assert {"base", "file"} < {case.field for case in cases}


def test_no_exemption_outlives_its_field() -> None:
    fields = {field for config in FAMILIES.values() for field in config.model_fields}
    assert set(EXEMPT) <= fields


def test_new_options_are_noticed() -> None:
    """A switch and a choice get their cases by themselves; a number that nobody gave values does not go unnoticed."""

    class NewConfig(FAMILIES["dspark"]):  # type: ignore[misc, name-defined]
        switch: bool = False
        choice: Literal["a", "b", "c"] = "a"
        number: int = 3

    assert set(varied_fields(NewConfig)) > {"switch", "choice", "number"}
    assert fields_without_case(NewConfig) == ["number"]
    cases = cases_of(NewConfig)
    assert values_in(cases, "switch") == {True, False}
    assert values_in(cases, "choice") == {"a", "b", "c"}


def values_in(cases: list[Case], field: str) -> set[Any]:
    return {case.options.get(field) for case in cases}


def test_a_family_without_values_is_noticed() -> None:
    class UnknownConfig(SpeculatorModelConfig):
        speculators_model_type: Literal["unknown"] = "unknown"  # type: ignore[assignment]
        width: int = 3

    assert fields_without_case(UnknownConfig) == ["width"]
