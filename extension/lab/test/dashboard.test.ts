// jsdom has neither, and every browser does.
type Coders = Pick<typeof globalThis, 'TextDecoder' | 'TextEncoder'>;
const { TextDecoder, TextEncoder } = jest.requireActual<Coders>('util');
Object.assign(globalThis, { TextDecoder, TextEncoder });

import { inked, isDark } from '../src/dashboard/colours';
import { Controls } from '../src/dashboard/controls';
import { Figures, harmless, plainText, readFrame } from '../src/dashboard/figures';
import type { Buffer, Drawn } from '../src/dashboard/figures';
import { ModelSource } from '../src/dashboard/modelSource';
import type { Model } from '../src/dashboard/modelSource';
import { TableView, tableOf } from '../src/dashboard/tables';
import type { Changes, Keyframe } from '../src/messages';

const floats = (...values: number[]) => new Float32Array(values).buffer;
const layout = (title: string, more: object = {}) => ({
  title: { text: title },
  xaxis: {},
  yaxis: { title: { text: 'MiB' } },
  shapes: [],
  annotations: [],
  ...more
});

function keyframe(): [Keyframe, Buffer[]] {
  const curve = { type: 'scatter', name: 'loss', x: { f32: 0 }, y: { f32: 1 } };
  const bars = ['parameters', 'gradients'].map((name, i) => ({ type: 'bar', name, x: ['rank 0'], y: { f32: 2 + i } }));
  const category = { xaxis: { type: 'category' }, annotations: [{ text: 'capacity' }] };
  const steps = { data: [curve], layout: layout('loss') };
  const frame: Keyframe = {
    type: 'Keyframe',
    version: 1,
    seq: 1,
    figures: {
      loss: steps,
      throughput: steps,
      anatomy: steps,
      memory: { data: bars, layout: layout('memory', category) }
    },
    head: { text: 'a · step 2', state: 'running', mark: '●', note: '' },
    states: true,
    buffers: [8, 8, 4, 4]
  };
  return [frame, [floats(1, 2), floats(7, 6), floats(20), floats(9)]];
}

const changes = (seq: number, ...parts: Changes['parts']): Changes => ({
  type: 'Changes',
  version: 1,
  seq,
  parts,
  buffers: []
});

describe('a binary frame', () => {
  it('is a message and its buffers, however long the message is', () => {
    for (const text of ['', 'é', '名前']) {
      const head = new TextEncoder().encode(JSON.stringify({ type: 'Changes', text, buffers: [8, 4] }));
      const frame = new Uint8Array(4 + head.length + 12);
      new DataView(frame.buffer).setUint32(0, head.length, true);
      frame.set(head, 4);
      frame.set(new Uint8Array(floats(1, 2, 3)), 4 + head.length);
      const [message, buffers] = readFrame(frame.buffer);
      expect(message).toMatchObject({ type: 'Changes', text });
      expect(buffers.map(buffer => [...new Float32Array(buffer as ArrayBuffer)])).toEqual([[1, 2], [3]]);
      expect(() => readFrame(frame.buffer.slice(0, -4))).toThrow('tells of');
    }
  });
});

describe('figures', () => {
  let figures: Figures;

  beforeEach(() => {
    figures = new Figures();
    figures.take(...keyframe());
  });

  it('grow, rise and get marks, and say what has changed', () => {
    const extend = { part: 'extend' as const, figure: 'loss', traces: [0], points: [2], buffer: 0 };
    const bars = { part: 'bars' as const, figure: 'memory', notes: ['<i>9</i>'], buffer: 1 };
    const marks = { part: 'marks' as const, shapes: [{ name: 'ink' }], annotations: [{ text: '▼' }] };
    const told = changes(2, extend, bars, marks);
    // A widget's buffers are views of larger ones, which begin anywhere.
    const shifted = new Uint8Array(9);
    shifted.set(new Uint8Array(floats(30, 1)), 1);
    expect(figures.take(told, [floats(3, 4, 5, 4), new DataView(shifted.buffer, 1)])).toEqual([
      'loss',
      'memory',
      'loss',
      'throughput',
      'anatomy'
    ]);
    const { loss, memory, anatomy } = figures.figures;
    expect([[...loss!.data[0]!.x], [...loss!.data[0]!.y]]).toEqual([
      [1, 2, 3, 4],
      [7, 6, 5, 4]
    ]);
    expect(memory!.data.map(trace => trace.y[0])).toEqual([30, 1]);
    expect(memory!.layout.annotations).toEqual([{ text: '&lt;i>9&lt;/i>' }]);
    expect(anatomy!.layout.annotations).toEqual([{ text: '▼' }]);
  });

  it('wait for a keyframe when something was missed, and pass over what they have', () => {
    const head = { part: 'head', text: 'b', state: 'paused', mark: '‖', note: '' } as const;
    figures.take(changes(1, head), []);
    expect([figures.head.text, figures.gap]).toEqual(['a · step 2', false]);
    figures.take(changes(3, head), []);
    figures.take(changes(4, head), []);
    expect([figures.head.text, figures.gap, figures.seq]).toEqual(['a · step 2', true, 1]);
    const [frame, buffers] = keyframe();
    figures.take({ ...frame, seq: 9 }, buffers);
    figures.take(changes(10, head), []);
    expect([figures.head.text, figures.gap]).toEqual(['b', false]);
  });
});

