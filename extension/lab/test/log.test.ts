import type { Api } from '../src/api';
import { ProblemError } from '../src/api';
import { LineFolder } from '../src/log/fold';
import { OutputView } from '../src/log/view';
import type { Output, RankLines } from '../src/messages';
import { HOSTILE } from './samples';

const of = (rank: number, ...lines: string[]): RankLines => ({ rank, lines, skipped: false });
const texts = (found: readonly { ranks: number[]; text: string }[]) =>
  found.map(line => `${line.ranks.join()} ${line.text}`);

test('equal lines of all ranks are one at once; others wait for their like for one answer', () => {
  const folder = new LineFolder();
  expect(texts(folder.feed([of(0, 'a', 'b'), of(1, 'a')]))).toEqual(['0,1 a']);
  expect(folder.waits).toBe(true);
  expect(texts(folder.feed([of(1, 'b')]))).toEqual(['0,1 b']);
  expect(texts(folder.feed([of(0, 'mine')]))).toEqual([]);
  expect(texts(folder.feed([]))).toEqual(['0 mine']);
});

test('a line that another rank has further down waits for it; the order of a rank is kept', () => {
  const folder = new LineFolder();
  folder.feed([of(0, 'x', 'end'), of(1, 'y', 'x', 'end')]);
  expect(texts(folder.feed([]))).toEqual(['1 y', '0,1 x', '0,1 end']);
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
  answers: Output[] = [];
  asked: (string | undefined)[] = [];
  problem = '';
  readonly api: Pick<Api, 'output'> = {
    output: (_, wanted) => {
      this.asked.push(wanted?.after);
      if (this.problem) return Promise.reject(new ProblemError(this.problem, 410));
      const cursor = `c${this.asked.length}`;
      return Promise.resolve(this.answers.shift() ?? { type: 'Output', version: 1, ranks: [], cursor });
    }
  };
  readonly view: OutputView;

  constructor(most = 2000) {
    this.view = new OutputView(this.api, { kind: 'runs', id: 'a1' }, { most, folds: true });
    document.body.replaceChildren(this.view.node);
  }

  async print(...ranks: RankLines[]): Promise<void> {
    this.answers.push({ type: 'Output', version: 1, ranks, cursor: `c${this.asked.length + 1}` });
    await this.view.look();
    await this.view.look();
  }

  lines = () =>
    [...document.querySelectorAll<HTMLElement>('.sl-line')].filter(line => !line.hidden).map(line => line.textContent);
}

let page: Page;
afterEach(() => page?.view.dispose());

test('lines with their ranks, asked for from where the last answer ended, the oldest gone first', async () => {
  page = new Page(3);
  await page.print(of(0, 'step 1', 'mine'), of(1, 'step 1'));
  await page.print(of(0, 'step 2'), of(1, 'step 2'));
  await page.print(of(0, 'last'), of(1, 'last'));
  expect(page.lines()).toEqual(['rank 0mine', 'ranks 0–1step 2', 'ranks 0–1last']);
  expect(page.asked.slice(0, 3)).toEqual(['', 'c1', 'c2']);
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

test('what cannot be read says why, and what was read stays', async () => {
  page = new Page();
  await page.print(of(0, 'a'));
  page.problem = 'the cluster of run was stopped';
  await page.view.look();
  expect(document.querySelector('.sl-problem:not([hidden])')?.textContent).toBe('the cluster of run was stopped');
  expect(page.lines()).toEqual(['rank 0a']);
});

test('it asks while it is seen, not when it is hidden or paused', async () => {
  jest.useFakeTimers();
  try {
    page = new Page();
    page.view.visible = true;
    await jest.advanceTimersByTimeAsync(2500);
    expect(page.asked).toHaveLength(3);
    [...document.querySelectorAll('button')].find(button => button.textContent === 'Pause')!.click();
    await jest.advanceTimersByTimeAsync(5000);
    page.view.visible = false;
    expect(page.asked).toHaveLength(3);
  } finally {
    jest.useRealTimers();
  }
});
