#!/bin/sh
# Make .venv with everything the project and its tests need. `make setup` calls this; a second time costs nothing.
#   PYTHON=/path/to/python3.11   which interpreter to use (default: python3.11, else python3)
#   TORCH_VERSION=2.14.1         another version of torch (default: the one that requirements.lock was written with)
#   TORCH_PIP_ARGS="..."         extra arguments of torch's own pip call, such as the index of its CPU build
set -eu
cd "$(dirname "$0")/.."
torch="torch==${TORCH_VERSION:-2.13.0}"
begin=$(date +%s)

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

python=""
for candidate in ${PYTHON:-python3.11 python3}; do
    if recent "$candidate"; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
    found=$(${PYTHON:-python3} --version 2>&1 || true)
    fail "needs Python 3.11 or newer; ${PYTHON:-python3} says: ${found:-nothing}." \
         "Install python3.11, or name one: make setup PYTHON=/path/to/python3.11"
fi

say "1/5 virtual environment .venv with $("$python" --version)"
"$python" -m venv .venv || fail "could not make .venv; on Debian and Ubuntu: apt-get install python3-venv"
pip="env PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/python -m pip -qq"

say "2/5 $torch (a minute or more on a slow line)"
# torch comes alone and first: which build it is, CPU or CUDA, is decided here and nowhere else.
# shellcheck disable=SC2086  # the arguments are words
$pip install ${TORCH_PIP_ARGS:-} --constraint requirements.lock "$torch"

say "3/5 $(grep -c == requirements.lock) pinned packages, and what compiles CUDA kernels (0.5 GB)"
$pip install --requirement requirements.lock
$pip install --constraint requirements.lock "numba-cuda[cu13]"

say "4/5 what pages run: JupyterLab's extension and the view for widgets"
.ci/pages.sh

say "5/5 speedlab itself, editable"
$pip install --no-deps --no-build-isolation --editable .

touch .venv/.ready
say "done in $(($(date +%s) - begin)) s"
