// What states of runs and clusters are called, and what can be done in each. Pure.

import { agoText, countText, leftText, wholeText } from './format';
import type { Icon } from './icons';
import type { ClusterSummary, RunEvent, RunSummary } from './messages';

export interface Look {
  glyph: Icon;
  /** For who does not see the glyph. */
  word: string;
  /** Of its colour in the style sheet. */
  tone: 'live' | 'rest' | 'done' | 'bad' | 'quiet';
}

export const RUN_LOOKS: Record<RunSummary['state'], Look> = {
  starting: { glyph: 'ring', word: 'starting', tone: 'live' },
  running: { glyph: 'dot', word: 'running', tone: 'live' },
  paused: { glyph: 'pause', word: 'paused', tone: 'rest' },
  finished: { glyph: 'check', word: 'finished', tone: 'done' },
  stopped: { glyph: 'stop', word: 'stopped', tone: 'quiet' },
  failed: { glyph: 'cross', word: 'failed', tone: 'bad' },
  damaged: { glyph: 'warning', word: 'cannot be read', tone: 'bad' }
};

export const CLUSTER_LOOKS: Record<ClusterSummary['state'], Look> = {
  running: { glyph: 'dot', word: 'running', tone: 'live' },
  starting: { glyph: 'ring', word: 'starting', tone: 'rest' },
  ended: { glyph: 'cross', word: 'ended', tone: 'quiet' },
  failed: { glyph: 'cross', word: 'did not start', tone: 'bad' },
  elsewhere: { glyph: 'ring', word: 'on another host', tone: 'quiet' },
  damaged: { glyph: 'warning', word: 'cannot be read', tone: 'bad' }
};

const UNKNOWN: Look = { glyph: 'ring', word: 'in an unknown state', tone: 'quiet' };

export const runLook = (run: RunSummary): Look => RUN_LOOKS[run.state] ?? UNKNOWN;
export const clusterLook = (cluster: ClusterSummary): Look => CLUSTER_LOOKS[cluster.state] ?? UNKNOWN;

/** Whether engines compute it, or begin to, or wait in a pause. */
export function isLive(run: RunSummary): boolean {
  return run.state === 'running' || (run.cluster !== '' && (run.state === 'starting' || run.state === 'paused'));
}

/** The run that a status bar speaks of: one that computes before one that waits, held by a cluster before another. */
export function runAtHand(runs: readonly RunSummary[]): RunSummary | undefined {
  const computes = runs.filter(run => run.state === 'running');
  return computes.find(run => run.cluster !== '') ?? runs.find(run => isLive(run) && run.cluster !== '') ?? computes[0];
}

/** '131/2,000'. */
export const stepText = (run: RunSummary): string =>
  run.steps > 0 ? `${wholeText(run.step)}/${wholeText(run.steps)}` : wholeText(run.step);

/** 0 to 1. */
export const progress = (run: RunSummary): number => (run.steps > 0 ? Math.min(1, run.step / run.steps) : 0);

export const speedText = (run: RunSummary): string =>
  run.tokens_per_second === null ? '' : `${countText(run.tokens_per_second)} tokens/s`;

/** Four digits are enough for a loss. */
export const lossText = (loss: number | null): string =>
  loss === null ? '' : Math.abs(loss) < 1e-3 && loss !== 0 ? loss.toExponential(2) : loss.toPrecision(4);

const joined = (parts: readonly string[]): string => parts.filter(part => part !== '').join(' · ');

/** What stands beside a run's name in the list. */
export function runFacts(run: RunSummary, now: number): string {
  if (run.state === 'damaged') return '';
  const loss = lossText(run.loss);
  if (run.state === 'running') {
    return joined([
      `step ${stepText(run)}`,
      speedText(run),
      run.seconds_left === null ? '' : leftText(run.seconds_left)
    ]);
  }
  if (isLive(run)) return joined([RUN_LOOKS[run.state].word, `step ${stepText(run)}`, loss && `loss ${loss}`]);
  return joined([loss || `step ${stepText(run)}`, agoText(run.updated, now)]);
}

/** '● quickstart · 131/2,000 · 41 k tokens/s · 3 min left', without the glyph. */
export function statusText(run: RunSummary): string {
  const left = run.seconds_left === null ? '' : leftText(run.seconds_left);
  const state = run.state === 'running' ? '' : runLook(run).word;
  const speed = run.state === 'running' ? speedText(run) : '';
  return joined([run.name, state, stepText(run), speed, left]);
}

