import { JupyterFrontEndPlugin } from '@jupyterlab/application';

import { renderer } from './dashboard/renderer';

const plugins: JupyterFrontEndPlugin<unknown>[] = [renderer];

export default plugins;
