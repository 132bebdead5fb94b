import type { ServerConnection } from '@jupyterlab/services';
import { Widget } from '@lumino/widgets';

import type { Plotly } from './plotly';
import { ServerSource } from './serverSource';
import { DashboardView } from './view';

/** plotly comes with the first dashboard of a page, and once. */
export async function loadPlotly(): Promise<Plotly> {
  return (await import('plotly.js-basic-dist-min')).default;
}

/** The dashboard of a run as the Jupyter server draws it: in the main area, or in a notebook's output. */
export class RunDashboard extends Widget {
  constructor(options: { run: string; serverSettings: ServerConnection.ISettings }) {
    super();
    this.addClass('speedlab-dash-widget');
    const { run, serverSettings } = options;
    this.view = new DashboardView(new ServerSource(run, serverSettings), loadPlotly);
    this.node.append(this.view.node);
  }

  override dispose(): void {
    if (this.isDisposed) return;
    this.view.dispose();
    super.dispose();
  }

  private readonly view: DashboardView;
}
