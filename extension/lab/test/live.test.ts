import type { News } from '../src/live';
import { Live, MOST_RUNS, taken, together } from '../src/live';
import type { Output, OutputNews, Tick } from '../src/messages';
import { makeCluster, makeEvent, makeNews, makeRecords, makeRun, makeTick, Wire } from './samples';

const soon = () => new Promise<void>(resolve => queueMicrotask(resolve));
let lives: Live[] = [];

function makeLive(why?: () => Promise<string>): { live: Live; heard: News[]; told: (news: News) => void } {
  const live = new Live({ url: 'ws://here', make: Wire.make, ...(why ? { why } : {}) });
  lives.push(live);
  const heard: News[] = [];
  return { live, heard, told: news => void heard.push(news) };
}

function hide(hidden: boolean): void {
  Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
  document.dispatchEvent(new Event('visibilitychange'));
}

beforeEach(() => {
  Wire.made = [];
  hide(false);
});
afterEach(() => {
  for (const live of lives) live.dispose();
  lives = [];
});

test('no socket before somebody wants something, one for all who do, none when nobody does any more', async () => {
  const { live, told } = makeLive();
  const [first, second] = [live.listen(told), live.listen(told)];
  await soon();
  expect(Wire.made).toHaveLength(0);
  first.want({ lists: true });
  second.want({ runs: [{ id: 'a1', parts: ['status'] }] });
  await soon();
  expect(Wire.made).toHaveLength(1);
  const [wire] = Wire.made;
  wire!.open();
  expect(wire!.sent).toEqual([
    { type: 'Subscribe', version: 1, lists: true, runs: [{ id: 'a1', parts: ['status'], points: 400 }] }
  ]);
  second.want({ runs: [{ id: 'a1', parts: ['status'] }] });
  await soon();
  expect(wire!.sent).toHaveLength(1);
  first.want({});
  await soon();
  expect(wire!.sent[1]).toMatchObject({ lists: false });
  second.dispose();
  await soon();
  expect(wire!.readyState).toBe(3);
});

test('a hidden page has no socket; shown again it asks for the rest of what it has', async () => {
  const { live, told } = makeLive();
  live.listen(told).want({ runs: [{ id: 'a1', parts: ['records', 'events'], points: 120 }] });
  await soon();
  Wire.made[0]!.open();
  const events = {
    type: 'Events',
    version: 1,
    run: 'a1',
    keep: 0,
    total: 1,
    events: [makeEvent('started', 0)]
  } as const;
  const news = makeNews({ records: makeRecords(1, 7), events: { ...events, events: [...events.events] } });
  Wire.made[0]!.hear(makeTick({ runs: [news] }));
  hide(true);
  expect(Wire.made[0]!.readyState).toBe(3);
  hide(false);
  Wire.made[1]!.open();
  expect(Wire.made[1]!.sent[0]).toMatchObject({
    runs: [{ id: 'a1', points: 120, generation: 1, stride: 1, after: 7, events_after: 1 }]
  });
});

test('ranks’ output goes to who wants it, and on from where it came when the connection was lost', async () => {
  jest.useFakeTimers({ doNotFake: ['queueMicrotask'] });
  try {
    const { live, heard, told } = makeLive();
    const listening = live.listen(told);
    listening.want({ outputs: [{ kind: 'runs', id: 'a1' }] });
    await soon();
    Wire.made[0]!.open();
    expect(Wire.made[0]!.sent).toMatchObject([{ runs: [], outputs: [{ kind: 'runs', id: 'a1' }], lists: false }]);
    const output: Output = { type: 'Output', version: 1, ranks: [], cursor: 'c1' };
    const news: OutputNews = { kind: 'runs', id: 'a1', output, problem: null };
    Wire.made[0]!.hear(makeTick({ outputs: [news] }));
    expect(heard.at(-1)?.outputs).toEqual([news]);
    Wire.made[0]!.close(1006);
    await jest.advanceTimersByTimeAsync(1000);
    Wire.made[1]!.open();
    expect(Wire.made[1]!.sent[0]).toMatchObject({ outputs: [{ kind: 'runs', id: 'a1', after: 'c1' }] });
    listening.want({});
    await soon();
    expect(Wire.made[1]!.readyState).toBe(3);
  } finally {
    jest.useRealTimers();
  }
});

