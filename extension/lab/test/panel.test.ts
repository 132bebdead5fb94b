import type { Api } from '../src/api';
import { ProblemError } from '../src/api';
import { ClusterControls } from '../src/clusterControls';
import { Controls } from '../src/controls';
import type { StopChoice } from '../src/controls';
import { Live } from '../src/live';
import type { Cluster, Tick } from '../src/messages';
import { alike } from '../src/panel/clusters';
import { barText, placesOf } from '../src/panel/memory';
import { pathOf } from '../src/panel/sparkline';
import type { PanelState } from '../src/panel/view';
import { PanelView } from '../src/panel/view';
import { HOSTILE, makeCluster, makeEvent, makeMemory, makeNews, makeRecords, makeRun, makeTick, Wire } from './samples';

const GIB = 2 ** 30;
const turn = () => new Promise(resolve => setTimeout(resolve));

type Answers = Pick<Api, 'cluster' | 'run' | 'give' | 'events' | 'places' | 'start' | 'tellCluster'>;

class Page {
  readonly asked: string[] = [];
  readonly saved: PanelState[] = [];
  readonly opened: string[] = [];
  choice: StopChoice = 'no';
  stopText = '';
  refusal = '';
  readonly detail: Cluster = {
    ...{ type: 'Cluster', version: 1, cluster: makeCluster(), runs: [], problem: '' },
    ranks: [0, 1, 2].map(rank => ({
      ...{ rank, state: rank < 2 ? 'idle' : 'dead', pid: 100 + rank, rss_bytes: (300 + rank) * 2 ** 20, host: 'here' },
      ...{ cpu_share: null, gpu_share: null },
      device: { kind: 'cpu', name: 'a CPU', capacity_bytes: 0, free_bytes: 0, cores: 1 }
    })),
    memory: [makeMemory(0, [GIB, GIB / 2], 16 * GIB)]
  };
  readonly api: Answers = {
    cluster: () => (this.refusal ? Promise.reject(new ProblemError(this.refusal, 504)) : Promise.resolve(this.detail)),
    run: () =>
      Promise.resolve({
        ...{ type: 'Run', version: 1, run: makeRun(), ranks: [0] },
        config: { zero: { stage: 1 } },
        memory: []
      }),
    places: () => Promise.reject(new ProblemError('not here', 404)),
    start: () => Promise.reject(new ProblemError('not here', 404)),
    tellCluster: () => Promise.reject(new ProblemError('not here', 404)),
    events: () => Promise.resolve({ type: 'Events', version: 1, run: 'a1', keep: 0, total: 0, events: [] }),
    give: (run, word) => {
      this.asked.push(`${word.word} ${JSON.stringify(word.arguments ?? {})}`);
      if (this.refusal) return Promise.reject(new ProblemError(this.refusal, 409));
      return Promise.resolve({ type: 'WordGiven', version: 1, run, word: word.word, number: this.asked.length });
    }
  };
  readonly live = new Live({ url: 'ws://here', make: Wire.make });
  readonly controls = new Controls(this.api, this.live, (_, text) => {
    this.stopText = text;
    return Promise.resolve(this.choice);
  });
  readonly view: PanelView;

  constructor(state: Partial<PanelState> = {}) {
    this.view = new PanelView(
      this.api,
      this.live,
      this.controls,
      new ClusterControls(this.api, this.live, () => Promise.resolve(false)),
      {
        output: (of, name) => this.opened.push(`output of ${of.kind} ${of.id} ${name}`),
        dashboard: run => this.opened.push(`dashboard of ${run.name}`),
        compare: ({ id, name }) => this.opened.push(`comparison of ${id}: ${name}`),
        save: saved => this.saved.push(saved)
      },
      state
    );
    document.body.append(this.view.node);
    this.view.visible = true;
  }

  get wire(): Wire {
    return Wire.made.at(-1)!;
  }

