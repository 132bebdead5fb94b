// The extension without its dashboard: side panel, status bar, commands, launcher card, ranks' output.
// Beside JupyterLab's shell everything is optional, so that Notebook 7 and other places take what they have.

import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ILabShell, ILayoutRestorer } from '@jupyterlab/application';
import {
  Dialog,
  ICommandPalette,
  MainAreaWidget,
  showDialog,
  showErrorMessage,
  WidgetTracker
} from '@jupyterlab/apputils';
import { URLExt } from '@jupyterlab/coreutils';
import { ILauncher } from '@jupyterlab/launcher';
import { ServerConnection } from '@jupyterlab/services';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStateDB } from '@jupyterlab/statedb';
import { IStatusBar } from '@jupyterlab/statusbar';
import { LabIcon } from '@jupyterlab/ui-components';
import type { Widget } from '@lumino/widgets';

import { Api, ProblemError } from '../api';
import { ClusterControls } from '../clusterControls';
import type { Ask } from '../clusterControls';
import { Controls } from '../controls';
import type { AskStop } from '../controls';
import { ComparedDashboard } from '../compare/widget';
import { RunDashboard } from '../dashboard/widget';
import { MARK } from '../icons';
import { Live } from '../live';
import { OutputView } from '../log/view';
import { OutputWidget } from '../log/widget';
import { quickstart } from '../quickstart';
import type { Settings } from '../settings';
import { DEFAULTS, settingsFrom } from '../settings';
import { addCommands, CATEGORY, COMMANDS } from './commands';
import { RunOn, StatusItem } from './status';
import type { PanelState } from './view';
import { PanelView } from './view';
import { PanelWidget } from './widget';

interface OpenArgs {
  kind: 'clusters' | 'runs';
  id: string;
  name: string;
}

const ID = 'speedlab:plugin';
const STATE = 'speedlab:panel';

export const panel: JupyterFrontEndPlugin<void> = {
  id: ID,
  description: 'Clusters and runs in a side panel, the run that is on in the status bar.',
  autoStart: true,
  optional: [ILabShell, ILayoutRestorer, IStateDB, ISettingRegistry, IStatusBar, ICommandPalette, ILauncher],
  activate: (
    app: JupyterFrontEnd,
    labShell: ILabShell | null,
    restorer: ILayoutRestorer | null,
    stateDB: IStateDB | null,
    registry: ISettingRegistry | null,
    statusBar: IStatusBar | null,
    palette: ICommandPalette | null,
    launcher: ILauncher | null
  ) => {
    const mark = new LabIcon({ name: 'speedlab:mark', svgstr: MARK });
    const server = app.serviceManager.serverSettings;
    const api = new Api((way, init) =>
      ServerConnection.makeRequest(URLExt.join(server.baseUrl, 'speedlab/api', way), init, server)
    );
    const why = () => api.runs().then(() => '', reasonOf);
    const live = new Live({ url: liveUrl(server), make: url => new server.WebSocket(url), why });
    const controls = new Controls(api, live, askStop);
    let settings: Settings = DEFAULTS;

    const outputs = new WidgetTracker<MainAreaWidget>({ namespace: 'speedlab-output' });
    const dashboards = new WidgetTracker<MainAreaWidget>({ namespace: 'speedlab-dashboard' });
    const shown = new Map<string, { widget: MainAreaWidget; args: OpenArgs }>();
    /** One widget for each thing that is looked at; opened again, it comes to the front. */
    const open = (tracker: WidgetTracker<MainAreaWidget>, args: OpenArgs, label: string, make: () => Widget) => {
      const key = `${tracker.namespace}-${args.kind}-${args.id}`;
      let widget = shown.get(key)?.widget;
      if (!widget || widget.isDisposed) {
        widget = new MainAreaWidget({ content: make() });
        Object.assign(widget.title, { label, caption: label, icon: mark, closable: true });
        widget.id = key;
        shown.set(key, { widget, args });
        // Notebook 7 has one document in its main area, and this place for what stands beside it.
        app.shell.add(widget, labShell ? 'main' : 'down');
        void tracker.add(widget);
      }
      app.shell.activateById(widget.id);
      return widget;
    };
    const openOutput = (kind: OpenArgs['kind'], id: string, name: string) =>
      open(outputs, { kind, id, name }, `Output of ${name}`, () => {
        const options = { most: settings.outputLines, folds: settings.foldOutput };
        return new OutputWidget(new OutputView(live, { kind, id }, options));
      });
    const openDashboard = (id: string, name: string) =>
      open(dashboards, { kind: 'runs', id, name }, name, () => {
        const runs = id.split(',');
        if (runs.length > 1) return new ComparedDashboard({ runs, serverSettings: server, state: stateDB });
        return new RunDashboard({ run: id, serverSettings: server });
      });

    let saved = Promise.resolve<unknown>(null);
    const view = new PanelView(api, live, controls, new ClusterControls(api, live, ask), {
      output: (of, name) => openOutput(of.kind, of.id, name),
      dashboard: run => openDashboard(run.id, run.name),
      compare: ({ id, name }) => openDashboard(id, name),
      save: state => {
        saved = saved.then(() => stateDB?.save(STATE, { ...state })).catch(() => undefined);
      }
    });
    const widget = new PanelWidget(view);
    widget.title.icon = mark;
    const place = () => app.shell.add(widget, settings.side, { rank: 450, type: 'SpeedLab' });
    place();
    restorer?.add(widget, widget.id);
    void stateDB?.fetch(STATE).then(state => view.restore(stateFrom(state)));

    const on = new RunOn(api, live);
    const openPanel = () => app.shell.activateById(widget.id);
    addCommands(app, {
      ...{ live, controls, view, on, mark, openPanel, openDashboard, openOutput },
      openQuickstart: async folder => {
        try {
          const path = await quickstart(api, app.serviceManager.contents, folder);
          return (await app.commands.execute('docmanager:open', { path })) as unknown;
        } catch (error) {
          return showErrorMessage('The quickstart cannot be opened', reasonOf(error));
        }
      }
    });
    for (const command of Object.values(COMMANDS)) palette?.addItem({ command, category: CATEGORY });
    launcher?.add({ command: COMMANDS.quickstart, category: CATEGORY, rank: 0 });
    for (const [tracker, command] of [
      [outputs, COMMANDS.output],
      [dashboards, COMMANDS.dashboard]
    ] as const) {
      void restorer?.restore(tracker, { command, args: at => ({ ...shown.get(at.id)?.args }), name: at => at.id });
    }

    const item = statusBar ? new StatusItem(on, openPanel) : null;
    const showStatus = () => item?.setHidden(!settings.statusBar);
    if (item) statusBar?.registerStatusItem('speedlab:run', { item, align: 'left', rank: 900 });

    const take = (given: Record<string, unknown>) => {
      const before = settings.side;
      const { settings: fitting, problem } = settingsFrom(given);
      settings = fitting;
      view.settingsProblem = problem;
      showStatus();
      if (settings.side !== before) place();
    };
    registry?.load(ID).then(
      loaded => {
        take(loaded.composite);
        loaded.changed.connect(() => take(loaded.composite));
      },
      (error: unknown) => {
        view.settingsProblem = `Settings of SpeedLab do not fit, and the defaults are used: ${reasonOf(error)}`;
      }
    );
  }
};

