// The clusters of a person: state and engines in a row; opened, its ranks with device, state and memory.

import type { Printer } from '../api';
import type { Row } from '../dom';
import type { Note } from '../controls';
import { element, setAttributes, setShown, setText } from '../dom';
import { bytesText, ranksText } from '../format';
import type { Cluster, ClusterSummary, Rank } from '../messages';
import { clusterFacts, clusterLook } from '../states';
import { MemoryView } from './memory';
import { Action, ProblemText, RowHead } from './rows';
import { UtilisationView } from './utilisation';

/** What a cluster's row shows: `detail` and `problem` of one that is open. */
export interface ClusterItem {
  cluster: ClusterSummary;
  open: boolean;
  detail: Cluster | undefined;
  problem: string;
  note: Note | undefined;
}

export interface ClusterActs {
  toggle(id: string): void;
  output(of: Printer, name: string): void;
  cancel(cluster: ClusterSummary): unknown;
  stop(cluster: ClusterSummary): unknown;
  remove(cluster: ClusterSummary): unknown;
}

export class ClusterRow implements Row<ClusterItem> {
  readonly node = element('li', { class: 'sl-item' });

  constructor(id: string, acts: ClusterActs) {
    this.head = new RowHead(this.body, () => acts.toggle(id));
    const withIt = (act: (cluster: ClusterSummary) => unknown) => () => {
      if (this.cluster) act(this.cluster);
    };
    const open = withIt(({ name }) => acts.output({ kind: 'clusters', id }, name));
    const output = new Action('lines', 'Output', 'Show what its ranks have printed', open);
    const stop = new Action(
      'stop',
      'Stop',
      'End its engines; asks first',
      withIt(each => acts.stop(each))
    );
    this.cancel = new Action(
      'cross',
      'Cancel',
      'Give up starting it; asks first',
      withIt(each => acts.cancel(each))
    );
    this.remove = new Action(
      'cross',
      'Remove',
      'Remove what is left of it',
      withIt(each => acts.remove(each))
    );
    const actions = element('div', { class: 'sl-actions' }, output.node, stop.node);
    this.body.append(this.ranks, this.utilisation.node, this.memory.node, actions);
    this.around.append(this.cancel.node, this.remove.node);
    this.node.append(this.head.node, this.problem.node, this.around, this.note, this.body);
  }

  update({ cluster, open, detail, problem, note }: ClusterItem): void {
    this.cluster = cluster;
    const runs = cluster.state === 'running';
    const told = cluster.state === 'damaged' || cluster.state === 'ended' || cluster.state === 'failed';
    setShown(this.cancel.node, cluster.state === 'starting');
    setShown(this.remove.node, told);
    setShown(this.around, cluster.state === 'starting' || told);
    setText(this.note, note?.text ?? '');
    setAttributes(this.note, { class: `sl-hint sl-beside${note?.bad ? ' sl-bad' : ''}` });
    this.head.update(cluster.name, clusterLook(cluster), clusterFacts(told ? { ...cluster, text: '' } : cluster), open);
    this.problem.update((told && cluster.text) || (open && (problem || detail?.problem)) || '');
    setShown(this.body, open && runs);
    if (!open || !runs) return;
    const ranks = detail?.ranks ?? [];
    setShown(this.ranks, ranks.length > 0);
    const text = JSON.stringify(ranks);
    if (text !== this.shown) {
      this.shown = text;
      this.ranks.replaceChildren(ranksCaption(cluster), ranksHead(), ...ranksBodies(ranks));
    }
    this.utilisation.update(ranks);
    this.memory.update(detail?.memory ?? []);
  }

  private cluster: ClusterSummary | undefined;
  private shown = '';
  private readonly body = element('div', { class: 'sl-body' });
  private readonly ranks = element('table', { class: 'sl-ranks' });
  private readonly around = element('div', { class: 'sl-actions sl-beside' });
  private readonly note = element('p', { class: 'sl-hint sl-beside', role: 'status' });
  private readonly cancel: Action;
  private readonly remove: Action;
  private readonly utilisation = new UtilisationView();
  private readonly memory = new MemoryView();
  private readonly problem = new ProblemText();
  private readonly head: RowHead;
}

/** Ranks of one kind in one state on one host. */
interface Alike {
  ranks: Rank[];
  /** '' where there is only one. */
  host: string;
  device: string;
  state: string;
}

/** Ranks of one kind as one line: 'ranks 0–3'. */
export function alike(ranks: readonly Rank[]): Alike[] {
  const groups = new Map<string, Alike>();
  const several = new Set(ranks.map(rank => rank.host)).size > 1;
  for (const rank of ranks) {
    const device = rank.device?.kind ?? 'no device known';
    const host = several ? rank.host : '';
    const key = [host, device, rank.state].join('\n');
    const group = groups.get(key) ?? { ranks: [], host, device, state: rank.state };
    group.ranks.push(rank);
    groups.set(key, group);
  }
  return [...groups.values()];
}

const NO_BREAK = '\u00a0';

/** '643–650 MiB', '0.9 GiB–1.2 GiB', or one number where both read alike; a line breaks after the dash alone. */
function spanText(low: number, high: number): string {
  const [least, most] = [low, high].map(bytes => bytesText(bytes).replace(' ', NO_BREAK)) as [string, string];
  const [number, unit] = least.split(NO_BREAK);
  if (least === most) return most;
  return unit === most.split(NO_BREAK)[1] ? `${number}–${most}` : `${least}–${most}`;
}

function ranksCaption(cluster: ClusterSummary): HTMLElement {
  return element('caption', { class: 'sl-unseen' }, `Ranks of cluster ${cluster.name}`);
}

function ranksHead(): HTMLElement {
  const names = ['Ranks', 'Device', 'State', 'Process'];
  return element('thead', {}, element('tr', {}, ...names.map(name => element('th', { scope: 'col' }, name))));
}

/** A body for each host, whose name has a line of its own: beside numbers it would be broken into letters. */
function ranksBodies(ranks: readonly Rank[]): HTMLElement[] {
  const groups = alike(ranks);
  return [...new Set(groups.map(group => group.host))].map(host => {
    const rows = groups.filter(group => group.host === host).map(ranksRow);
    const name = element('th', { class: 'sl-host', scope: 'rowgroup', colspan: '4', title: host }, host);
    return element('tbody', {}, host !== '' && element('tr', {}, name), ...rows);
  });
}

function ranksRow({ ranks, device, state }: Alike): HTMLElement {
  const sizes = ranks.map(rank => rank.rss_bytes).filter(bytes => bytes > 0);
  const size = sizes.length === 0 ? '–' : spanText(Math.min(...sizes), Math.max(...sizes));
  const names = [...new Set(ranks.map(rank => rank.device?.name ?? ''))].filter(Boolean).join(', ');
  const pids = ranks.map(rank => rank.pid).join(', ');
  return element(
    'tr',
    {},
    element('th', { scope: 'row' }, ranksText(ranks.map(rank => rank.rank)).replace(/^ranks? /, '')),
    element('td', { title: names || null }, device),
    element('td', { class: `sl-state-${state.replace(/\W/g, '')}` }, state),
    element('td', { title: `memory of the process; pid ${pids}` }, size)
  );
}
