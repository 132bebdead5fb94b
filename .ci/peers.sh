#!/bin/sh
# Make .venv-peers: what `make bench` compares with, in an environment of its own that sees everything of .venv.
# DeepSpeed compiles its processor kernels when they are first used, which takes a C++ compiler; without one the
# benchmarks leave it out and say so.
set -eu
cd "$(dirname "$0")/.."
say() { printf 'peers: %s\n' "$*"; }

say "1/2 virtual environment .venv-peers over .venv"
.venv/bin/python -m venv .venv-peers
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$(.venv-peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf 'import site; site.addsitedir("%s")\n' "$site" > "$own/of-venv.pth"

say "2/2 DeepSpeed"
# Without build isolation: its set-up looks at torch. DS_BUILD_OPS=0: compile nothing that is not used.
pip=".venv-peers/bin/python -m pip install -qq --disable-pip-version-check"
if $pip --upgrade setuptools wheel ninja && DS_BUILD_OPS=0 $pip --no-build-isolation "deepspeed==0.19.*"; then
    say "done"
else
    say "DeepSpeed could not be installed here; the benchmarks leave it out"
fi
touch .venv-peers/.ready
