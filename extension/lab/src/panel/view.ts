// The side panel: clusters and runs as the server tells of them, drawn once a frame where something has changed.

import type { Api, Printer } from '../api';
import { ProblemError } from '../api';
import type { ClusterControls } from '../clusterControls';
import type { Controls } from '../controls';
import { element, Rows, setAttributes, setShown, setText } from '../dom';
import { icon } from '../icons';
import type { Listening, Live, News, Wish } from '../live';
import type { Cluster, RunSummary } from '../messages';
import { Poll } from '../poll';
import { fits, isLive } from '../states';
import type { ClusterItem } from './clusters';
import { ClusterRow } from './clusters';
import type { Comparison } from './comparing';
import { CompareBar, comparisonOf, MOST_COMPARED } from './comparing';
import { freshId, ProblemText, Roving } from './rows';
import type { RunItem } from './runs';
import { RunRow } from './runs';
import { StartForm } from './startForm';

/** What outlives a reload. */
export interface PanelState {
  chosen: string;
  /** Ids of clusters that are open. */
  open: string[];
  /** Names of sections that are folded. */
  folded: string[];
  search: string;
  /** Ids of runs to be compared. */
  ticked: string[];
}

export const EMPTY_STATE: PanelState = { chosen: '', open: [], folded: [], search: '', ticked: [] };

/** What the panel leaves to its surroundings. */
export interface Surroundings {
  output(of: Printer, name: string): void;
  dashboard(run: RunSummary): void;
  compare(runs: Comparison): void;
  save(state: PanelState): void;
}

const SPARK_POINTS = 120;
/** Live runs whose loss is drawn without being chosen. */
const MOST_DRAWN = 4;
const CLUSTER_SECONDS = 2;

export class PanelView {
  readonly node = element('div', { class: 'sl-panel' });

  constructor(
    private readonly api: Pick<Api, 'cluster' | 'run' | 'places' | 'start'>,
    private readonly live: Live,
    private readonly controls: Controls,
    private readonly clusterControls: ClusterControls,
    private readonly around: Surroundings,
    state: Partial<PanelState> = {}
  ) {
    this.state = { ...EMPTY_STATE, ...state };
    this.listening = live.listen(this.heard);
    controls.changed = this.later;
    clusterControls.changed = this.later;
    this.search.value = this.state.search;
    this.search.addEventListener('input', this.searched);
    const label = element('label', { class: 'sl-unseen' }, 'Search runs');
    label.htmlFor = this.search.id = freshId();
    const field = element('div', { class: 'sl-search' }, label, this.search);
    const start = new StartForm(api, () => (live.clusters ?? []).map(cluster => cluster.name));
    const clusters = this.section('Clusters', this.clusterCount, this.noClusters, this.clusterList);
    clusters.firstElementChild?.append(start.button);
    clusters.firstElementChild?.after(start.node);
    this.node.append(
      this.trouble.node,
      this.settings.node,
      clusters,
      this.section('Runs', this.runCount, field, this.found, this.compare.node, this.noRuns, this.runList)
    );
  }

  dispose(): void {
    this.visible = false;
    this.listening.dispose();
    this.poll.dispose();
  }

  /** What is not seen asks for nothing. */
  set visible(visible: boolean) {
    this.seen = visible;
    this.want();
    if (visible) this.later();
  }

  /** To the row that is next, or else to what is typed into; folded sections and closed forms have none. */
  focus(): void {
    const there = this.node.querySelectorAll<HTMLElement>('.sl-row[tabindex="0"], input');
    [...there].find(each => !each.closest('[hidden]'))?.focus();
  }

  /** In the place of what was remembered: settings and state may come after the panel does. */
  restore(state: Partial<PanelState>): void {
    this.state = { ...this.state, ...state };
    this.search.value = this.state.search;
    for (const [name, button] of this.folds) this.showFold(name, button);
    this.want();
    this.later();
  }

  /** Said above everything; '' is nothing. */
  set settingsProblem(text: string) {
    this.settings.update(text);
  }

  /** The run that commands are about: the chosen one, as far as it is known. */
  get chosen(): string {
    return this.state.chosen;
  }

  /** The ticked runs, as far as there are two of them. */
  get comparison(): Comparison | null {
    return comparisonOf(this.ticked);
  }

  private get ticked(): RunSummary[] {
    const known = new Map(this.live.runs?.map(run => [run.id, run]));
    return this.state.ticked.flatMap(id => known.get(id) ?? []);
  }

  choose(id: string): void {
    this.remember({ chosen: id });
  }

