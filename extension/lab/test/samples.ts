import type { ClusterSummary, RankMemory, Records, RunEvent, RunNews, RunSummary, Tick } from '../src/messages';
import { COLUMNS } from '../src/messages';

export function makeRun(changes: Partial<RunSummary> = {}): RunSummary {
  return {
    id: 'a1',
    name: 'quickstart',
    state: 'running',
    step: 131,
    steps: 2000,
    loss: 5.912345,
    tokens_per_second: 41234,
    seconds_left: 180,
    cluster: 'default',
    engines: 4,
    updated: 1000,
    text: '',
    problem: '',
    ...changes
  };
}

export function makeCluster(changes: Partial<ClusterSummary> = {}): ClusterSummary {
  const values = {
    id: 'default',
    name: 'default',
    state: 'running',
    engines: 4,
    host: 'here',
    hosts: ['here']
  } as const;
  return { ...values, hosts: [...values.hosts], link: '', started: 900, text: '', ...changes };
}

export function makeEvent(kind: string, step: number, changes: Partial<RunEvent> = {}): RunEvent {
  return { kind, step, time: 1000 + step, text: '', command: null, details: {}, ...changes };
}

export function makeMemory(rank: number, device: number[], capacity = 0): RankMemory {
  const row = (values: number[]) => [...values, ...Array<number>(8 - values.length).fill(0)];
  return { rank, step: 1, held: [row(device), row([]), row([])], capacity: [capacity, 0, 0] };
}

/** Points `first` to `last` of a run with one step a point. */
export function makeRecords(first: number, last: number, keep = 0, changes: Partial<Records> = {}): Records {
  const steps = Array.from({ length: last - first + 1 }, (_, index) => first + index);
  const columns = Object.fromEntries(
    COLUMNS.map(name => [name, steps.map(step => (name === 'step' ? step : 1 / step))])
  );
  return {
    type: 'Records',
    version: 1,
    run: 'a1',
    rank: 0,
    generation: 1,
    stride: 1,
    keep,
    columns,
    heldout: [],
    ...changes
  };
}

export function makeNews(changes: Partial<RunNews> = {}): RunNews {
  return { id: 'a1', status: null, records: null, events: null, memory: null, problem: null, ...changes };
}

export function makeTick(changes: Partial<Tick> = {}): Tick {
  return {
    type: 'Tick',
    version: 1,
    runs: [],
    outputs: [],
    lists_problem: null,
    all_runs: null,
    all_clusters: null,
    ...changes
  };
}

/** Stands for the browser's WebSocket. */
export class Wire {
  static made: Wire[] = [];
  static readonly make = (url: string) => new Wire(url) as unknown as WebSocket;

  readyState = 0;
  sent: Record<string, unknown>[] = [];
  onopen: (() => void) | null = null;
  onmessage: ((event: { data: string }) => void) | null = null;
  onclose: ((event: { code: number }) => void) | null = null;

  constructor(readonly url: string) {
    Wire.made.push(this);
  }

  open(): void {
    this.readyState = 1;
    this.onopen?.();
  }

  hear(message: unknown): void {
    this.onmessage?.({ data: typeof message === 'string' ? message : JSON.stringify(message) });
  }

  send(text: string): void {
    this.sent.push(JSON.parse(text) as Record<string, unknown>);
  }

  close(code = 1000): void {
    this.readyState = 3;
    this.onclose?.({ code });
  }
}

/** Names that would do harm if they were ever markup. */
export const HOSTILE = [
  '<img src=x onerror="window.harmed=1">',
  '<script>window.harmed=1</script>',
  '"><svg onload=window.harmed=1>',
  "'); window.harmed=1; ('",
  '</button></li><h1>hello',
  '\u202e\u0000\u0007 turned',
  'a'.repeat(5000),
  '${window.harmed=1}{{7*7}}'
];
