#!/usr/bin/env bash
# Make the virtual environment of upstream speculators in FOLDER, unless it is there. A stamp tells a finished one; a failure
# leaves none and says why in its last line.
set -uo pipefail
export PIP_DISABLE_PIP_VERSION_CHECK=1

folder="${1:?usage: make_upstream.sh FOLDER}"
torch="torch==2.13.0" # as in this library's own environment: the same kernels, so that figures compare
upstream="speculators==0.9.0"
stamp="$folder/.made"
wanted="$torch $upstream 1"

fail() {
    # pip's own reason is its first line that begins with ERROR.
    reason="$(grep -m 1 '^ERROR' "$log" 2>/dev/null | cut -c 1-300)"
    echo "$1${reason:+: $reason}" >&2
    exit 1
}

mkdir -p "$(dirname "$folder")" || { echo "cannot create $(dirname "$folder")" >&2; exit 1; }
log="$folder.log"
exec 9>"$folder.lock"
if command -v flock >/dev/null; then flock 9; fi
[ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && exit 0

rm -rf "$folder"
"${PYTHON:-python3}" -m venv "$folder" >"$log" 2>&1 || fail "python3 -m venv failed"
pip=("$folder/bin/python" -m pip install --quiet --no-compile)
# torch first and held, so that no other package chooses a build of several gigabytes.
"${pip[@]}" "$torch" >>"$log" 2>&1 || fail "cannot install $torch"
"${pip[@]}" "$upstream" "torch<2.14" >>"$log" 2>&1 || fail "cannot install $upstream"
# Upstream asks for torchvision and torchaudio but imports neither; transformers imports what is there, and fails on one that was
# built for another torch.
for extra in torchvision torchaudio; do
    "$folder/bin/python" -c "import $extra" >>"$log" 2>&1 ||
        "$folder/bin/python" -m pip uninstall --quiet --yes "$extra" >>"$log" 2>&1
done
"$folder/bin/python" -c "import speculators" >>"$log" 2>&1 || fail "$upstream was installed but does not import"
echo "$wanted" >"$stamp"
