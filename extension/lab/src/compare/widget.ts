import { URLExt } from '@jupyterlab/coreutils';
import type { ServerConnection } from '@jupyterlab/services';
import type { IStateDB } from '@jupyterlab/statedb';
import { Widget } from '@lumino/widgets';

import { ServerSource, withToken } from '../dashboard/serverSource';
import { loadPlotly } from '../dashboard/widget';
import { hiddenIn } from './hidden';
import { CompareView } from './view';

/** Several runs as the Jupyter server draws them. */
class ComparedSource extends ServerSource {
  protected override url(): string {
    const ids = this.run.split(',').map(encodeURIComponent).join(',');
    const { wsUrl } = this.settings;
    return withToken(URLExt.join(wsUrl, 'speedlab', 'api', 'comparisons', ids, 'drawing'), this.settings);
  }
}

/** Runs side by side: in the main area, or in a notebook's output. */
export class ComparedDashboard extends Widget {
  constructor(options: {
    runs: readonly string[];
    serverSettings: ServerConnection.ISettings;
    state: IStateDB | null;
  }) {
    super();
    this.addClass('speedlab-dash-widget');
    const source = new ComparedSource(options.runs.join(','), options.serverSettings);
    this.view = new CompareView(source, loadPlotly, hiddenIn(options.state, options.runs));
    this.node.append(this.view.node);
  }

  override dispose(): void {
    if (this.isDisposed) return;
    this.view.dispose();
    super.dispose();
  }

  private readonly view: CompareView;
}
