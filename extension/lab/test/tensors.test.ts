// jsdom has neither, and every browser does.
type Coders = Pick<typeof globalThis, 'TextDecoder' | 'TextEncoder'>;
const { TextDecoder, TextEncoder } = jest.requireActual<Coders>('util');
Object.assign(globalThis, { TextDecoder, TextEncoder });

import { Controls, smoothingText } from '../src/dashboard/controls';
import { ModelSource } from '../src/dashboard/modelSource';
import type { Model } from '../src/dashboard/modelSource';
import { tableOf } from '../src/dashboard/tables';
import { partAt, TensorPanel } from '../src/dashboard/tensors';
import type { Part } from '../src/dashboard/tensors';
import type { TensorRow, Tensors } from '../src/messages';

const row = (name: string, bytes: number): TensorRow => ({
  name,
  unit: 'blocks.0',
  state: 'moments',
  shape: '4×2',
  here: 'all of it',
  owner: 'rank 0',
  form: 'float32, partitioned',
  bytes
});

function told(part: Part, ...rows: TensorRow[]): Tensors {
  const sum = rows.reduce((total, { bytes }) => total + bytes, 0);
  return {
    type: 'Tensors',
    version: 1,
    ...part,
    step: 7,
    measured_bytes: sum + 16,
    tensor_bytes: sum,
    count: rows.length,
    rows,
    text: '16 B more are padding.'
  };
}

const MOMENTS: Part = { rank: 1, category: 'optimizer_moments', place: 'device' };
const settled = () => new Promise(done => setTimeout(done));
const text = (panel: TensorPanel, what: string) => panel.node.querySelector(what)?.textContent;

describe('the tensors in a segment', () => {
  it('are those of the bar and the category that were clicked', () => {
    const meta = {
      bars: [
        [0, 'device'],
        [null, 'device'],
        [3, 'host']
      ],
      ranks: [0, 3]
    };
    expect(partAt(meta, 2, 'gradients')).toEqual({ rank: 3, category: 'gradients', place: 'host' });
    expect(partAt(meta, 1, 'gradients')).toBeNull(); // A gap between hosts.
    expect(partAt(undefined, 0, 'ink')).toBeNull();
  });

  it('are listed, and others where a list says so', async () => {
    const asked: Part[] = [];
    const panel = new TensorPanel(part => {
      asked.push(part);
      return Promise.resolve(told(part, row('large', 2048), row('small', 512)));
    });
    panel.open(MOMENTS, [0, 1]);
    await settled();
    expect(text(panel, 'strong')).toBe('optimizer moments of rank 1, device: 2.5 KiB in 2 tensors');
    expect(text(panel, 'p')).toBe('16 B more are padding. Measured at step 7.');
    expect([...panel.node.querySelectorAll('tbody tr')].map(line => line.textContent)).toEqual([
      'large2.0 KiBblocks.0moments4×2all of itrank 0float32, partitioned',
      'small512 Bblocks.0moments4×2all of itrank 0float32, partitioned'
    ]);
    const [, holds] = panel.node.querySelectorAll('select');
    holds!.value = 'activations';
    holds!.dispatchEvent(new Event('change'));
    expect(asked).toEqual([MOMENTS, { ...MOMENTS, category: 'activations' }]);
  });

  it('stay what they are while the same comes again, so that a selection stays', async () => {
    const panel = new TensorPanel(part => Promise.resolve(told(part, row('large', 2048))));
    panel.open(MOMENTS, [1]);
    await settled();
    const line = panel.node.querySelector('tbody tr');
    await panel.look();
    expect(panel.node.querySelector('tbody tr')).toBe(line);
  });

  it('are closed by Escape, and an answer that comes later is none', async () => {
    const answers: ((found: Tensors) => void)[] = [];
    const panel = new TensorPanel(() => new Promise(found => answers.push(found)));
    let closed = 0;
    panel.onClose = () => void closed++;
    panel.open(MOMENTS, [1]);
    panel.open({ ...MOMENTS, rank: 0 }, [0, 1]);
    answers[1]!(told({ ...MOMENTS, rank: 0 }, row('newer', 1)));
    answers[0]!(told(MOMENTS, row('older', 1)));
    await settled();
    expect(text(panel, 'tbody th')).toBe('newer');
    panel.node.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape' }));
    expect([closed, panel.isOpen]).toEqual([1, false]);
  });

  it('that cannot be known say why', async () => {
    const panel = new TensorPanel(() => Promise.reject(new Error('the folder is gone')));
    panel.open(MOMENTS, [1]);
    await settled();
    expect(text(panel, 'p')).toBe('the folder is gone');
  });

  it.each(['<img src=x onerror=alert(1)>', '</td><script>alert(1)</script>', '<b>x</b>', '&lt;i&gt;', '__proto__'])(
    '%s is a name as any other',
    async name => {
      const hostile = { ...row(name, 1), unit: name, state: name, shape: name, owner: name, form: name };
      const panel = new TensorPanel(part => Promise.resolve({ ...told(part, hostile), text: name }));
      panel.open(MOMENTS, [1]);
      await settled();
      expect(text(panel, 'tbody th')).toBe(name);
      expect(panel.node.querySelectorAll('img, script, b, i')).toHaveLength(0);
    }
  );
});