describe('foreign text', () => {
  const hostile = [
    '<script>alert(1)</script>',
    '<img src=x onerror=alert(1)>',
    '<a href="javascript:alert(1)">x</a>',
    '<svg/onload=alert(1)>',
    '<b onclick=alert(1)>x</b>',
    '</text><script>',
    '<sup>1</sup>',
    '<!--',
    '<br/onload=x>'
  ];

  it.each(hostile)('%s reaches plotly without a tag, and a table as itself', text => {
    expect(harmless(text).replace(/<(br|\/?b|\/?extra)>/g, '')).not.toContain('<');
    const [frame, buffers] = keyframe();
    const figures = new Figures();
    const memory = frame.figures['memory']!;
    const data = [{ ...memory.data[0]!, name: text, x: [text] }];
    const hostileLayout = { ...layout(text), xaxis: { type: 'category', title: { text } }, annotations: [{ text }] };
    figures.take({ ...frame, figures: { ...frame.figures, memory: { data, layout: hostileLayout } } }, buffers);
    const taken = JSON.stringify(figures.figures['memory']).replace(/<(br|\/?b|\/?extra)>/g, '');
    expect(taken).not.toContain('<');
    const view = new TableView('memory');
    view.show(tableOf(figures.figures['memory']!));
    expect(view.node.querySelectorAll('script, img, a, svg, sup')).toHaveLength(0);
    expect(view.node.querySelector('tbody th')!.textContent).toBe(text.replace(/<\/?b>/g, ''));
  });

  it('that Python has escaped is read as it was', () => {
    expect(harmless('&quot;a&quot; &amp;quot; &lt;b&gt;')).toBe('"a" &amp;quot; &lt;b&gt;');
    expect(plainText('&lt;b&gt; &amp;amp; &quot;x&#x27;<br><b>y</b>')).toBe('<b> &amp; "x\', y');
  });
});

describe('a table', () => {
  const shown = (view: TableView) => [...view.node.querySelectorAll('tr')].map(row => row.textContent);

  it('has a sum of bars, and the last steps of curves', () => {
    const figures = new Figures();
    figures.take(...keyframe());
    const { memory, loss } = figures.figures;
    expect(tableOf(memory!)).toEqual({
      title: 'memory (MiB)',
      columns: ['', 'rank 0'],
      rows: [
        ['parameters', '20'],
        ['gradients', '9'],
        ['sum', '29']
      ]
    });
    expect(tableOf(loss!).rows).toEqual([
      ['1', '7'],
      ['2', '6']
    ]);
  });

  it('has the points of a column below each other, and whole numbers without any', () => {
    const y = Float32Array.of(1234.5, 0.25, 7);
    const trace = (name: string, values: Float32Array) => ({ name, x: Float32Array.of(1, 2, 3), y: values });
    const data = [trace('a', y), trace('b', Float32Array.of(1e-3, 2.5e-4, NaN)), trace('c', Float32Array.of(5, 10, 0))];
    const figure = { data, layout: { ...layout('gradient norm'), yaxis: { title: { text: 'norm' } } } };
    expect(tableOf(figure)).toEqual({
      title: 'gradient norm',
      columns: ['step', 'a', 'b', 'c'],
      rows: [
        ['1', '1,234.5', '0.0010000', '5'],
        ['2', '0.25', '0.0002500', '10'],
        ['3', '7.0', '–', '0']
      ]
    });
  });

  it('keeps what is selected while steps come and go', () => {
    const view = new TableView('loss');
    const rows = (first: number): [string, string][] => [0, 1, 2].map(i => [String(first + i), `${first + i}.5`]);
    view.show({ title: 'loss', columns: ['step', 'loss'], rows: rows(1) });
    document.body.append(view.node);
    const cell = view.node.querySelectorAll('td')[2]!;
    const selection = document.getSelection()!;
    selection.selectAllChildren(cell);
    view.show({ title: 'loss', columns: ['step', 'loss'], rows: rows(2) });
    view.show({ title: 'loss', columns: ['step', 'loss'], rows: rows(3) });
    expect(shown(view)).toEqual(['steploss', '33.5', '44.5', '55.5']);
    expect([selection.toString(), cell.isConnected]).toEqual(['3.5', true]);
  });
});

