// How busy ranks are: a thin bar each, of the GPU where NVML tells it, else of the cores that the rank is bound to.

import { element } from '../dom';
import { ranksText } from '../format';
import type { Rank } from '../messages';
import { MOST_BARS, spread } from './memory';

export interface Use {
  label: string;
  kind: 'GPU' | 'CPU';
  /** 0 to 1. */
  share: number;
  /** All that is known of it. */
  text: string;
}

/** What is to be drawn; nothing of ranks that nobody measures. */
export function usesOf(ranks: readonly Rank[]): Use[] {
  // A server that was not started again after an update tells nothing of it.
  return ranks.flatMap(({ rank, device, cpu_share = null, gpu_share = null }: Partial<Rank> & Pick<Rank, 'rank'>) => {
    const cores = device?.cores ?? 0;
    const cpu = cpu_share === null ? '' : `CPU ${percent(cpu_share)} of ${cores} core${cores === 1 ? '' : 's'}`;
    const gpu = gpu_share === null ? '' : `GPU ${percent(gpu_share)}`;
    const share = gpu_share ?? cpu_share;
    if (share === null) return [];
    const text = [gpu, cpu].filter(Boolean).join(', ');
    return [{ label: ranksText([rank]), kind: gpu_share === null ? 'CPU' : 'GPU', share: clamped(share), text }];
  });
}

export class UtilisationView {
  readonly node = element('div', { class: 'sl-memory' });

  update(ranks: readonly Rank[]): void {
    const uses = usesOf(ranks);
    const text = JSON.stringify(uses);
    if (text === this.shown) return;
    this.shown = text;
    const kinds = [...new Set(uses.map(use => use.kind))];
    this.node.replaceChildren(
      ...kinds.map(kind =>
        kindNode(
          kind,
          uses.filter(use => use.kind === kind)
        )
      )
    );
  }

  private shown = '';
}

function kindNode(kind: Use['kind'], uses: readonly Use[]): HTMLElement {
  const shown = uses.length > MOST_BARS ? spread(uses, use => use.share) : uses;
  const rows = shown.map(({ label, share, text }) => {
    const told = `${label}: ${text}`;
    const filled = element('span', { class: 'sl-part sl-use' });
    filled.style.width = `${100 * share}%`;
    const track = element('div', { class: 'sl-bar', role: 'img', 'aria-label': told, title: told }, filled);
    const name = element('span', { class: 'sl-bar-label' }, label);
    return element('li', {}, name, track, element('span', { class: 'sl-bar-sum' }, percent(share)));
  });
  const heading = element('h4', {}, `Utilisation · ${kind}`);
  return element('div', { class: 'sl-place' }, heading, element('ul', { class: 'sl-plain' }, ...rows));
}

const clamped = (share: number): number => Math.min(1, Math.max(0, share));
const percent = (share: number): string => `${Math.round(100 * clamped(share))} %`;