const askStop: AskStop = async (run, text) => {
  const buttons = [
    Dialog.cancelButton({ label: 'Keep running' }),
    Dialog.okButton({ label: 'Save, then stop' }),
    Dialog.warnButton({ label: 'Stop' })
  ];
  const { button } = await showDialog({ title: `Stop ${run.name}?`, body: text, buttons, defaultButton: 0 });
  if (!button.accept) return 'no';
  return button.label === 'Stop' ? 'stop' : 'save and stop';
};

const ask: Ask = async ({ title, body, keep, act }) => {
  const buttons = [Dialog.cancelButton({ label: keep }), Dialog.warnButton({ label: act })];
  return (await showDialog({ title, body, buttons, defaultButton: 0 })).button.accept;
};

function liveUrl(server: ServerConnection.ISettings): string {
  const url = URLExt.join(server.wsUrl, 'speedlab/api/live');
  return server.appendToken && server.token ? `${url}?token=${encodeURIComponent(server.token)}` : url;
}

function stateFrom(saved: unknown): Partial<PanelState> {
  if (typeof saved !== 'object' || saved === null) return {};
  const text = (name: string): string => {
    const value: unknown = Reflect.get(saved, name);
    return typeof value === 'string' ? value : '';
  };
  const texts = (name: string): string[] => {
    const value: unknown = Reflect.get(saved, name);
    return Array.isArray(value) ? value.filter(each => typeof each === 'string') : [];
  };
  return {
    chosen: text('chosen'),
    search: text('search'),
    open: texts('open'),
    folded: texts('folded'),
    ticked: texts('ticked')
  };
}

function reasonOf(error: unknown): string {
  // The registry of settings throws a list of what does not fit.
  if (Array.isArray(error)) return error.map(each => reasonOf(each)).join('; ');
  if (error instanceof ProblemError || error instanceof Error) return error.message;
  if (typeof error === 'object' && error !== null)
    return `${String(Reflect.get(error, 'instancePath') ?? '')} ${String(Reflect.get(error, 'message') ?? '')}`.trim();
  return String(error);
}