describe('the head line', () => {
  it('announces the state when it changes, and no number', () => {
    const controls = new Controls();
    const told = controls.node.querySelector('[role=status]')!;
    const spoken: string[] = [];
    const head = { mark: '●', note: '' };
    for (const [text, state] of [
      ['a <b> · step 1', 'running'],
      ['a <b> · step 2', 'running'],
      ['a <b> · step 3', 'paused']
    ] as const) {
      controls.show({ ...head, text, state });
      spoken.push(told.textContent);
    }
    expect(spoken).toEqual(['a <b>: running', 'a <b>: running', 'a <b>: paused']);
    const shown = ['.sl-title', '.sl-text'].map(part => controls.node.querySelector(part)!.textContent);
    expect(shown).toEqual(['● pauseda <b>', '· step 3']);
  });
});

describe('a kernel that is restarted', () => {
  const handlers = new Map<string, () => void>();
  let sent: unknown[] = [];
  let problems: string[] = [];
  let taken: number[] = [];
  let numbers: ArrayBuffer[] = [];

  function sourceOf(bundle: string | null): ModelSource {
    sent = [];
    problems = [];
    taken = [];
    const model: Model = {
      get: name => (name === 'bundle' ? bundle : {}),
      on: (name, callback) => void handlers.set(name, callback),
      off: name => void handlers.delete(name),
      send: content => void sent.push(content),
      widget_manager: { get_model: id => Promise.resolve({ ...model, comm_live: id !== 'dead' }) }
    };
    const source = new ModelSource(model, 'v');
    numbers = [];
    const onMessage = ({ seq }: Drawn, buffers: Buffer[]) => {
      taken.push(seq);
      numbers.push(...(buffers as ArrayBuffer[]));
    };
    source.start({ onMessage, onProblem: text => void problems.push(text) });
    return source;
  }

  it('is told once, and nothing is sent to it any more', () => {
    const source = sourceOf(null);
    source.ask({ watching: true });
    handlers.get('comm_live_update')!();
    source.ask({ watching: false });
    source.close();
    expect(sent).toEqual([{ type: 'Draw', version: 1, view: 'v', watching: true }]);
    expect(problems).toEqual([expect.stringMatching('was restarted. Run the cell again.')]);
    expect(handlers.size).toBe(0);
  });

  it('while it lives, is heard for all views until it draws for one alone', () => {
    const source = sourceOf(null);
    const hear = handlers.get('msg:custom') as (message: unknown) => void;
    const own = (view: string, seq: number) => ({ type: 'OwnDrawing', version: 1, view, drawn: changes(seq) });
    for (const message of [changes(1), own('other', 2), own('v', 3), changes(4), own('other', 5), own('v', 6)])
      hear(message);
    expect(taken).toEqual([1, 3, 6]);
    source.close();
  });

  it('sends numbers as text', () => {
    const source = sourceOf(null);
    const hear = handlers.get('msg:custom') as (message: unknown) => void;
    hear({ ...changes(1), buffers_as_text: [btoa('\0\0\x80\x3f'), btoa('\0\0\0\x40')] });
    hear(changes(2));
    expect(numbers.map(each => [...new Float32Array(each)])).toEqual([[1], [2]]);
    source.close();
  });

  it('is noticed by a view that is made after it', async () => {
    const told = [];
    for (const bundle of ['IPY_MODEL_living', 'IPY_MODEL_dead']) {
      const source = sourceOf(bundle);
      await Promise.resolve().then(() => Promise.resolve());
      told.push(problems.length);
      source.close();
    }
    expect(told).toEqual([0, 1]);
  });
});

it('has no axes of nothing before the first step', () => {
  const page = { family: '', ink: '#111', line: '#222', card: '#333' };
  const figure = (...x: number[]) => ({
    data: [{ name: 'loss', x: Float32Array.from(x), y: Float32Array.from(x) }],
    layout: layout('loss')
  });
  const [empty, measured] = [inked(figure(), page).layout, inked(figure(1), page).layout];
  expect([empty.xaxis['visible'], empty.annotations.map(({ text }) => text)]).toEqual([
    false,
    ['begins with the first step']
  ]);
  expect([measured.xaxis['visible'], measured.annotations]).toEqual([true, []]);
});

it('knows a dark page', () => {
  expect(['rgb(17, 17, 17)', 'rgb(255, 255, 255)', 'rgba(30, 30, 30, 1)'].map(isDark)).toEqual([true, false, true]);
});
