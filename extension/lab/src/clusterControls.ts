// What people ask of clusters: to start one, to give up a start, to stop one, to remove what is left of one. What would be
// lost is said before, and what came of it beside the cluster.

import type { Api } from './api';
import { ProblemError } from './api';
import type { Note } from './controls';
import type { Live } from './live';
import type { ClusterSummary, RunEvent, RunSummary } from './messages';
import { lostOf, stepsText } from './states';

/** A question to the person; `act` is the word of the button that does it. */
export interface Question {
  title: string;
  body: string;
  keep: string;
  act: string;
}
export type Ask = (question: Question) => Promise<boolean>;

export class ClusterControls {
  /** Called when a note has changed. */
  changed: () => void = () => undefined;

  constructor(
    private readonly api: Pick<Api, 'tellCluster' | 'events'>,
    private readonly live: Live,
    private readonly ask: Ask
  ) {}

  note(id: string): Note | undefined {
    return this.notes.get(id);
  }

  /** Notes of clusters that are no more are no more either. */
  keep(ids: ReadonlySet<string>): void {
    for (const id of [...this.notes.keys()]) if (!ids.has(id)) this.notes.delete(id);
  }

  cancel(cluster: ClusterSummary): Promise<void> {
    const waits = cluster.text ? `Now: ${cluster.text}. ` : '';
    return this.tell(cluster, 'cancel', 'the start is being given up', {
      title: `Give up starting ${cluster.name}?`,
      body: `${waits}What it has taken is given back, its place in a queue, too; a notebook that waits for it is told.`,
      keep: 'Keep waiting',
      act: 'Give up'
    });
  }

  async stop(cluster: ClusterSummary): Promise<void> {
    let body: string;
    try {
      body = stopClusterText(cluster, await this.held(cluster));
    } catch (error) {
      this.say(cluster.id, textOf(error), true);
      return;
    }
    const question = { title: `Stop cluster ${cluster.name}?`, body, keep: 'Keep running', act: 'Stop' };
    await this.tell(cluster, 'stop', 'its engines are being ended', question);
  }

  /** A start that failed has left nothing: nobody is asked. */
  remove(cluster: ClusterSummary): Promise<void> {
    const question = {
      title: `Remove ${cluster.name}?`,
      body: 'Its folder goes, with what its ranks have printed; processes of it that are left are ended. Runs stay.',
      keep: 'Keep it',
      act: 'Remove'
    };
    return this.tell(cluster, 'remove', 'being removed', cluster.state === 'failed' ? null : question);
  }

  private async tell(cluster: ClusterSummary, word: string, doing: string, question: Question | null): Promise<void> {
    if (question && !(await this.ask(question))) return;
    this.say(cluster.id, `${word}: ${doing}`);
    try {
      await this.api.tellCluster(cluster.id, word);
      this.say(cluster.id, '');
    } catch (error) {
      this.say(cluster.id, textOf(error), true);
    }
  }

  private held(cluster: ClusterSummary): Promise<Held[]> {
    const runs = (this.live.runs ?? []).filter(run => run.cluster === cluster.id && !run.problem);
    return Promise.all(runs.map(async run => ({ run, events: (await this.api.events(run.id)).events })));
  }

  private say(id: string, text: string, bad = false): void {
    this.notes.set(id, { text, bad });
    this.changed();
  }

  private readonly notes = new Map<string, Note>();
}

interface Held {
  run: RunSummary;
  events: readonly RunEvent[];
}

/** What stopping a cluster would lose, in words. */
export function stopClusterText(cluster: ClusterSummary, held: readonly Held[]): string {
  const count = cluster.engines === 1 ? 'Its engine ends' : `Its ${cluster.engines} engines end`;
  const first = `${count}, with what cells have put there; records and checkpoints of runs stay.`;
  const parts = held.map(({ run, events }) => {
    const { saved, steps } = lostOf(run, events);
    if (!saved)
      return `${run.name} has no checkpoint: ${steps > 0 ? `its ${stepsText(steps)} lost` : 'nothing is lost'}.`;
    if (steps <= 0) return `${run.name} loses nothing: its newest checkpoint, ${saved.text}, has every step.`;
    return `${run.name} loses what came after its newest checkpoint, ${saved.text}: ${stepsText(steps)} lost.`;
  });
  return [first, ...(parts.length ? parts : ['It holds no run.'])].join(' ');
}

const textOf = (error: unknown): string => (error instanceof ProblemError ? error.message : String(error));