  async hear(changes: Partial<Tick>): Promise<void> {
    await turn();
    if (this.wire.readyState === 0) this.wire.open();
    this.wire.hear(makeTick(changes));
    this.view.render();
    await turn();
    this.view.render();
  }

  rows = () => [...document.querySelectorAll<HTMLElement>('.sl-row')];
  row = (name: string) => this.rows().find(row => row.querySelector('.sl-name')?.textContent === name)!;
  action = (word: string) =>
    [...document.querySelectorAll<HTMLButtonElement>('.sl-action')].find(
      button => button.textContent === word && !button.closest('[hidden]')
    )!;
  text = (of: string) => [...document.querySelectorAll(`${of}:not([hidden])`)].map(each => each.textContent);

  dispose(): void {
    this.view.dispose();
    this.controls.dispose();
    this.live.dispose();
    document.body.replaceChildren();
  }
}

let page: Page;
const open = (state?: Partial<PanelState>) => (page = new Page(state));

beforeEach(() => {
  Wire.made = [];
});
afterEach(() => page.dispose());

test('clusters and runs with their facts; those that are on come first', async () => {
  open();
  const past = makeRun({ id: 'b2', name: 'before', state: 'finished' });
  await page.hear({ all_clusters: [makeCluster()], all_runs: [past, makeRun()] });
  expect(page.rows().map(row => row.title.replaceAll('\u00a0', ' '))).toEqual([
    'default · running · 4 engines',
    'quickstart · running · step 131/2,000 · 41.2 k tokens/s · 3 min left',
    expect.stringMatching(/^before · finished · loss 5.912 · \d/)
  ]);
  expect(document.querySelector('[role=progressbar]')?.getAttribute('aria-valuenow')).toBe('6');
  expect(page.text('.sl-count')).toEqual(['1', '2']);
});

test('nothing that is hostile becomes markup', async () => {
  open({ chosen: '0', open: ['c0'] });
  const runs = HOSTILE.map((name, index) => makeRun({ id: String(index), name, text: name, problem: name }));
  const clusters = HOSTILE.map((name, index) => makeCluster({ id: `c${index}`, name, text: name, state: 'damaged' }));
  await page.hear({ all_runs: runs, all_clusters: clusters, runs: [makeNews({ id: '0', problem: HOSTILE[0]! })] });
  expect(page.rows()).toHaveLength(2 * HOSTILE.length);
  expect(document.querySelectorAll('img, script, h1, svg[onload]')).toHaveLength(0);
  expect(page.row(HOSTILE[0]!).querySelector('.sl-name')?.textContent).toBe(HOSTILE[0]);
  expect('harmed' in window).toBe(false);
});

test('search keeps what fits, says how many, and is remembered', async () => {
  open();
  await page.hear({ all_runs: [makeRun(), makeRun({ id: 'b2', name: 'other', state: 'failed' })], all_clusters: [] });
  const field = document.querySelector<HTMLInputElement>('input[type=search]')!;
  field.value = 'fail';
  field.dispatchEvent(new Event('input'));
  page.view.render();
  expect(page.rows().map(row => row.querySelector('.sl-name')?.textContent)).toEqual(['other']);
  expect(page.text('.sl-unseen[role=status]')).toEqual(['1 of 2 runs']);
  expect(page.saved.at(-1)?.search).toBe('fail');
  field.value = 'nothing like it';
  field.dispatchEvent(new Event('input'));
  page.view.render();
  expect(page.text('.sl-empty').at(-1)).toBe('No run fits the search.');
});

test('the chosen run is watched whole, others that are on for their line only, hidden ones not at all', async () => {
  open({ chosen: 'a1' });
  await page.hear({ all_runs: [makeRun(), makeRun({ id: 'b2' }), makeRun({ id: 'c3', state: 'stopped' })] });
  expect(page.wire.sent.at(-1)).toMatchObject({
    lists: true,
    runs: [
      { id: 'a1', parts: ['events', 'memory', 'records', 'status'] },
      { id: 'b2', parts: ['records', 'status'] }
    ]
  });
  page.view.visible = false;
  await turn();
  expect(page.wire.readyState).toBe(3);
});

