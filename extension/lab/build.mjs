// Everything that pages run, built from src: the prebuilt extension of JupyterLab and Notebook, into labextension/, and
// the dashboard as a widget for other places, into speedlab_notebook/static/.
import { execFileSync } from 'node:child_process';
import { copyFileSync, rmSync } from 'node:fs';
import { join, resolve } from 'node:path';
import { buildSync } from 'esbuild';

const here = import.meta.dirname;
const modules = join(here, 'node_modules');
const CORE = join(modules, '@jupyterlab', 'core-meta', 'core.package.json');
const WIDGET = join(here, '..', 'speedlab_notebook', 'static');

/** Runs a program of node_modules with this node: neither a shell nor a PATH is needed. */
function run(script, ...words) {
    execFileSync(process.execPath, [join(modules, script), ...words], { cwd: here, stdio: 'inherit' });
}

/** One ES module out of everything that `entry` imports. */
function bundle(entry, name) {
    const target = { bundle: true, format: 'esm', minify: true, target: 'es2022', logLevel: 'warning' };
    buildSync({ ...target, entryPoints: [entry], outfile: join(WIDGET, name), absWorkingDir: here });
}

for (const folder of ['lib', 'labextension', WIDGET]) rmSync(resolve(here, folder), { recursive: true, force: true });
run('typescript/bin/tsc');
run('@jupyter/builder/lib/build-labextension.js', '--core-package-file', CORE, '.');
bundle('src/dashboard/anywidget.ts', 'dashboard.js');
bundle('plotly.js-basic-dist-min', 'plotly.js');
copyFileSync(join(here, 'style', 'dashboard.css'), join(WIDGET, 'dashboard.css'));
