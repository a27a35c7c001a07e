#!/bin/sh
# Installs the Python package into a virtual environment below build/ and runs tests/python there.
#
#   tools/check_python.sh         what needs no torch, and the types
#   tools/check_python.sh torch   what needs torch, on a CPU; TORCH_INDEX_URL names an index with a smaller torch
#
# Where packages cannot be had (no network), it says why and skips: exit status 0.
set -eu
cd "$(dirname "$0")/.."

kind=${1:-plain}
torch_version=2.11.0
tools="cffi pycparser numpy scikit-build-core pytest mypy"
venv=build/venv
[ "$kind" = torch ] && venv=build/venv-torch

say() { echo "check-python: $*"; }
skip() {
    say "skipped: $*"
    exit 0
}

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || skip "$python is older than 3.10"
if [ ! -x "$venv/bin/python" ]; then
    mkdir -p build
    "$python" -m venv "$venv" >build/venv.log 2>&1 || skip "$python makes no virtual environment (python3-venv)"
fi

# Packages: only what is missing is asked for, so that a second run needs no network.
all_there="import importlib.util as u, sys; sys.exit(any(not u.find_spec(m) for m in sys.argv[1:]))"
has() { "$venv/bin/python" -c "$all_there" "$@"; }
has cffi pycparser numpy scikit_build_core pytest mypy ||
    "$venv/bin/pip" install -q $tools >"$venv/install.log" 2>&1 ||
    skip "pip cannot install $tools: $(tail -n 1 "$venv/install.log")"
if [ "$kind" = torch ] && ! has torch; then
    say "installing torch $torch_version"
    "$venv/bin/pip" install -q ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "torch==$torch_version" \
        >"$venv/torch.log" 2>&1 ||
        skip "pip cannot install torch $torch_version: $(tail -n 1 "$venv/torch.log")"
fi

if [ "$kind" = torch ] && ! has torchtitan datasets; then
    # Its tests are skipped without it; it wants packages that a machine may not have for its Python.
    "$venv/bin/pip" install -q "torchtitan==0.2.2" "datasets<4.8" >"$venv/titan.log" 2>&1 ||
        say "without TorchTitan: $(tail -n 1 "$venv/titan.log")"
fi

say "pip install . into $venv"
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/pip" install -q --no-build-isolation --no-deps . >"$venv/build.log" 2>&1 ||
    { cat "$venv/build.log"; exit 1; }
if [ "$kind" = torch ]; then
    # Small tensors: threads of OpenMP would only wait for each other.
    OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/python -m "torch and not gpu and not te"
    "$venv/bin/mypy" --cache-dir "$venv/mypy" -p qeffect
else
    "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/python -m "not torch and not gpu and not te"
    "$venv/bin/mypy" --cache-dir "$venv/mypy" -p qeffect
fi
