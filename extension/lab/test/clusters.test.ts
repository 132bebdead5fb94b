import type { Api } from '../src/api';
import { ProblemError } from '../src/api';
import type { Question } from '../src/clusterControls';
import { ClusterControls, stopClusterText } from '../src/clusterControls';
import type { Live } from '../src/live';
import type { Places, Rank, RunSummary, Start } from '../src/messages';
import type { ClusterItem } from '../src/panel/clusters';
import { ClusterRow } from '../src/panel/clusters';
import { freshName, StartForm } from '../src/panel/startForm';
import { usesOf, UtilisationView } from '../src/panel/utilisation';
import { HOSTILE, makeCluster, makeEvent, makeRun } from './samples';

const turn = () => new Promise(resolve => setTimeout(resolve));
afterEach(() => document.body.replaceChildren());

function makeRank(rank: number, changes: Partial<Rank> = {}): Rank {
  const device = { kind: 'cpu', name: 'cpu 0', capacity_bytes: 0, free_bytes: 0, cores: 2 };
  const values = { rank, state: 'busy', pid: 1, rss_bytes: 1, host: '', device, cpu_share: null, gpu_share: null };
  return { ...values, ...changes };
}

describe('how busy ranks are', () => {
  test('a GPU’s share where it is told, else that of the cores; what nobody measures is not drawn', () => {
    const cuda = { kind: 'cuda', name: 'H200', capacity_bytes: 0, free_bytes: 0, cores: 8 };
    expect(
      usesOf([
        makeRank(0, { cpu_share: 0.634 }),
        makeRank(1, { device: cuda, cpu_share: 0.1, gpu_share: 0.87 }),
        makeRank(2),
        makeRank(3, { cpu_share: 1.4 })
      ])
    ).toEqual([
      { label: 'rank 0', kind: 'CPU', share: 0.634, text: 'CPU 63 % of 2 cores' },
      { label: 'rank 1', kind: 'GPU', share: 0.87, text: 'GPU 87 %, CPU 10 % of 8 cores' },
      { label: 'rank 3', kind: 'CPU', share: 1, text: 'CPU 100 % of 2 cores' }
    ]);
  });

  test('bars with their words; of very many the lowest, the median and the highest; none of a server of before', () => {
    const view = new UtilisationView();
    view.update(Array.from({ length: 20 }, (_, rank) => makeRank(rank, { gpu_share: rank / 20 })));
    expect([...view.node.querySelectorAll('.sl-bar')].map(bar => bar.getAttribute('aria-label'))).toEqual([
      'lowest, rank 0: GPU 0 %',
      'median, rank 10: GPU 50 %',
      'highest, rank 19: GPU 95 %'
    ]);
    expect(view.node.querySelector<HTMLElement>('.sl-place:first-child li:last-child .sl-use')?.style.width).toBe(
      '95%'
    );
    const older: Partial<Rank> = makeRank(0);
    delete older.cpu_share;
    delete older.gpu_share;
    view.update([older as Rank]);
    expect(view.node.childElementCount).toBe(0);
  });
});

test('of several hosts each has a line of its own above its ranks, as text', () => {
  const row = new ClusterRow('a', {} as never);
  document.body.append(row.node);
  const ranks = [makeRank(0, { host: 'gpu-07' }), makeRank(1, { host: HOSTILE[0]! }), makeRank(2, { host: 'gpu-07' })];
  const detail = { ranks, memory: [], problem: '' } as unknown as ClusterItem['detail'];
  const lines = () =>
    [...row.node.querySelectorAll('tbody tr')].map(line => [...line.children].map(at => at.textContent));
  row.update({ cluster: makeCluster(), open: true, detail, problem: '', note: undefined });
  expect(lines()).toEqual([
    ['gpu-07'],
    ['0, 2', 'cpu', 'busy', '1\u00a0B'],
    [HOSTILE[0]],
    ['1', 'cpu', 'busy', '1\u00a0B']
  ]);
  expect(row.node.querySelectorAll('tbody:last-of-type th[scope=rowgroup][colspan="4"]')).toHaveLength(1);
  detail!.ranks = ranks.slice(0, 1);
  row.update({ cluster: makeCluster(), open: true, detail, problem: '', note: undefined });
  expect(lines()).toEqual([['0', 'cpu', 'busy', '1\u00a0B']]);
});

