#!/usr/bin/env bash
# Puts Mooncake's wheel, and the system library it links to, in a folder, once: make_mooncake.sh FOLDER PYTHON. About 150 MB.
set -euo pipefail
folder="$1"
python="$2"
version=0.3.13.post1
stamp="$folder/made"
recipe="$version $("$python" -c 'import sys; print(sys.version_info[:2])') $(sha256sum < "$0")"
[ "$(cat "$stamp" 2>/dev/null || true)" = "$recipe" ] && exit 0

mkdir -p "$folder"
exec 9>"$folder/lock"
flock 9
[ "$(cat "$stamp" 2>/dev/null || true)" = "$recipe" ] && exit 0
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
rm -rf "$stamp" "$folder/site" "$folder/lib"
mkdir "$folder/lib"
"$python" -m pip --disable-pip-version-check --quiet install --no-deps --target "$folder/site" \
    "mooncake-transfer-engine-non-cuda==$version" >&2
# Also without root: the packages are unpacked, not installed.
if ! ldconfig -p | grep -q libibverbs.so.1; then
    cd "$work"
    apt-get -qq download libibverbs1 libnl-3-200 libnl-route-3-200 >&2
    for package in *.deb; do dpkg -x "$package" root; done
    find root -name '*.so*' -exec cp -P {} "$folder/lib/" \;
fi
echo "$recipe" > "$stamp"
