import type { RunSummary } from '../src/messages';
import { Live } from '../src/live';
import { RunOn, StatusItem } from '../src/panel/status';
import { quickstart } from '../src/quickstart';
import { DEFAULTS, settingsFrom } from '../src/settings';
import { makeNews, makeRun, makeTick, Wire } from './samples';

beforeEach(() => {
  Wire.made = [];
  jest.useFakeTimers();
});
afterEach(() => jest.useRealTimers());

test('the status bar asks for the list until a run is on, then for its status alone, and announces states only', async () => {
  let runs: RunSummary[] = [];
  let asked = 0;
  const list = () => Promise.resolve({ type: 'Runs' as const, version: 1, runs: (asked++, runs) });
  const live = new Live({ url: 'ws://here', make: Wire.make });
  const on = new RunOn({ runs: list }, live);
  let opened = 0;
  const item = new StatusItem(on, () => (opened += 1));
  document.body.append(item.node);
  on.on = true;
  await jest.advanceTimersByTimeAsync(10);
  expect([asked, item.node.querySelector('button')?.hidden]).toEqual([1, true]);
  runs = [makeRun()];
  await jest.advanceTimersByTimeAsync(5000);
  expect(item.node.textContent).toBe('quickstart · 131/2,000 · 41.2 k tokens/s · 3 min left');
  await jest.advanceTimersByTimeAsync(20_000);
  expect(asked).toBe(2);
  const [wire] = Wire.made;
  wire!.open();
  expect(wire!.sent).toEqual([
    { type: 'Subscribe', version: 1, lists: false, runs: [{ id: 'a1', parts: ['status'], points: 1 }] }
  ]);
  const announced = () => item.node.querySelector('[role=status]')?.textContent;
  wire!.hear(makeTick({ runs: [makeNews({ status: makeRun({ step: 140 }) })] }));
  expect([item.node.textContent, announced()]).toEqual(['quickstart · 140/2,000 · 41.2 k tokens/s · 3 min left', '']);
  wire!.hear(makeTick({ runs: [makeNews({ status: makeRun({ state: 'paused', seconds_left: null }) })] }));
  expect(announced()).toBe('quickstart is paused');
  item.node.querySelector('button')!.click();
  expect(opened).toBe(1);
  // One that has said nothing for long may be over: another may be on.
  await jest.advanceTimersByTimeAsync(31_000);
  expect(asked).toBeGreaterThan(2);
  on.on = false;
  await jest.advanceTimersByTimeAsync(10);
  const before = asked;
  await jest.advanceTimersByTimeAsync(60_000);
  expect([asked, wire!.readyState]).toEqual([before, 3]);
  on.dispose();
});

test('settings that fit are taken; what does not is told, with what is used', () => {
  expect(settingsFrom({ side: 'right', outputLines: 500, statusBar: false, foldOutput: false })).toEqual({
    settings: { side: 'right', outputLines: 500, statusBar: false, foldOutput: false },
    problem: ''
  });
  const { settings, problem } = settingsFrom({ side: 'up', outputLines: 1e9, statusBar: 'yes' });
  expect(settings).toEqual(DEFAULTS);
  expect(problem).toContain('side is "up", which is not left or right; left is used');
  expect(problem).toContain('outputLines is 1000000000, which is not a number from 100 to 20000; 2000 is used');
  expect(problem).toContain('statusBar is "yes"');
});

test('the quickstart is copied once, and one that is there is taken as it is', async () => {
  const files = new Map<string, unknown>();
  const gone = Object.assign(new Error('not found'), { response: { status: 404 } });
  const contents = {
    get: jest.fn((path: string) => (files.has(path) ? Promise.resolve({}) : Promise.reject(gone))),
    save: jest.fn((path: string, model: { content?: unknown }) => {
      files.set(path, model.content);
      return Promise.resolve({});
    })
  };
  const api = {
    notebook: (name: string) =>
      Promise.resolve({ type: 'Notebook' as const, version: 1, name, content: { nbformat: 4 } })
  };
  const manager = contents as unknown as Parameters<typeof quickstart>[1];
  expect(await quickstart(api, manager, 'work')).toBe('work/01_quickstart.ipynb');
  expect(files.get('work/01_quickstart.ipynb')).toEqual({ nbformat: 4 });
  await quickstart(api, manager, 'work');
  expect(contents.save).toHaveBeenCalledTimes(1);
  contents.get.mockRejectedValueOnce(Object.assign(new Error('no rights'), { response: { status: 403 } }));
  await expect(quickstart(api, manager, '')).rejects.toThrow('no rights');
});