  /** Draws now; `later` draws with the next frame. */
  render(): void {
    this.want();
    const { runs, clusters } = this.live;
    this.trouble.update(this.live.trouble || this.live.listsProblem);
    this.clusterControls.keep(new Set(clusters?.map(cluster => cluster.id)));
    setText(this.clusterCount, clusters ? String(clusters.length) : '');
    setText(this.runCount, runs ? String(runs.length) : '');
    this.clusterRows.update(
      (clusters ?? []).map(cluster => ({
        cluster,
        open: this.state.open.includes(cluster.id),
        detail: this.details.get(cluster.id),
        problem: this.problems.get(cluster.id) ?? '',
        note: this.clusterControls.note(cluster.id)
      }))
    );
    const now = Date.now() / 1000;
    const fitting = (runs ?? []).filter(run => fits(run, this.state.search));
    // The newest first, as they come; before them those that are on.
    const shown = [...fitting.filter(isLive), ...fitting.filter(run => !isLive(run))];
    this.runRows.update(shown.map(run => this.itemOf(run, now)));
    this.compare.update(this.ticked);
    setShown(this.noClusters, clusters?.length === 0);
    setShown(this.noRuns, runs !== null && shown.length === 0);
    setText(this.noRuns, runs?.length ? NOTHING_FOUND : NO_RUNS);
    setText(this.found, this.state.search && runs ? `${shown.length} of ${runs.length} runs` : '');
    this.clusterKeys.settle();
    this.runKeys.settle();
  }

  private itemOf(listed: RunSummary, now: number): RunItem {
    const data = this.live.run(listed.id);
    const chosen = listed.id === this.state.chosen;
    // The list is a second old at times; what is watched is newer.
    const watched = this.watched.has(listed.id);
    const status = watched ? data?.status : null;
    const run = status ? { ...status, cluster: listed.cluster } : listed;
    const problem = chosen ? (this.problems.get(listed.id) ?? '') : '';
    if (chosen) this.needConfig(listed.id);
    const config = this.configs.get(listed.id);
    const showsMemory = !(this.state.open.includes(run.cluster) && !this.state.folded.includes('Clusters'));
    const ticked = this.state.ticked.includes(run.id) || (this.ticked.length >= MOST_COMPARED && 'full');
    const note = this.controls.note(listed.id);
    return { run, chosen, ticked, watched, data, config, note, problem, showsMemory, now };
  }

  private readonly heard = (_: News) => this.later();

