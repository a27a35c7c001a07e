#!/bin/sh
# Makes sure that the Debian packages QEffect is built and tried with are installed. Changes nothing when they are, so
# it needs no rights then. Plain sh, and only tools that every Debian has: it runs before anything else is installed.
set -eu

# What each is for: a compiler, CMake and Ninja; matrix products at run time; JSON; YAML; checksums; tests; the
# quickstart's text; the style check, the end-to-end tests and the Python package; and what the caller asks for.
packages="build-essential cmake ninja-build pkg-config
libopenblas0-pthread libjansson-dev libyaml-dev libxxhash-dev libcmocka-dev bible-kjv python3 python3-dev python3-venv
$*"

say() { echo "setup: $*"; }

if ! command -v dpkg-query >/dev/null 2>&1; then
    say "this is not a Debian system, so nothing is installed. Needed are the equivalents of: $(echo $packages)"
    exit 0
fi

missing=""
for package in $packages; do
    status=$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null || true)
    [ "$status" = "install ok installed" ] || missing="$missing $package"
done
missing=${missing# }

if [ -z "$missing" ]; then
    say "all Debian packages are there"
    exit 0
fi

say "missing Debian packages: $missing"
if [ "$(id -u)" = 0 ]; then
    as_root="env"
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    as_root="sudo -n env"
else
    say "installing them takes root's rights. Run this as root, then repeat your command:"
    echo "    apt-get update && apt-get install -y --no-install-recommends $missing"
    exit 1
fi

say "apt-get update"
$as_root DEBIAN_FRONTEND=noninteractive apt-get update -q
say "apt-get install -y --no-install-recommends $missing"
$as_root DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing
say "done"