describe('a kernel that is asked for tensors', () => {
  const handlers = new Map<string, (...given: never[]) => void>();
  const sent: unknown[] = [];
  const model: Model = {
    get: () => ({}),
    on: (name, callback) => void handlers.set(name, callback),
    off: name => void handlers.delete(name),
    send: content => void sent.push(content),
    widget_manager: { get_model: () => Promise.resolve(model) }
  };

  beforeEach(() => jest.useFakeTimers());
  afterEach(() => jest.useRealTimers());

  it('that has a problem, or ends, keeps nobody waiting', async () => {
    const source = new ModelSource(model, 'v');
    const problems: string[] = [];
    source.start({ onMessage: () => {}, onProblem: text => void problems.push(text) });
    const tell = (text: string) =>
      (handlers.get('msg:custom') as (message: unknown) => void)({ type: 'Problem', version: 1, text });
    const refused = expect(source.tensors(MOMENTS)).rejects.toThrow('the run cannot be read');
    tell('');
    tell('the run cannot be read');
    await refused;
    expect([problems, jest.getTimerCount()]).toEqual([['', 'the run cannot be read'], 1]); // The sign of life stays.
    const ended = expect(source.tensors(MOMENTS)).rejects.toThrow('was restarted');
    handlers.get('comm_live_update')!();
    await ended;
    source.close();
    expect(jest.getTimerCount()).toBe(0);
  });

  it('is answered by the segment, and one that is busy is told of', async () => {
    const source = new ModelSource(model, 'v');
    source.start({ onMessage: () => {}, onProblem: () => {} });
    const found = source.tensors(MOMENTS);
    const never = source.tensors({ ...MOMENTS, rank: 2 });
    expect(sent[0]).toEqual({ type: 'Segment', version: 1, ...MOMENTS });
    (handlers.get('msg:custom') as (message: unknown) => void)(told(MOMENTS, row('a', 1)));
    expect((await found).rows[0]!.name).toBe('a');
    const failed = expect(never).rejects.toThrow('The kernel does not answer');
    jest.advanceTimersByTime(10_000);
    await failed;
    handlers.get('comm_live_update')!();
    await expect(source.tensors(MOMENTS)).rejects.toThrow('was restarted');
    source.close();
  });
});

describe('smoothing', () => {
  it('is told in steps, and asked for as a share', () => {
    expect([0, 0.9, 0.999].map(smoothingText)).toEqual(['off', '10 steps', '1,000 steps']);
    const controls = new Controls();
    const asked: number[] = [];
    controls.onSmooth = share => void asked.push(share);
    const slider = controls.node.querySelector('input')!;
    expect(slider.getAttribute('aria-valuetext')).toBe('10 steps');
    slider.value = '0';
    slider.dispatchEvent(new Event('input'));
    expect([asked, slider.getAttribute('aria-valuetext')]).toEqual([[0], 'off']);
  });
});

it('a table leaves the gap between two hosts out', () => {
  const layout = { title: { text: 'm' }, xaxis: { type: 'category' }, yaxis: {}, shapes: [], annotations: [] };
  const data = [{ name: 'a', x: ['0<br>left', ' ', '1<br>right'], y: new Float32Array([1, 0, 2]) }];
  const table = tableOf({ data, layout });
  expect([table.columns, table.rows]).toEqual([
    ['', '0, left', '1, right'],
    [
      ['a', '1', '2'],
      ['sum', '1', '2']
    ]
  ]);
});