  private readonly later = () => {
    if (this.frame || !this.seen) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (this.seen) this.render();
    });
  };

  /** The lists while the panel is seen; of runs that compute and of the chosen one, what is drawn of them. */
  private want(): void {
    const wish: Wish = this.seen ? { lists: true, runs: this.watches() } : {};
    this.poll.on = this.seen && this.state.open.length > 0 && !this.state.folded.includes('Clusters');
    const text = JSON.stringify(wish);
    if (text === this.wished) return;
    this.wished = text;
    this.watched = new Set(wish.runs?.map(watch => watch.id));
    this.listening.want(wish);
  }

  private watches(): NonNullable<Wish['runs']> {
    if (this.state.folded.includes('Runs')) return [];
    const { chosen } = this.state;
    const known = this.live.runs?.filter(run => fits(run, this.state.search)) ?? [];
    const drawn = known.filter(run => isLive(run) && run.id !== chosen).slice(0, MOST_DRAWN);
    const watches: NonNullable<Wish['runs']>[number][] = drawn.map(({ id }) => ({
      id,
      parts: ['status', 'records'],
      points: SPARK_POINTS
    }));
    const there = known.find(run => run.id === chosen);
    if (!there || there.state === 'damaged') return watches;
    return [{ id: chosen, parts: ['status', 'records', 'events', 'memory'], points: SPARK_POINTS }, ...watches];
  }

  private readonly lookAtClusters = async (): Promise<void> => {
    const running = this.live.clusters?.filter(cluster => cluster.state === 'running');
    const known = new Set(running?.map(cluster => cluster.id));
    const look = async (id: string) => {
      try {
        this.details.set(id, await this.api.cluster(id));
        this.problems.delete(id);
      } catch (error) {
        this.problems.set(id, textOf(error));
      }
    };
    await Promise.all(this.state.open.filter(id => known.has(id)).map(look));
    this.later();
  };

  /** A run's configuration does not change its stage: events do. So it is asked for once. */
  private needConfig(id: string): void {
    if (this.asked.has(id)) return;
    this.asked.add(id);
    this.api.run(id).then(
      ({ config }) => {
        this.configs.set(id, config);
        this.problems.delete(id);
        this.later();
      },
      (error: unknown) => {
        this.problems.set(id, textOf(error));
        this.later();
      }
    );
  }

  private readonly searched = () => {
    this.remember({ search: this.search.value });
  };

  private remember(changes: Partial<PanelState>): void {
    this.state = { ...this.state, ...changes };
    this.around.save(this.state);
    this.want();
    this.later();
  }

  private section(name: string, count: HTMLElement, ...content: HTMLElement[]): HTMLElement {
    const body = element('div', { class: 'sl-section-body', id: freshId() }, ...content);
    const button = element('button', { class: 'sl-fold', type: 'button', 'aria-controls': body.id }, icon('fold'));
    button.append(element('span', {}, name), count);
    button.addEventListener('click', () => {
      const folded = this.state.folded.includes(name);
      this.remember({
        folded: folded ? this.state.folded.filter(each => each !== name) : [...this.state.folded, name]
      });
      this.showFold(name, button);
    });
    const heading = element('h3', { class: 'sl-heading' }, button);
    const section = element('section', { class: 'sl-section', 'aria-label': name }, heading, body);
    this.folds.set(name, button);
    this.showFold(name, button, body);
    return section;
  }

  private showFold(name: string, button: HTMLElement, body = button.closest('section')?.lastElementChild): void {
    const folded = this.state.folded.includes(name);
    setAttributes(button, {
      'aria-expanded': String(!folded),
      title: `${folded ? 'Show' : 'Hide'} ${name.toLowerCase()}`
    });
    if (body instanceof HTMLElement) setShown(body, !folded);
  }

  private state: PanelState;
  private seen = false;
  private frame = 0;
  private wished = '';
  private watched = new Set<string>();
  private readonly asked = new Set<string>();
  private readonly details = new Map<string, Cluster>();
  private readonly configs = new Map<string, Record<string, unknown>>();
  /** By the id of a cluster or a run. */
  private readonly problems = new Map<string, string>();
  private readonly folds = new Map<string, HTMLElement>();
  private readonly trouble = new ProblemText();
  private readonly settings = new ProblemText();
  private readonly clusterCount = element('span', { class: 'sl-count' });
  private readonly runCount = element('span', { class: 'sl-count' });
  private readonly clusterList = element('ul', { class: 'sl-plain', 'aria-label': 'Clusters' });
  private readonly runList = element('ul', { class: 'sl-plain', 'aria-label': 'Runs' });
  private readonly compare = new CompareBar(
    () => {
      if (this.comparison) this.around.compare(this.comparison);
    },
    () => this.remember({ ticked: [] })
  );
  private readonly noClusters = element('p', { class: 'sl-empty', hidden: true }, NO_CLUSTERS);
  private readonly noRuns = element('p', { class: 'sl-empty', hidden: true });
  private readonly found = element('p', { class: 'sl-unseen', role: 'status' });
  private readonly search = element('input', { type: 'search', class: 'sl-input', placeholder: 'Search runs' });
  private readonly clusterKeys = new Roving(this.clusterList);
  private readonly runKeys = new Roving(this.runList);
  private readonly poll = new Poll(this.lookAtClusters, CLUSTER_SECONDS);
  private readonly listening: Listening;

  private readonly clusterRows = new Rows<ClusterItem>(
    this.clusterList,
    item => item.cluster.id,
    item =>
      new ClusterRow(item.cluster.id, {
        toggle: id => {
          const { open } = this.state;
          this.remember({ open: open.includes(id) ? open.filter(each => each !== id) : [...open, id] });
        },
        output: (of, name) => this.around.output(of, name),
        cancel: cluster => this.clusterControls.cancel(cluster),
        stop: cluster => this.clusterControls.stop(cluster),
        remove: cluster => this.clusterControls.remove(cluster)
      })
  );

  private readonly runRows = new Rows<RunItem>(
    this.runList,
    item => item.run.id,
    item =>
      new RunRow(item.run.id, {
        choose: id => this.remember({ chosen: this.state.chosen === id ? '' : id }),
        tick: (id, on) => {
          const others = this.state.ticked.filter(each => each !== id);
          this.remember({ ticked: on ? [...others, id] : others });
        },
        give: (id, word) => this.controls.give(id, word),
        stop: run => void this.controls.stop(run),
        refused: (id, why) => this.controls.say(id, why, true),
        output: run => this.around.output({ kind: 'runs', id: run.id }, run.name),
        dashboard: run => this.around.dashboard(run)
      })
  );
}

const NO_CLUSTERS = 'No cluster runs. + starts one, and so does %speedlab start in a notebook.';
const NO_RUNS = 'No runs yet. Those that a cluster trains are listed here, and those in ./runs of this server.';
const NOTHING_FOUND = 'No run fits the search.';

const textOf = (error: unknown): string => (error instanceof ProblemError ? error.message : String(error));
