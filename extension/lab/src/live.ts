// What the server tells, as one page has it: one socket shared by everything on the page that listens.
//
// 1. Each listener says what it wants (`want`); what all want together is one Subscribe, sent when it has changed.
// 2. A run's records and events are kept here, and the question says what is there, so that only the rest comes. What
//    ranks print is not kept, but how far it came.
// 3. With nothing wanted, or the page hidden, there is no socket at all.

import type { Printer } from './api';
import type {
  ClusterSummary,
  OutputNews,
  RankMemory,
  Records,
  RunEvent,
  RunNews,
  RunSummary,
  Subscribe,
  Tick,
  Watch
} from './messages';
import { VERSION } from './messages';
import { Socket } from './socket';

/** What somebody on the page wants to hear. */
export interface Wish {
  lists?: boolean;
  runs?: readonly Pick<Watch, 'id' | 'parts' | 'points'>[];
  /** Each by one listener at a time. */
  outputs?: readonly Printer[];
}

/** What has changed since the last call. */
export interface News {
  lists: boolean;
  runs: ReadonlySet<string>;
  /** What ranks have printed since the last call. */
  outputs: readonly OutputNews[];
  trouble: boolean;
}

/** What a page has of a run. */
export interface RunData {
  status: RunSummary | null;
  records: Records | null;
  events: RunEvent[];
  memory: RankMemory[];
  problem: string;
}

/** The server's limit for a page; who listened first is heard first. */
export const MOST_RUNS = 16;
const MOST_OUTPUTS = 8;
const POINTS = 400;

export class Listening {
  constructor(
    readonly told: (news: News) => void,
    private readonly changed: () => void,
    private readonly left: (me: Listening) => void
  ) {}

  /** In the place of what it wanted; nothing at first. */
  want(wish: Wish): void {
    this.wish = wish;
    this.changed();
  }

  dispose(): void {
    this.wish = {};
    this.left(this);
  }

  wish: Wish = {};
  /** How far output that it wants, or wanted, has come to it, by `keyOf`. */
  readonly cursors = new Map<string, string>();
}

export interface LiveOptions {
  url: string;
  make?: (url: string) => WebSocket;
  /** Why there is no connection, in words that tell what to do; '' where nobody knows better. */
  why?: () => Promise<string>;
}

export class Live {
  runs: readonly RunSummary[] | null = null;
  clusters: readonly ClusterSummary[] | null = null;
  /** Why nothing comes; '' while all is well. */
  trouble = '';
  /** Why the lists cannot be read, while the rest comes. */
  listsProblem = '';

  constructor(private readonly options: LiveOptions) {
    document.addEventListener('visibilitychange', this.settle);
  }

  dispose(): void {
    document.removeEventListener('visibilitychange', this.settle);
    this.listeners.clear();
    this.settle();
  }

  listen(told: (news: News) => void): Listening {
    const listening = new Listening(told, this.later, me => {
      this.listeners.delete(me);
      this.later();
    });
    this.listeners.add(listening);
    return listening;
  }

  /** What there is of a run that somebody wants, or wanted a moment ago. */
  run(id: string): RunData | undefined {
    return this.data.get(id);
  }

  /** Several wishes of one moment are one Subscribe. */
  private readonly later = () => {
    if (this.waits) return;
    this.waits = true;
    queueMicrotask(() => {
      this.waits = false;
      this.settle();
    });
  };

  private readonly settle = () => {
    const wishes = document.hidden ? [] : [...this.listeners].map(listener => listener.wish);
    const wanted = together(wishes);
    if (!wanted.lists && wanted.runs.length + wanted.outputs.length === 0) {
      this.socket?.close();
      this.socket = null;
      this.sent = '';
      return;
    }
    this.forget(new Set(wanted.runs.map(watch => watch.id)));
    if (!this.socket) {
      this.socket = new Socket(
        this.options.url,
        { onOpen: this.say, onMessage: this.take, onLost: this.lost },
        this.options.make
      );
    } else if (JSON.stringify(wanted) !== this.sent) this.say();
  };

  private readonly say = () => {
    const wanted = together([...this.listeners].map(listener => listener.wish));
    this.sent = JSON.stringify(wanted);
    const runs = wanted.runs.map(watch => ({ ...watch, ...position(this.data.get(watch.id), watch.parts) }));
    const outputs = wanted.outputs.map(each => {
      const after = this.listenersOf(each)[0]?.cursors.get(keyOf(each));
      return after === undefined ? each : { ...each, after };
    });
    const some = outputs.length ? { outputs } : {};
    const question: Subscribe = { type: 'Subscribe', version: VERSION, runs, ...some, lists: wanted.lists };
    this.socket?.send(question);
  };