test('a word is given, and its answer stands beside the controls', async () => {
  open({ chosen: 'a1' });
  await page.hear({ all_runs: [makeRun()] });
  page.action('Pause').focus();
  page.action('Pause').click();
  await turn();
  expect(page.asked).toEqual(['pause {}']);
  const paused = makeEvent('paused', 132, { command: 1, text: 'after step 132' });
  const events = { type: 'Events', version: 1, run: 'a1', keep: 0, total: 1, events: [paused] } as const;
  const status = makeRun({ state: 'paused', step: 132 });
  await page.hear({ runs: [makeNews({ events: { ...events, events: [paused] }, status })] });
  expect(page.text('.sl-note')).toEqual(['paused after step 132']);
  expect(page.row('quickstart').textContent).toContain('paused');
  expect(page.action('Resume').title).toBe('Go on from where it stands');
  // Who works by keys goes on from where the other button was.
  expect(document.activeElement).toBe(page.action('Resume'));
});

test('another stage is asked for with a button; refused, the stage that is stands there again', async () => {
  open({ chosen: 'a1' });
  await page.hear({ all_runs: [makeRun()] });
  const stages = document.querySelector<HTMLSelectElement>('.sl-zero select')!;
  expect(stages.value).toBe('1');
  expect(page.action('Change')).toBeUndefined();
  stages.value = '3';
  stages.dispatchEvent(new Event('change'));
  expect(page.asked).toEqual([]);
  page.refusal = 'stage 3: no room';
  page.action('Change').focus();
  page.action('Change').click();
  await turn();
  page.view.render();
  expect(document.activeElement).toBe(stages);
  expect(page.asked).toEqual(['reshape {"zero":3}']);
  expect(stages.value).toBe('1');
  expect([page.text('.sl-note')[0], document.querySelector('.sl-note')?.className]).toEqual([
    'stage 3: no room',
    'sl-note sl-bad'
  ]);
});

test.each([
  ['no', []],
  ['stop', ['stop {}']],
  ['save and stop', ['save {}']]
] as const)('stop asks, says what would be lost, and does what was answered: %s', async (choice, asked) => {
  open({ chosen: 'a1' });
  page.choice = choice;
  await page.hear({ all_runs: [makeRun()] });
  page.action('Stop').click();
  await turn();
  expect(page.stopText).toContain('all 131 steps are lost');
  // What is to be saved first is stopped when it is saved, not before.
  expect(page.asked).toEqual(asked);
});

test('what cannot be used says why, and does nothing', async () => {
  open({ chosen: 'a1' });
  await page.hear({ all_runs: [makeRun({ cluster: '' })] });
  expect(page.action('Pause').getAttribute('aria-disabled')).toBe('true');
  page.action('Pause').click();
  page.view.render();
  expect([page.asked, page.text('.sl-note')]).toEqual([[], ['no cluster that runs here holds it']]);
});

test('an open cluster shows its ranks and their memory; one that vanished says so', async () => {
  open({ open: ['default'] });
  await page.hear({ all_clusters: [makeCluster()] });
  const cells = [...document.querySelectorAll('tbody tr')].map(row => [...row.children].map(cell => cell.textContent));
  expect(cells).toEqual([]);
  page.view.visible = false;
  page.view.visible = true;
  await page.hear({ all_clusters: [makeCluster()] });
  const shown = [...document.querySelectorAll('tbody tr')].map(row => [...row.children].map(cell => cell.textContent));
  expect(shown).toEqual([
    ['0–1', 'cpu', 'idle', '300–301\u00a0MiB'],
    ['2', 'cpu', 'dead', '302\u00a0MiB']
  ]);
  expect(document.querySelector('.sl-bar')?.getAttribute('aria-label')).toBe(
    'rank 0, device: 1.5 GiB of 16.0 GiB; parameters 1.0 GiB, gradients 512 MiB'
  );
  await page.hear({ all_clusters: [makeCluster({ state: 'ended', text: 'its controller has ended' })] });
  expect(page.text('.sl-problem')).toEqual(['its controller has ended']);
  await page.hear({ all_clusters: [] });
  expect(page.text('.sl-empty')[0]).toContain('No cluster runs');
});

