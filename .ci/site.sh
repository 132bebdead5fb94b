#!/bin/sh
# Make .venv-docs: Sphinx and its theme, in an environment of its own that sees everything of .venv.
set -eu
cd "$(dirname "$0")/.."

printf 'docs: virtual environment .venv-docs over .venv, with %s packages\n' "$(grep -c == notebooks/site/requirements.lock)"
.venv/bin/python -m venv .venv-docs
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$(.venv-docs/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf 'import site; site.addsitedir("%s")\n' "$site" > "$own/of-venv.pth"
.venv-docs/bin/python -m pip install -qq --disable-pip-version-check \
    --constraint requirements.lock --requirement notebooks/site/requirements.lock
touch .venv-docs/.ready