  private readonly take = (data: string | ArrayBuffer) => {
    const message = parsed(data);
    if (message?.type === 'Problem') {
      this.fail(typeof message.text === 'string' ? message.text : 'the server could not answer');
      return;
    }
    if (message?.type !== 'Tick') return;
    if (message.version !== VERSION) {
      this.socket?.close();
      this.fail(versionText(message.version));
      return;
    }
    const tick = message as unknown as Tick;
    const trouble = this.trouble !== '';
    this.trouble = '';
    this.losses += 1;
    if (tick.all_runs) this.runs = tick.all_runs;
    if (tick.all_clusters) this.clusters = tick.all_clusters;
    for (const news of tick.runs) this.data.set(news.id, taken(this.data.get(news.id), news));
    // A server that was not started again after an update sends neither.
    const { outputs = [], lists_problem = null } = tick as Partial<Tick>;
    for (const { kind, id, output } of outputs) {
      if (!output) continue;
      const printer = { kind, id };
      for (const listener of this.listenersOf(printer)) listener.cursors.set(keyOf(printer), output.cursor);
    }
    this.listsProblem = lists_problem ?? this.listsProblem;
    const lists = tick.all_runs !== null || tick.all_clusters !== null || lists_problem !== null;
    this.tell({ lists, runs: new Set(tick.runs.map(news => news.id)), outputs, trouble });
  };

  private readonly lost = (text: string) => {
    if (this.trouble === '') this.fail(text);
    const turn = (this.losses += 1);
    void this.options.why?.().then(
      why => {
        // Only while it is still lost: an answer may be late.
        if (turn === this.losses && this.trouble !== '') this.fail(why ? `${why}; trying again` : text);
      },
      () => undefined
    );
  };

  private fail(text: string): void {
    if (this.trouble === text) return;
    this.trouble = text;
    this.tell({ lists: false, runs: new Set(), outputs: [], trouble: true });
  }

  private tell(news: News): void {
    for (const listener of [...this.listeners]) listener.told(news);
  }

  private listenersOf(output: Printer): Listening[] {
    const key = keyOf(output);
    return [...this.listeners].filter(({ wish }) => wish.outputs?.some(each => keyOf(each) === key));
  }

  /** Keeps what is wanted, and of the rest the newest few, for who looks again. */
  private forget(wanted: ReadonlySet<string>): void {
    for (const id of [...this.data.keys()]) {
      if (this.data.size <= MOST_RUNS) return;
      if (!wanted.has(id)) this.data.delete(id);
    }
  }

  private socket: Socket | null = null;
  private losses = 0;
  private sent = '';
  private waits = false;
  private readonly listeners = new Set<Listening>();
  private readonly data = new Map<string, RunData>();
}

const keyOf = ({ kind, id }: Printer): string => `${kind}/${id}`;

interface Wanted {
  lists: boolean;
  runs: { id: string; parts: Watch['parts']; points: number }[];
  outputs: Printer[];
}

/** All wishes as one: of a run that several want, all parts and the most points. */
export function together(wishes: readonly Wish[]): Wanted {
  const runs = new Map<string, { parts: Set<Watch['parts'][number]>; points: number }>();
  for (const watch of wishes.flatMap(wish => wish.runs ?? [])) {
    const known = runs.get(watch.id) ?? { parts: new Set(), points: 0 };
    for (const part of watch.parts) known.parts.add(part);
    known.points = Math.max(known.points, watch.points ?? POINTS);
    runs.set(watch.id, known);
  }
  const chosen = [...runs].slice(0, MOST_RUNS);
  const outputs = new Map(wishes.flatMap(wish => wish.outputs ?? []).map(each => [keyOf(each), each]));
  return {
    outputs: [...outputs.values()].slice(0, MOST_OUTPUTS),
    lists: wishes.some(wish => wish.lists),
    runs: chosen.map(([id, { parts, points }]) => ({ id, parts: [...parts].sort(), points }))
  };
}

/** What is there of a run, as the question for the rest of these parts says it. */
function position(data: RunData | undefined, parts: Watch['parts']): Partial<Watch> {
  const events = data && parts.includes('events') ? { events_after: data.events.length } : {};
  const records = parts.includes('records') ? data?.records : null;
  const after = records?.columns['step']?.at(-1);
  if (!records || typeof after !== 'number') return events;
  return { ...events, generation: records.generation, stride: records.stride, after };
}

/** What is there, with what is new of it. */
export function taken(data: RunData | undefined, news: RunNews): RunData {
  const old = data ?? { status: null, records: null, events: [], memory: [], problem: '' };
  return {
    status: news.status ?? old.status,
    records: news.records ? appended(old.records, news.records) : old.records,
    events: news.events ? [...old.events.slice(0, news.events.keep), ...news.events.events] : old.events,
    memory: news.memory ?? old.memory,
    problem: news.problem ?? old.problem
  };
}

function appended(old: Records | null, more: Records): Records {
  const columns = Object.entries(more.columns).map(([name, values]) => [
    name,
    [...(old?.columns[name] ?? []).slice(0, more.keep), ...values]
  ]);
  return { ...more, columns: Object.fromEntries(columns) as Records['columns'] };
}

function parsed(data: string | ArrayBuffer): Record<string, unknown> | null {
  try {
    const message: unknown = JSON.parse(typeof data === 'string' ? data : new TextDecoder().decode(data));
    return typeof message === 'object' && message !== null ? (message as Record<string, unknown>) : null;
  } catch {
    return null;
  }
}

function versionText(theirs: unknown): string {
  return (
    `the server speaks version ${String(theirs).slice(0, 16)} of SpeedLab's messages and this page version ${VERSION}: ` +
    'reload the page; if that does not help, install the same version of SpeedLab for both'
  );
}