class Told {
  readonly asked: string[] = [];
  readonly questions: Question[] = [];
  answer = true;
  refusal = '';
  runs: RunSummary[] = [];
  readonly api: Pick<Api, 'tellCluster' | 'events'> = {
    tellCluster: (id, word) => {
      this.asked.push(`${word} ${id}`);
      if (this.refusal) return Promise.reject(new ProblemError(this.refusal, 409));
      return Promise.resolve({ type: 'ClusterWordGiven', version: 1, cluster: id, word });
    },
    events: () => {
      const events = [makeEvent('checkpoint', 100, { text: 'step-100' })];
      return Promise.resolve({ type: 'Events', version: 1, run: 'a1', keep: 0, total: 1, events });
    }
  };
  readonly controls = new ClusterControls(this.api, { runs: this.runs } as unknown as Live, question => {
    this.questions.push(question);
    return Promise.resolve(this.answer);
  });
}

describe('words for a cluster', () => {
  test('stop says what would be lost, and does nothing where the person keeps it', async () => {
    const told = new Told();
    told.runs.push(makeRun(), makeRun({ id: 'b2', cluster: 'other' }));
    told.answer = false;
    await told.controls.stop(makeCluster());
    expect(told.questions[0]?.body).toBe(
      'Its 4 engines end, with what cells have put there; records and checkpoints of runs stay. quickstart loses what ' +
        'came after its newest checkpoint, step-100: 31 steps are lost.'
    );
    expect(told.asked).toEqual([]);
    told.answer = true;
    await told.controls.stop(makeCluster());
    expect([told.asked, told.controls.note('default')?.text]).toEqual([['stop default'], '']);
  });

  test('what is lost of runs without a checkpoint, with one of the last step, and of none', () => {
    const lines = (step: number, saved?: number) =>
      stopClusterText(makeCluster({ engines: 1 }), [
        { run: makeRun({ step }), events: saved === undefined ? [] : [makeEvent('checkpoint', saved, { text: 'it' })] }
      ]);
    expect(lines(1)).toContain('quickstart has no checkpoint: its 1 step is lost.');
    expect(lines(0)).toContain('quickstart has no checkpoint: nothing is lost.');
    expect(lines(7, 7)).toContain('quickstart loses nothing: its newest checkpoint, it, has every step.');
    expect(stopClusterText(makeCluster(), [])).toContain('It holds no run.');
  });

  test('a start is given up with its place in the queue; refused, the note says why until the cluster is gone', async () => {
    const told = new Told();
    told.refusal = 'it runs; stop it instead';
    const waits = makeCluster({
      id: 'slurm-81',
      state: 'starting',
      text: 'job 81 is queued, 3rd of 7 in a100 (Priority)'
    });
    await told.controls.cancel(waits);
    expect(told.questions[0]?.body).toContain('Now: job 81 is queued, 3rd of 7 in a100 (Priority).');
    expect(told.controls.note('slurm-81')).toEqual({ text: 'it runs; stop it instead', bad: true });
    told.controls.keep(new Set(['default']));
    expect(told.controls.note('slurm-81')).toBeUndefined();
  });

  test('what failed to start is removed without a question, what has ended with one', async () => {
    const told = new Told();
    await told.controls.remove(makeCluster({ state: 'failed' }));
    expect(told.questions).toHaveLength(0);
    await told.controls.remove(makeCluster({ state: 'ended' }));
    expect([told.questions.length, told.asked.length]).toEqual([1, 2]);
  });
});

