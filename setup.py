"""Everything is declared in pyproject.toml, but for this: the wheel carries the vLLM connector's modules.

The connector is a distribution of its own, for vLLM's environment. ``speculators launch-vllm`` can also put its modules on a
server's path, and so must have them where only this library is installed; from a checkout it takes them where they are.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SOURCE = Path("integrations", "vllm_connector", "src", "speculators_vllm_connector")
TARGET = Path("speculators", "vllm_server", "modules", "speculators_vllm_connector")


class BuildWithConnector(build_py):
    """The library's modules, and the connector's as files that none of them imports."""

    def run(self):
        super().run()
        if not self.editable_mode:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(SOURCE, Path(self.build_lib, TARGET), ignore=ignored, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithConnector})