test('a lost connection is told above everything', async () => {
  open();
  await page.hear({ all_runs: [makeRun()] });
  page.wire.onclose?.({ code: 1006 });
  page.view.render();
  expect(page.text('.sl-problem')[0]).toContain('trying again');
  expect(page.row('quickstart')).toBeDefined();
});

test('one stop of the Tab key for each list; arrows go from row to row, and a row keeps its focus when others move', async () => {
  open();
  const others = ['b2', 'c3'].map(id => makeRun({ id, name: id, state: 'finished' }));
  await page.hear({ all_runs: [makeRun(), ...others] });
  expect(page.rows().map(row => row.tabIndex)).toEqual([0, -1, -1]);
  page.row('quickstart').focus();
  page.row('quickstart').dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowDown', bubbles: true }));
  expect(document.activeElement).toBe(page.row('b2'));
  expect(page.rows().map(row => row.tabIndex)).toEqual([-1, 0, -1]);
  await page.hear({ all_runs: [makeRun(), others[1]!, others[0]!] });
  expect(document.activeElement).toBe(page.row('b2'));
  page.row('b2').dispatchEvent(new KeyboardEvent('keydown', { key: 'Home', bubbles: true }));
  expect(document.activeElement).toBe(page.row('quickstart'));
});

test('who opens the panel by a key is in its first row that is seen, or in the search', async () => {
  open();
  const at = () => document.activeElement?.textContent || document.activeElement?.getAttribute('placeholder');
  await page.hear({ all_clusters: [makeCluster()], all_runs: [makeRun()] });
  page.view.focus();
  expect(document.activeElement).toBe(page.row('default'));
  page.view.restore({ folded: ['Clusters'] });
  page.view.focus();
  expect(at()).toBe('Search runs');
});

test('a folded section shows and asks for nothing of its own', async () => {
  open();
  await page.hear({ all_runs: [makeRun()] });
  const fold = [...document.querySelectorAll<HTMLElement>('.sl-fold')].find(each =>
    each.textContent?.includes('Runs')
  )!;
  fold.click();
  expect(fold.getAttribute('aria-expanded')).toBe('false');
  expect(page.saved.at(-1)?.folded).toEqual(['Runs']);
  await turn();
  expect(page.wire.sent.at(-1)).toMatchObject({ lists: true, runs: [] });
});

test('the loss is drawn, and told in words', async () => {
  open();
  await page.hear({ all_runs: [makeRun()], runs: [makeNews({ records: makeRecords(1, 4), status: makeRun() })] });
  expect(document.querySelector('.sl-spark')?.getAttribute('aria-label')).toBe(
    'smoothed loss 1.000 at step 1, 0.2500 at step 4'
  );
  expect(
    pathOf([
      [0, 2],
      [10, 1]
    ])
  ).toBe('M2.0 2.0L238.0 30.0');
});

