import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { URLExt } from '@jupyterlab/coreutils';
import { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import { ServerConnection } from '@jupyterlab/services';
import { IStateDB } from '@jupyterlab/statedb';
import { PanelLayout, Widget } from '@lumino/widgets';

import { ComparedDashboard } from '../compare/widget';
import { OtherFaces } from './otherFaces';
import { RunDashboard } from './widget';

export const MIME_TYPE = 'application/vnd.speedlab.run+json';
/** Before ipywidgets' (-10), which stands in the same output for places without us. */
const RANK = -20;
const GONE = 410;

/** Ids of the run, or of the runs side by side, that an output names. */
function runsIn(told: unknown): string[] {
  if (!told || typeof told !== 'object') return [];
  const runs: unknown = Reflect.get(told, 'runs');
  const named: unknown[] = Array.isArray(runs) ? runs : [Reflect.get(told, 'run')];
  return named.filter(each => typeof each === 'string');
}

/** A run, or several side by side, in a notebook's output. */
class RunRenderer extends Widget implements IRenderMime.IRenderer {
  constructor(
    private readonly registry: IRenderMimeRegistry,
    private readonly settings: ServerConnection.ISettings,
    private readonly state: IStateDB | null
  ) {
    super({ node: document.createElement('div') });
    this.layout = new PanelLayout();
  }

  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    const runs = runsIn(model.data[MIME_TYPE]);
    const run = runs.join(',');
    // The output was given its picture anew: a dashboard goes on.
    if (run === this.run) return this.others?.follow(model);
    this.run = run;
    // Of several, each that cannot be read says so in its place: one that is known is enough.
    const known = await Promise.all(runs.map(each => this.ask(each)));
    const status = known.includes(200) ? 200 : Math.max(0, ...known);
    if (this.isDisposed || this.run !== run) return;
    for (const widget of [...(this.layout as PanelLayout).widgets]) widget.dispose();
    this.others = null;
    const serverSettings = this.settings;
    if (status === 200 && runs.length > 1) this.add(new ComparedDashboard({ runs, serverSettings, state: this.state }));
    else if (status === 200) this.add(new RunDashboard({ run, serverSettings }));
    else {
      this.others = new OtherFaces(model, this.registry);
      this.add(this.others);
      await this.others.render(status === GONE);
    }
  }

  /** What the server says of the run; 0 where it says nothing. */
  private async ask(run: string): Promise<number> {
    const url = URLExt.join(this.settings.baseUrl, 'speedlab', 'api', 'runs', encodeURIComponent(run));
    try {
      return (await ServerConnection.makeRequest(url, {}, this.settings)).status;
    } catch {
      return 0;
    }
  }

  private add(widget: Widget): void {
    (this.layout as PanelLayout).addWidget(widget);
  }

  private run: string | null = null;
  /** What is shown where the server does not draw. */
  private others: OtherFaces | null = null;
}

/** JupyterLab and Notebook show `%speedlab dash` through their server. */
export const renderer: JupyterFrontEndPlugin<void> = {
  id: 'speedlab:run-renderer',
  description: "Shows a run in a notebook's output, live through the Jupyter server.",
  autoStart: true,
  requires: [IRenderMimeRegistry],
  optional: [IStateDB],
  activate: (app: JupyterFrontEnd, registry: IRenderMimeRegistry, state: IStateDB | null) => {
    const { serverSettings } = app.serviceManager;
    const createRenderer = () => new RunRenderer(registry, serverSettings, state);
    registry.addFactory({ safe: true, mimeTypes: [MIME_TYPE], createRenderer }, RANK);
  }
};
