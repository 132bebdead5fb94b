import { LineFolder } from '../src/log/fold';
import { OutputView } from '../src/log/view';
import { Live } from '../src/live';
import type { OutputNews, RankLines } from '../src/messages';
import { HOSTILE, makeTick, Wire } from './samples';

const of = (rank: number, ...lines: string[]): RankLines => ({ rank, lines, skipped: false });
const texts = (found: readonly { ranks: number[]; text: string }[]) =>
  found.map(line => `${line.ranks.join()} ${line.text}`);

const aged = (folder: LineFolder) => [...folder.age(), ...folder.age()];

test('equal lines of all ranks are one at once; others wait for their like until they have grown older twice', () => {
  const folder = new LineFolder();
  expect(texts(folder.feed([of(0, 'a', 'b'), of(1, 'a')]))).toEqual(['0,1 a']);
  expect(folder.waits).toBe(true);
  expect(texts(folder.feed([of(1, 'b')]))).toEqual(['0,1 b']);
  expect(folder.waits).toBe(false);
  expect(texts(folder.feed([of(0, 'mine')]))).toEqual([]);
  expect(texts(folder.age())).toEqual([]);
  expect(texts(folder.feed([of(1, 'other')]))).toEqual([]);
  expect(texts(folder.age())).toEqual(['0 mine']);
});

test('a line that another rank has further down waits for it; the order of a rank is kept', () => {
  const folder = new LineFolder();
  folder.feed([of(0, 'x', 'end'), of(1, 'y', 'x', 'end')]);
  expect(texts(aged(folder))).toEqual(['1 y', '0,1 x', '0,1 end']);
});

test('not folded, lines come as they are, and what was left out is said', () => {
  const folder = new LineFolder();
  expect(texts(folder.feed([{ ...of(0, 'a'), skipped: true }, of(1, 'a')], false))).toEqual([
    '0 … lines before these are not shown',
    '0 a',
    '1 a'
  ]);
});

test('a terminal’s colours and characters that are not seen are left out', () => {
  const folder = new LineFolder();
  const [line] = folder.feed([of(0, '\u001b[31mred\u001b[0m \u202eturned\u0007\ttab')], false);
  expect(line?.text).toBe('red turned\ttab');
});

test('ten thousand lines of eight ranks are folded in less than a second', () => {
  const folder = new LineFolder();
  const lines = Array.from({ length: 10_000 }, (_, index) => `line ${index}`);
  const ranks = Array.from({ length: 8 }, (_, rank) => of(rank, ...(rank % 2 ? lines : [...lines, 'odd'])));
  const began = performance.now();
  expect(folder.feed(ranks)).toHaveLength(10_000);
  expect(performance.now() - began).toBeLessThan(1000);
});

class Page {
  readonly live = new Live({ url: 'ws://here', make: Wire.make });
  readonly view: OutputView;
  cursor = 0;

  constructor(most = 2000) {
    this.view = new OutputView(this.live, { kind: 'runs', id: 'a1' }, { most, folds: true });
    document.body.replaceChildren(this.view.node);
    this.view.visible = true;
  }

  /** What the server sends; then so much time passes that no line waits any more. */
  async print(...ranks: RankLines[]): Promise<void> {
    await this.hear({ output: { type: 'Output', version: 1, ranks, cursor: `c${(this.cursor += 1)}` } });
    await jest.advanceTimersByTimeAsync(1000);
  }

  async hear(news: Partial<OutputNews>): Promise<void> {
    await jest.advanceTimersByTimeAsync(0);
    if (this.wire.readyState === 0) this.wire.open();
    this.wire.hear(makeTick({ outputs: [{ kind: 'runs', id: 'a1', output: null, problem: null, ...news }] }));
  }

  get wire(): Wire {
    return Wire.made.at(-1)!;
  }

  button = (word: string) => [...document.querySelectorAll('button')].find(button => button.textContent === word)!;
  lines = () =>
    [...document.querySelectorAll<HTMLElement>('.sl-line')].filter(line => !line.hidden).map(line => line.textContent);

  dispose(): void {
    this.view.dispose();
    this.live.dispose();
  }
}

describe('the view', () => {
  let page: Page;
  beforeEach(() => {
    Wire.made = [];
    jest.useFakeTimers();
  });
  afterEach(() => {
    page.dispose();
    jest.useRealTimers();
  });

  test('lines with their ranks as they come, the oldest gone first', async () => {
    page = new Page(3);
    await page.print(of(0, 'step 1', 'mine'), of(1, 'step 1'));
    await page.print(of(0, 'step 2'), of(1, 'step 2'));
    await page.print(of(0, 'last'), of(1, 'last'));
    expect(page.lines()).toEqual(['rank 0mine', 'ranks 0–1step 2', 'ranks 0–1last']);
    expect(page.wire.sent).toHaveLength(1);
  });

  test('folded otherwise, what is here is shown anew, and nothing is asked for', async () => {
    page = new Page();
    await page.print(of(0, 'a', 'b'), of(1, 'a'));
    page.button('Fold').click();
    expect(page.lines()).toEqual(['rank 0a', 'rank 0b', 'rank 1a']);
    page.button('Fold').click();
    await jest.advanceTimersByTimeAsync(1000);
    expect(page.lines()).toEqual(['ranks 0–1a', 'rank 0b']);
    expect(page.wire.sent).toHaveLength(1);
  });

  test('filtered by rank and by text, and how many fit is said', async () => {
    page = new Page();
    await page.print(of(0, 'Loss 3', 'other'), of(1, 'Loss 4'));
    const [rank, match] = [document.querySelector('select')!, document.querySelector('input')!];
    match.value = 'loss';
    match.dispatchEvent(new Event('input'));
    expect(page.lines()).toEqual(['rank 0Loss 3', 'rank 1Loss 4']);
    rank.value = '1';
    rank.dispatchEvent(new Event('change'));
    expect(page.lines()).toEqual(['rank 1Loss 4']);
    expect(document.querySelector('.sl-count')?.textContent).toBe('1 of 3 lines');
  });

  test('what ranks print is text', async () => {
    page = new Page();
    await page.print(of(0, ...HOSTILE));
    expect(document.querySelectorAll('.sl-lines img, .sl-lines script, .sl-lines h1')).toHaveLength(0);
    expect(page.lines()[0]).toBe(`rank 0${HOSTILE[0]}`);
  });

  test('what cannot be read says why until it can be, and what was read stays', async () => {
    page = new Page();
    await page.print(of(0, 'a'));
    await page.hear({ problem: 'the cluster of run was stopped' });
    expect(document.querySelector('.sl-problem:not([hidden])')?.textContent).toBe('the cluster of run was stopped');
    expect(page.lines()).toEqual(['rank 0a']);
    await page.hear({ problem: '' });
    expect(document.querySelector('.sl-problem:not([hidden])')).toBeNull();
  });

  test('nothing is sent to it while it is hidden or paused; then it goes on from where it was', async () => {
    page = new Page();
    await page.print(of(0, 'a'));
    page.button('Pause').click();
    await jest.advanceTimersByTimeAsync(0);
    expect(page.wire.readyState).toBe(3);
    page.view.visible = false;
    page.button('Pause').click();
    await jest.advanceTimersByTimeAsync(0);
    expect(Wire.made).toHaveLength(1);
    page.view.visible = true;
    await page.print(of(0, 'b'));
    expect(page.wire.sent).toMatchObject([{ outputs: [{ kind: 'runs', id: 'a1', after: 'c1' }] }]);
    expect(page.lines()).toEqual(['rank 0a', 'rank 0b']);
  });
});
