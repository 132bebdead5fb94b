// Control words as people give them: asked for, answered between two steps, and what came of it said in words.

import type { Api } from './api';
import { ProblemError } from './api';
import type { Live, Listening, News } from './live';
import type { RunSummary, Word } from './messages';
import { answerTo, stopText } from './states';

export interface Note {
  text: string;
  bad: boolean;
}

/** What a person chose when a run was to be stopped. */
export type StopChoice = 'stop' | 'save and stop' | 'no';
export type AskStop = (run: RunSummary, text: string) => Promise<StopChoice>;

interface Waiting {
  run: string;
  number: number;
  word: string;
  done: (well: boolean) => void;
}

export class Controls {
  /** Called when a note has changed. */
  changed: (run: string) => void = () => undefined;

  constructor(
    private readonly api: Pick<Api, 'give' | 'events'>,
    private readonly live: Live,
    private readonly askStop: AskStop
  ) {
    this.listening = live.listen(this.heard);
  }

  dispose(): void {
    this.listening.dispose();
  }

  note(run: string): Note | undefined {
    return this.notes.get(run);
  }

  /** Give a word; true when it was carried out, false when it was refused. */
  async give(run: string, word: Word): Promise<boolean> {
    this.say(run, `${word.word}: asked, and done after the step that is being computed`);
    let number: number;
    try {
      number = (await this.api.give(run, word)).number;
    } catch (error) {
      this.say(run, error instanceof ProblemError ? error.message : String(error), true);
      return false;
    }
    return new Promise(done => {
      this.waiting.push({ run, number, word: word.word, done });
      this.want();
      this.look(run);
    });
  }

  /** Stop a run when the person, told what would be lost, still wants it. */
  async stop(run: RunSummary): Promise<void> {
    let text: string;
    try {
      text = stopText(run, (await this.api.events(run.id)).events);
    } catch (error) {
      this.say(run.id, error instanceof ProblemError ? error.message : String(error), true);
      return;
    }
    const choice = await this.askStop(run, text);
    if (choice === 'no') return;
    // What could not be saved is not stopped either: the note says why, and the person decides anew.
    if (choice === 'save and stop' && !(await this.give(run.id, { word: 'save' }))) return;
    await this.give(run.id, { word: 'stop' });
  }

  private readonly heard = (news: News) => {
    for (const run of news.runs) this.look(run);
  };

  private look(run: string): void {
    const data = this.live.run(run);
    for (const waiting of this.waiting.filter(each => each.run === run)) {
      const answer = answerTo(waiting.number, data?.events ?? []);
      if (answer) this.answered(waiting, answer.text, answer.refused);
      else if (data?.status?.state === 'failed') {
        this.answered(waiting, `${waiting.word}: the run failed before it was done`, true);
      } else if (data?.problem) this.answered(waiting, data.problem, true);
    }
  }

  private answered(waiting: Waiting, text: string, refused: boolean): void {
    this.waiting = this.waiting.filter(each => each !== waiting);
    this.want();
    this.say(waiting.run, text, refused);
    waiting.done(!refused);
  }

  private want(): void {
    const runs = [...new Set(this.waiting.map(each => each.run))];
    this.listening.want({ runs: runs.map(id => ({ id, parts: ['status', 'events'], points: 1 })) });
  }

  /** Something about a run that stands beside its controls. */
  say(run: string, text: string, bad = false): void {
    this.notes.set(run, { text, bad });
    this.changed(run);
  }

  private waiting: Waiting[] = [];
  private readonly notes = new Map<string, Note>();
  private readonly listening: Listening;
}
