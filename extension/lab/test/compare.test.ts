import type { IStateDB } from '@jupyterlab/statedb';

import { Chips } from '../src/compare/chips';
import { hiddenIn } from '../src/compare/hidden';
import { figureOf } from '../src/compare/shown';
import { CompareView } from '../src/compare/view';
import { Figures } from '../src/dashboard/figures';
import type { Layout, Trace } from '../src/dashboard/figures';
import type { Plotly } from '../src/dashboard/plotly';
import type { Taker } from '../src/dashboard/source';
import type { Compared, ComparedRun, Comparison } from '../src/messages';
import { HOSTILE } from './samples';

const run = (name: string, more: Partial<ComparedRun> = {}): ComparedRun => ({
  ...{ name, colours: ['#111111', '#eeeeee'], state: 'running', mark: '●', text: '', problem: '' },
  ...more
});
const runs = [run('a'), run('b', { colours: ['#222222', '#dddddd'] }), run('c', { colours: ['#333333', '#cccccc'] })];
const layout = {
  title: { text: 'loss' },
  xaxis: {},
  yaxis: {},
  shapes: [0, 1, 2].map(number => ({ name: String(number), line: { width: 1 } })),
  annotations: [0, 1, 2].map(number => ({ text: '◆', name: String(number), font: { size: 11 } }))
};
const curves = {
  data: [0, 1, 2].map(number => ({
    ...{ name: runs[number]!.name, legendgroup: String(number), line: { width: 2 }, marker: { size: 8 } },
    ...{ x: Float32Array.of(1), y: Float32Array.of(number) }
  })),
  layout
};
const bars = {
  data: [{ name: 'parameters', x: ['1', '2', '3'], y: Float32Array.of(4, 5, 6), text: ['a', 'b', 'c'] }],
  layout
};

test('what is hidden is left out of curves, bars and marks; the others wear the colour of the ground', () => {
  const shown = figureOf(curves, { runs, hidden: new Set([1]), dark: true });
  expect(shown.data.map(trace => [trace.name, trace.line?.['color'], trace.marker?.['color']])).toEqual([
    ['a', '#eeeeee', '#eeeeee'],
    ['c', '#cccccc', '#cccccc']
  ]);
  expect(shown.layout.shapes.map(shape => shape.line)).toEqual([
    { width: 1, color: '#eeeeee' },
    { width: 1, color: '#cccccc' }
  ]);
  expect(shown.layout.annotations.map(note => note['font'])).toEqual([
    { size: 11, color: '#eeeeee' },
    { size: 11, color: '#cccccc' }
  ]);
  expect(shown.layout['showlegend']).toBe(false);
  const [left] = figureOf(bars, { runs, hidden: new Set([1]), dark: false }).data;
  expect([left?.x, [...(left?.y ?? [])], left?.['text']]).toEqual([
    ['1', '3'],
    [4, 6],
    ['a', 'c']
  ]);
  expect(figureOf(curves, { runs, hidden: new Set(), dark: false }).data).toHaveLength(3);
});

test('a run is hidden and shown by its button, and never lost', () => {
  let changes = 0;
  const chips = new Chips(() => (changes += 1));
  document.body.append(chips.node);
  const names = [...HOSTILE.slice(0, 2), 'c'];
  chips.show(
    names.map(name => run(name)),
    false
  );
  const buttons = () => [...document.querySelectorAll<HTMLButtonElement>('.sl-chip')];
  const all = document.querySelector<HTMLButtonElement>('.sl-all')!;
  expect(buttons().map(button => button.querySelector('.sl-chip-name')?.textContent)).toEqual(
    names.map((name, number) => `${number + 1} · ${name}`)
  );
  expect(document.querySelectorAll('img, script, h1')).toHaveLength(0);
  expect(all.hidden).toBe(true);
  buttons()[0]!.click();
  buttons()[1]!.click();
  buttons()[1]!.click();
  expect([changes, [...chips.hidden], buttons()[0]!.getAttribute('aria-pressed'), all.hidden]).toEqual([
    3,
    [0],
    'false',
    false
  ]);
  expect(buttons()[0]!.title).toBe(`Show ${names[0]}`);
  // The button that has done its work goes, and the focus with it to what came back.
  all.focus();
  all.click();
  expect([chips.hidden.size, document.activeElement]).toEqual([0, buttons()[0]]);
  // A state is said when it changes, and not before.
  const said = document.querySelector('[role=status]')!;
  expect(said.textContent).toBe('');
  chips.show(
    names.map(name => run(name, name === 'c' ? { problem: 'its folder is gone' } : {})),
    false
  );
  expect([said.textContent, buttons()[2]!.textContent]).toEqual([
    'c: cannot be read',
    expect.stringContaining('▲ cannot be read')
  ]);
  expect(buttons()[2]!.title).toContain('its folder is gone');
});

