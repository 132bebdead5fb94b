// What the palette, the launcher and the panel's buttons do: each command once, about the run at hand.

import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { LabIcon } from '@jupyterlab/ui-components';

import type { Controls } from '../controls';
import type { Live } from '../live';
import type { RunSummary } from '../messages';
import { refusal, runAtHand } from '../states';
import type { RunOn } from './status';
import type { PanelView } from './view';

export const COMMANDS = {
  panel: 'speedlab:open-panel',
  toggle: 'speedlab:pause-or-resume',
  stop: 'speedlab:stop',
  save: 'speedlab:save',
  dashboard: 'speedlab:open-dashboard',
  compare: 'speedlab:compare-runs',
  output: 'speedlab:show-output',
  quickstart: 'speedlab:open-quickstart'
} as const;

export const CATEGORY = 'SpeedLab';

export interface CommandsNeed {
  live: Live;
  controls: Controls;
  view: PanelView;
  on: RunOn;
  mark: LabIcon;
  openPanel: () => void;
  openDashboard: (id: string, name: string) => unknown;
  openOutput: (kind: 'clusters' | 'runs', id: string, name: string) => unknown;
  openQuickstart: (folder: string) => Promise<unknown>;
}

/** The chosen run where one is chosen, else the one that is on. */
function atHand({ live, view, on }: CommandsNeed): RunSummary | undefined {
  const chosen = live.runs?.find(run => run.id === view.chosen);
  const status = chosen && live.run(chosen.id)?.status;
  return (status && { ...status, cluster: chosen.cluster }) ?? chosen ?? on.run ?? runAtHand(live.runs ?? []);
}

const textIn = (args: Record<string, unknown>, name: string): string => {
  const value = args[name];
  return typeof value === 'string' ? value : '';
};

export function addCommands(app: JupyterFrontEnd, need: CommandsNeed): void {
  const { controls } = need;
  const word = (run: RunSummary | undefined) =>
    run?.state === 'running' || run?.state === 'starting' ? 'pause' : 'resume';
  const can = (of: (run: RunSummary) => string) => () => {
    const run = atHand(need);
    return run !== undefined && refusal(of(run), run) === '';
  };
  const act = (what: (run: RunSummary) => unknown) => async () => {
    const run = atHand(need);
    if (!run) return;
    // What comes of it is said beside the run.
    need.view.choose(run.id);
    need.openPanel();
    await what(run);
  };
  const named = (what: string) => () => {
    const run = atHand(need);
    return run ? `${what} of ${run.name}` : what;
  };
  app.commands.addCommand(COMMANDS.panel, {
    label: 'Show Clusters and Runs',
    icon: need.mark,
    execute: need.openPanel
  });
  app.commands.addCommand(COMMANDS.toggle, {
    label: () => {
      const run = atHand(need);
      return run ? `${word(run) === 'pause' ? 'Pause' : 'Resume'} ${run.name}` : 'Pause or Resume the Run';
    },
    isEnabled: can(word),
    execute: act(run => controls.give(run.id, { word: word(run) }))
  });
  app.commands.addCommand(COMMANDS.stop, {
    label: () => `Stop ${atHand(need)?.name ?? 'the Run'}…`,
    isEnabled: can(() => 'stop'),
    execute: act(run => controls.stop(run))
  });
  app.commands.addCommand(COMMANDS.save, {
    label: named('Save a Checkpoint'),
    isEnabled: can(() => 'save'),
    execute: act(run => controls.give(run.id, { word: 'save' }))
  });
  app.commands.addCommand(COMMANDS.dashboard, {
    label: args => textIn(args, 'name') || named('Open the Dashboard')(),
    isEnabled: args => textIn(args, 'id') !== '' || atHand(need) !== undefined,
    execute: args => {
      const id = textIn(args, 'id') || atHand(need)?.id;
      return id === undefined ? null : need.openDashboard(id, textIn(args, 'name') || (atHand(need)?.name ?? id));
    }
  });
  app.commands.addCommand(COMMANDS.compare, {
    label: 'Compare the Ticked Runs',
    isEnabled: () => need.view.comparison !== null,
    execute: () => {
      const compared = need.view.comparison;
      return compared && need.openDashboard(compared.id, compared.name);
    }
  });
  app.commands.addCommand(COMMANDS.output, {
    label: args => textIn(args, 'name') || named("Show the Ranks' Output")(),
    isEnabled: args => textIn(args, 'id') !== '' || atHand(need) !== undefined,
    execute: args => {
      const kind = args['kind'] === 'clusters' ? 'clusters' : 'runs';
      const id = textIn(args, 'id') || atHand(need)?.id;
      return id === undefined ? null : need.openOutput(kind, id, textIn(args, 'name') || (atHand(need)?.name ?? id));
    }
  });
  app.commands.addCommand(COMMANDS.quickstart, {
    label: 'Quickstart',
    caption: 'Train a small GPT and change its ZeRO stage while it trains',
    icon: need.mark,
    execute: args => need.openQuickstart(textIn(args, 'cwd'))
  });
}