test('what stands below a line that is awaited does not move when it comes', async () => {
  const page = open();
  await page.hear({ all_runs: [makeRun(), makeRun({ id: 'runs/b', name: 'b', state: 'finished' })] });
  const [first, second] = document.querySelectorAll<HTMLElement>('.sl-spark');
  const awaited = [first?.hidden, first?.getAttribute('aria-hidden'), first?.textContent];
  expect([awaited, second?.hidden]).toEqual([[false, 'true', '\u00a0'], true]);
  await page.hear({ runs: [makeNews({ records: makeRecords(1, 4), status: makeRun() })] });
  expect([first?.hidden, first?.getAttribute('aria-hidden')]).toEqual([false, null]);
  page.view.choose('runs/b');
  page.view.render();
  expect(second?.hidden).toBe(false);
  const over = makeRun({ id: 'runs/b', name: 'b', state: 'finished' });
  await page.hear({ runs: [makeNews({ id: 'runs/b', records: makeRecords(1, 1), status: over })] });
  expect(second?.hidden).toBe(true);
});

test('of many ranks the lowest, the median and the highest; negative remainders are no bars', () => {
  open();
  const many = Array.from({ length: 20 }, (_, rank) => makeMemory(rank, [(rank + 1) * GIB], 30 * GIB));
  const [device] = placesOf(many);
  expect(device?.bars.map(bar => bar.label)).toEqual(['lowest, rank 0', 'median, rank 10', 'highest, rank 19']);
  expect([device?.scale, placesOf([makeMemory(0, [0])])]).toEqual([30 * GIB, []]);
  const [place] = placesOf([makeMemory(3, [GIB, 0, 0, 0, 0, 0, -GIB])]);
  expect(barText('device', place!.bars[0]!)).toBe('rank 3, device: 1.0 GiB; parameters 1.0 GiB');
});

test('ranks alike are one line, told apart by host where there are several', () => {
  open();
  const ranks = page.detail.ranks.map((rank, index) => ({ ...rank, state: 'idle', host: index ? 'b' : 'a' }));
  expect(alike(ranks).map(group => [group.host, group.device, group.ranks.length])).toEqual([
    ['a', 'cpu', 1],
    ['b', 'cpu', 2]
  ]);
  expect(alike(ranks.map(rank => ({ ...rank, host: 'b' }))).map(group => [group.host, group.ranks.length])).toEqual([
    ['', 3]
  ]);
});

test('runs are ticked and compared; ticks are remembered, and so many can be ticked as are compared', async () => {
  open();
  const all_runs = Array.from({ length: 10 }, (_, number) => makeRun({ id: `r${number}`, name: `run ${number}` }));
  await page.hear({ all_runs });
  const tick = (name: string) => page.row(name).parentElement!.querySelector<HTMLInputElement>('.sl-tick')!;
  const click = (name: string) => {
    tick(name).click();
    page.view.render();
  };
  expect(page.text('.sl-compare')).toEqual([]);
  click('run 3');
  expect(tick('run 3').getAttribute('aria-label')).toBe('Compare run 3');
  expect(page.text('.sl-compare-told')).toEqual(['1 run ticked; tick another to compare']);
  expect(page.action('Compare').getAttribute('aria-disabled')).toBe('true');
  page.action('Compare').click();
  expect([page.opened, page.text('.sl-compare-told')]).toEqual([[], ['tick two runs or more']]);
  click('run 1');
  page.action('Compare').click();
  expect(page.opened).toEqual(['comparison of r3,r1: 2 runs: run 3 · run 1']);
  expect(page.saved.at(-1)?.ticked).toEqual(['r3', 'r1']);
  // The tick is reached from its row alone: a list is one stop of the Tab key.
  page.row('run 3').focus();
  expect([tick('run 3').tabIndex, tick('run 1').tabIndex]).toEqual([0, -1]);
  for (const number of [0, 2, 4, 5, 6, 7]) click(`run ${number}`);
  expect([tick('run 8').disabled, tick('run 7').disabled]).toEqual([true, false]);
  expect(tick('run 8').title).toContain('8 runs are ticked, the most');
  click('run 7');
  expect(tick('run 8').disabled).toBe(false);
  page.action('Untick').click();
  page.view.render();
  expect([page.text('.sl-compare'), tick('run 1').checked]).toEqual([[], false]);
});