/** '4 engines · cpu · 2 hosts'. */
export function clusterFacts(cluster: ClusterSummary): string {
  const engines = `${wholeText(cluster.engines)} engine${cluster.engines === 1 ? '' : 's'}`;
  const hosts = cluster.hosts.length > 1 ? `${cluster.hosts.length} hosts` : '';
  if (cluster.state === 'running') return joined([engines, hosts]);
  // What a start waits for says that it is one.
  return cluster.state === 'starting' && cluster.text
    ? cluster.text
    : joined([clusterLook(cluster).word, cluster.text]);
}

/** What the number of a past run's facts is, for which a list has no room. */
export const factsUnit = (run: RunSummary): string =>
  isLive(run) || run.state === 'running' || run.state === 'damaged' || run.loss === null ? '' : 'loss ';

/** Whether a run fits what a person searches for: every word in its name, state or problem. */
export function fits(run: RunSummary, search: string): boolean {
  const text = `${run.name} ${runLook(run).word} ${run.problem} ${run.text}`.toLowerCase();
  return search
    .toLowerCase()
    .split(/\s+/)
    .every(word => text.includes(word));
}

/** Its engines may be gone, or a script trains it. */
export const NOT_HELD = 'no cluster that runs here holds it';

/** Why a control cannot be used now; '' where it can. */
export function refusal(word: string, run: RunSummary): string {
  if (run.problem || run.state === 'damaged') return 'the run cannot be read';
  if (run.state === 'starting' && word !== 'stop') return 'the run is starting; wait for its first step';
  const held = run.cluster !== '';
  if (word === 'resume') {
    if (run.state === 'finished') return 'the run is finished; run.resume(steps=…) in a notebook makes it longer';
    return held ? '' : `${NOT_HELD}; in a notebook, speedlab.attach(name).resume() goes on in other engines`;
  }
  if (!held) return NOT_HELD;
  if (word === 'step' && run.state === 'running') return 'the run computes; pause it first';
  const over = run.state === 'finished' || run.state === 'stopped' || run.state === 'failed';
  return over && word !== 'save' ? `the run is ${runLook(run).word}` : '';
}

/** The ZeRO stage that a run has now: what it began with, and what events changed. Null where nobody knows. */
export function stageOf(config: Record<string, unknown>, events: readonly RunEvent[]): number | null {
  for (const event of [...events].reverse()) {
    if (event.kind !== 'reshaped') continue;
    const stage = numberAt(event.details['after'], 'zero') ?? numberAt(event.details, 'zero');
    if (stage !== null) return stage;
  }
  return numberAt(config['zero'], 'stage');
}

function numberAt(of: unknown, name: string): number | null {
  if (typeof of !== 'object' || of === null) return null;
  const value: unknown = Reflect.get(of, name);
  return typeof value === 'number' ? value : null;
}

/** A run's newest checkpoint, and how many steps there were since; all of them where it has none. */
export function lostOf(run: RunSummary, events: readonly RunEvent[]): { saved: RunEvent | undefined; steps: number } {
  const saved = [...events].reverse().find(event => event.kind === 'checkpoint');
  return { saved, steps: run.step - (saved?.step ?? 0) };
}

/** What stopping a run would lose, in words. */
export function stopText(run: RunSummary, events: readonly RunEvent[]): string {
  const { saved, steps: behind } = lostOf(run, events);
  const ends = `It ends after the step that is being computed, now ${wholeText(run.step)} of ${wholeText(run.steps)}.`;
  const stays = 'Its records stay, and its engines keep its state for Resume while they run.';
  if (!saved) {
    return `${ends} ${stays} It has no checkpoint: when its engines end, all ${stepsText(run.step)} lost.`;
  }
  if (behind <= 0) return `${ends} ${stays} Its newest checkpoint, ${saved.text}, has every step: nothing is lost.`;
  return `${ends} ${stays} Its newest checkpoint is ${saved.text}: when its engines end, ${stepsText(behind)} lost.`;
}

export const stepsText = (count: number): string => `${wholeText(count)} ${count === 1 ? 'step is' : 'steps are'}`;

/** The answer to a control word among a run's events. */
export function answerTo(number: number, events: readonly RunEvent[]): { text: string; refused: boolean } | null {
  const event = events.find(each => each.command === number);
  if (!event) return null;
  const refused = Boolean(event.details['error']);
  return { text: refused ? event.text : joined([event.kind, event.text]).replace(' · ', ' '), refused };
}