test('what is hidden is remembered by the runs that are compared, and nothing that does not fit is taken', async () => {
  const kept = new Map<string, unknown>();
  const state = {
    fetch: (key: string) => Promise.resolve(kept.get(key)),
    save: (key: string, value: unknown) => Promise.resolve(void kept.set(key, value)),
    remove: (key: string) => Promise.resolve(void kept.delete(key))
  } as unknown as IStateDB;
  const settled = () => new Promise(done => setTimeout(done));
  const [ours, others] = [hiddenIn(state, ['a', 'b', 'c']), hiddenIn(state, ['a', 'b'])];
  ours.keep([2, 0]);
  ours.keep([2]);
  await settled();
  expect([await ours.recall(), await others.recall()]).toEqual([[2], []]);
  ours.keep([]);
  await settled();
  expect(kept.size).toBe(0);
  kept.set('speedlab:hidden:a,b', [1, 2, -1, 'x', 0.5, null]);
  expect(await others.recall()).toEqual([1]);
  kept.set('speedlab:hidden:a,b', { length: 1 });
  expect(await others.recall()).toEqual([]);
  expect(await hiddenIn(null, ['a', 'b']).recall()).toEqual([]);
});

test('a comparison comes whole at first, then what stands beside its figures', () => {
  const compared: Compared = { runs, facts: [], settings: [], note: '' };
  const first: Comparison = { type: 'Comparison', version: 1, seq: 4, figures: {}, compared, buffers: [] };
  const figures = new Figures();
  figures.take({ ...first, figures: { loss: { data: [], layout: layout } } }, []);
  expect([figures.seq, figures.compared?.runs.length, Object.keys(figures.figures)]).toEqual([4, 3, ['loss']]);
  const part = { ...compared, part: 'compared' as const, note: '3 other settings are the same' };
  figures.take({ type: 'Changes', version: 1, seq: 5, parts: [part], buffers: [] }, []);
  expect([figures.seq, figures.compared?.note]).toEqual([5, '3 other settings are the same']);
});

test('where all runs are hidden every figure says so, and a picture too, until one is shown again', async () => {
  jest.useFakeTimers();
  const drawn: Record<string, { text: string[]; axes: unknown }> = {};
  const told = ({ annotations, xaxis }: Layout) => ({
    text: annotations.map(note => note.text),
    axes: xaxis['visible']
  });
  const pictured: string[][] = [];
  const plotly: Plotly = {
    react: (place, _, made) => Promise.resolve(void (drawn[place.dataset['plot']!] = told(made))),
    purge: () => {},
    toImage: ({ layout: made }) => {
      pictured.push(told(made).text);
      return Promise.resolve('data:image/svg+xml,%3Csvg%20xmlns=%22http://www.w3.org/2000/svg%22/%3E');
    },
    Plots: { resize: () => undefined }
  };
  let taker: Taker | undefined;
  const source = { start: (view: Taker) => void (taker = view), ask: () => {}, close: () => {} };
  const view = new CompareView(source, () => Promise.resolve(plotly));
  document.body.replaceChildren(view.node);
  const compared: Compared = { runs, facts: [], settings: [], note: '' };
  const listed = ({ data }: { data: readonly Pick<Trace, 'x' | 'y'>[] }) => ({
    data: data.map(trace => ({ ...trace, x: [...trace.x], y: [...trace.y] })),
    layout
  });
  const figures = { loss: listed(curves), throughput: listed(curves), memory: listed(bars), anatomy: listed(bars) };
  taker!.onMessage({ type: 'Comparison', version: 1, seq: 1, figures, compared, buffers: [] }, []);
  const draws = () => jest.advanceTimersByTimeAsync(250); // At most five times a second.
  await draws();
  expect(drawn['loss']).toEqual({ text: ['◆', '◆', '◆'], axes: true });
  for (const chip of document.querySelectorAll<HTMLButtonElement>('.sl-chip')) chip.click();
  await draws();
  const hidden = { text: ['all runs are hidden'], axes: false };
  expect(drawn).toEqual({ loss: hidden, throughput: hidden, memory: hidden, anatomy: hidden });
  expect(document.querySelector('.sl-all')!.textContent).toBe('Show all 3');
  const saved = jest.fn<string, [Blob]>(() => 'blob:here');
  Object.assign(URL, { createObjectURL: saved, revokeObjectURL: () => {} });
  jest.spyOn(HTMLAnchorElement.prototype, 'click').mockImplementation(() => {});
  document.querySelector<HTMLButtonElement>('.sl-tools button[title*="SVG"]')!.click();
  await draws();
  expect([pictured, saved.mock.calls.length]).toEqual([Array(4).fill(['all runs are hidden']), 1]);
  document.querySelectorAll<HTMLButtonElement>('.sl-chip')[1]!.click();
  await draws();
  expect(drawn['loss']).toEqual({ text: ['◆'], axes: true });
  view.dispose();
  jest.useRealTimers();
});