test.each([
  ['starting', ['Cancel']],
  ['running', ['Output', 'Stop']],
  ['failed', ['Remove']],
  ['ended', ['Remove']],
  ['damaged', ['Remove']],
  ['elsewhere', []]
] as const)('a cluster that is %s can be told %j', (state, words) => {
  const acts = { toggle: jest.fn(), output: jest.fn(), cancel: jest.fn(), stop: jest.fn(), remove: jest.fn() };
  const row = new ClusterRow('default', acts);
  const cluster = makeCluster({ state, text: HOSTILE[0]! });
  const item: ClusterItem = {
    cluster,
    open: true,
    detail: undefined,
    problem: '',
    note: { text: HOSTILE[1]!, bad: true }
  };
  row.update(item);
  const shown = [...row.node.querySelectorAll<HTMLElement>('.sl-action')].filter(each => !each.closest('[hidden]'));
  expect(shown.map(each => each.textContent)).toEqual(words);
  expect(row.node.querySelectorAll('img, script')).toHaveLength(0);
  expect(row.node.querySelector('.sl-bad')?.textContent).toBe(HOSTILE[1]);
  shown.at(-1)?.click();
  const called = { Cancel: acts.cancel, Stop: acts.stop, Remove: acts.remove }[shown.at(-1)?.textContent ?? ''];
  expect(called?.mock.calls ?? []).toEqual(called ? [[cluster]] : []);
});

class Form {
  readonly asked: Start[] = [];
  refusal = '';
  places: Places = { type: 'Places', version: 1, places: [{ id: 'server', name: 'own' }], problem: '' };
  readonly form = new StartForm(
    {
      places: () => Promise.resolve(this.places),
      start: start => {
        this.asked.push(start);
        if (this.refusal) return Promise.reject(new ProblemError(this.refusal, 409));
        return Promise.resolve({ type: 'ClusterWordGiven', version: 1, cluster: start.name, word: 'start' });
      }
    },
    () => ['default']
  );

  constructor() {
    document.body.append(this.form.button, this.form.node);
  }

  async open(): Promise<void> {
    this.form.button.click();
    await turn();
  }

  input = (label: string) =>
    [...document.querySelectorAll('label')]
      .find(each => each.textContent === label)!
      .parentElement!.querySelector('input, select') as HTMLInputElement;
  start = () => [...document.querySelectorAll('button')].find(each => each.textContent === 'Start')!;
  problem = () => document.querySelector('.sl-problem:not([hidden])')?.textContent ?? '';
}

describe('the form of a new cluster', () => {
  test('starts what it says, with the Enter key too, and closes; Escape closes it', async () => {
    const page = new Form();
    await page.open();
    expect([page.input('Name').value, document.activeElement]).toEqual(['default-2', page.input('Name')]);
    expect(page.input('Python').closest('[hidden]')).not.toBeNull(); // One is no choice.
    page.input('Engines').value = '2';
    page.input('Engines').dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter', bubbles: true }));
    await turn();
    expect(page.asked).toEqual([{ name: 'default-2', place: 'server', engines: 2, hosts: '' }]);
    expect([page.form.node.hidden, document.activeElement]).toEqual([true, page.form.button]);
    await page.open();
    page.input('Name').dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', bubbles: true }));
    expect(page.form.node.hidden).toBe(true);
  });

  test('what is refused is said in place, and can be mended; several Pythons are a choice', async () => {
    const page = new Form();
    page.places.places.push({ id: 'kernel-big', name: HOSTILE[0]! });
    page.refusal = 'there is a cluster';
    await page.open();
    page.input('Engines').value = '-1';
    page.start().click();
    expect([page.asked, page.problem()]).toEqual([[], expect.stringContaining('a whole number from 1 on')]);
    page.input('Engines').value = '';
    page.input('Python').value = 'kernel-big';
    page.input('Hosts').value = ' gpu-1:8, gpu-2 ';
    page.start().click();
    await turn();
    expect(page.asked).toEqual([{ name: 'default-2', place: 'kernel-big', engines: null, hosts: 'gpu-1:8, gpu-2' }]);
    expect([page.problem(), page.form.node.hidden]).toEqual(['there is a cluster', false]);
    expect(page.start().getAttribute('aria-disabled')).toBeNull();
    expect(document.querySelectorAll('img')).toHaveLength(0);
  });

  test('where nothing can start engines it says why, and starts nothing', async () => {
    const page = new Form();
    page.places = { type: 'Places', version: 1, places: [], problem: 'no Python of this server can' };
    await page.open();
    expect(page.problem()).toBe('no Python of this server can');
    page.start().click();
    expect([page.asked, page.start().title]).toEqual([[], 'Start its engines: no Python of this server can']);
  });

  test('the first name that there is not', () => {
    expect([freshName([]), freshName(['default', 'default-2'])]).toEqual(['default', 'default-3']);
  });
});
