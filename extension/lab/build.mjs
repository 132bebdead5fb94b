// Everything that pages run, built from src: the prebuilt extension of JupyterLab and Notebook, into labextension/.
import { execFileSync } from 'node:child_process';
import { rmSync } from 'node:fs';
import { join } from 'node:path';

const here = import.meta.dirname;
const modules = join(here, 'node_modules');
const CORE = join(modules, '@jupyterlab', 'core-meta', 'core.package.json');

/** Runs a program of node_modules with this node: neither a shell nor a PATH is needed. */
function run(script, ...words) {
    execFileSync(process.execPath, [join(modules, script), ...words], { cwd: here, stdio: 'inherit' });
}

for (const folder of ['lib', 'labextension']) rmSync(join(here, folder), { recursive: true, force: true });
run('typescript/bin/tsc');
run('@jupyter/builder/lib/build-labextension.js', '--core-package-file', CORE, '.');
