import { JupyterFrontEndPlugin } from '@jupyterlab/application';

import { renderer } from './dashboard/renderer';
import { panel } from './panel/plugin';

const plugins: JupyterFrontEndPlugin<unknown>[] = [renderer, panel];

export default plugins;