test('lists that cannot be read are told until they can be; a server of before says nothing of either', async () => {
  const { live, told } = makeLive();
  live.listen(told).want({ lists: true });
  await soon();
  Wire.made[0]!.open();
  Wire.made[0]!.hear(makeTick({ lists_problem: 'no right to' }));
  Wire.made[0]!.hear(makeTick());
  expect(live.listsProblem).toBe('no right to');
  const older: Partial<Tick> = makeTick({ all_runs: [makeRun()] });
  delete older.outputs;
  delete older.lists_problem;
  Wire.made[0]!.hear(older);
  expect([live.listsProblem, live.runs?.length]).toEqual(['no right to', 1]);
  Wire.made[0]!.hear(makeTick({ lists_problem: '' }));
  expect(live.listsProblem).toBe('');
});

test('records are appended to what is kept, and replaced where the server says so', () => {
  const first = taken(undefined, makeNews({ records: makeRecords(1, 4) }));
  const second = taken(first, makeNews({ records: makeRecords(4, 6, 3) }));
  expect(second.records?.columns['step']).toEqual([1, 2, 3, 4, 5, 6]);
  const anew = taken(second, makeNews({ records: makeRecords(2, 3, 0, { generation: 2 }), status: makeRun() }));
  expect(anew.records?.columns['step']).toEqual([2, 3]);
  expect(anew.status?.name).toBe('quickstart');
  expect(second.status).toBeNull();
});

test('of a run that two want, all parts and the most points; never more runs than the server takes', () => {
  const both = together([
    { runs: [{ id: 'a', parts: ['status'] }] },
    { lists: true, runs: [{ id: 'a', parts: ['records', 'status'], points: 900 }] }
  ]);
  expect(both).toEqual({ lists: true, outputs: [], runs: [{ id: 'a', parts: ['records', 'status'], points: 900 }] });
  const many = Array.from({ length: 40 }, (_, index) => ({ id: String(index), parts: ['status' as const] }));
  expect(together([{ runs: many }]).runs).toHaveLength(MOST_RUNS);
});

test('listeners hear what has changed, and lists are kept', async () => {
  const { live, heard, told } = makeLive();
  live.listen(told).want({ lists: true });
  await soon();
  Wire.made[0]!.open();
  Wire.made[0]!.hear(makeTick({ all_runs: [makeRun()], all_clusters: [makeCluster()], runs: [makeNews()] }));
  expect(heard).toEqual([{ lists: true, runs: new Set(['a1']), outputs: [], trouble: false }]);
  expect([live.runs?.[0]?.name, live.clusters?.[0]?.name]).toEqual(['quickstart', 'default']);
});

test('a lost connection is told with its reason, and is over with the next tick', async () => {
  jest.useFakeTimers({ doNotFake: ['queueMicrotask'] });
  const { live, told } = makeLive(() => Promise.resolve('this server has no SpeedLab'));
  live.listen(told).want({ lists: true });
  await soon();
  Wire.made[0]!.close(1006);
  expect(live.trouble).toContain('trying again');
  await soon();
  await soon();
  expect(live.trouble).toBe('this server has no SpeedLab; trying again');
  try {
    await jest.advanceTimersByTimeAsync(2000);
    Wire.made[1]!.close(1006);
    expect(live.trouble).toBe('this server has no SpeedLab; trying again');
    await jest.advanceTimersByTimeAsync(4000);
    Wire.made[2]!.open();
    Wire.made[2]!.hear(makeTick({ all_runs: [] }));
    expect(live.trouble).toBe('');
  } finally {
    live.dispose();
    jest.useRealTimers();
  }
});

test.each([
  ['a message of another version', makeTick({ version: 9 }), 'version 9'],
  ['a problem', { type: 'Problem', version: 1, text: '17 runs at once' }, '17 runs at once']
])('%s is told', async (_, message, text) => {
  const { live, heard, told } = makeLive();
  live.listen(told).want({ lists: true });
  await soon();
  Wire.made[0]!.open();
  Wire.made[0]!.hear('no JSON');
  Wire.made[0]!.hear(message);
  expect(live.trouble).toContain(text);
  expect(heard).toEqual([{ lists: false, runs: new Set(), outputs: [], trouble: true }]);
});
