// Memory of ranks as thin stacked bars, place by place, with the numbers in words beside them.

import { element, setAttributes, setText } from '../dom';
import { bytesText, categoryText, ranksText } from '../format';
import type { RankMemory } from '../messages';
import { CATEGORIES, PLACES } from '../messages';

export const MOST_BARS = 16;
/** As in the panel's pictures: a capacity that is farther away is only told, or bars would be too thin to see. */
const CAPACITY_IN_SIGHT = 2.5;

export interface Bar {
  label: string;
  /** Bytes by category, in their order. */
  held: readonly number[];
  capacity: number;
}

export interface PlaceBars {
  place: string;
  bars: Bar[];
  /** Bytes of a whole bar's width. */
  scale: number;
}

const sum = (values: readonly number[]): number => values.reduce((total, value) => total + value, 0);

/** What is to be drawn: places that hold something; of many ranks the lowest, the median and the highest. */
export function placesOf(memory: readonly RankMemory[]): PlaceBars[] {
  const found: PlaceBars[] = [];
  PLACES.forEach((place, index) => {
    const bars = memory.map(rank => ({
      label: ranksText([rank.rank]),
      // A remainder may be negative for a moment; a bar may not.
      held: (rank.held[index] ?? []).map(bytes => Math.max(0, bytes)),
      capacity: rank.capacity[index] ?? 0
    }));
    const highest = Math.max(0, ...bars.map(bar => sum(bar.held)));
    if (highest === 0) return;
    const capacity = Math.max(...bars.map(bar => bar.capacity));
    const scale = capacity > 0 && capacity <= CAPACITY_IN_SIGHT * highest ? Math.max(capacity, highest) : highest;
    found.push({ place, bars: bars.length > MOST_BARS ? spread(bars, ofBar) : bars, scale });
  });
  return found;
}

const ofBar = (bar: Bar): number => sum(bar.held);

/** Of very many the lowest, the median and the highest, with the word for it in the label. */
export function spread<Each extends { label: string }>(bars: readonly Each[], size: (bar: Each) => number): Each[] {
  const ordered = [...bars].sort((a, b) => size(a) - size(b));
  const named = [
    ['lowest', 0],
    ['median', Math.floor(ordered.length / 2)],
    ['highest', ordered.length - 1]
  ] as const;
  return named.flatMap(([word, index]) => {
    const bar = ordered[index];
    return bar ? [{ ...bar, label: `${word}, ${bar.label}` }] : [];
  });
}

const ofCapacity = (bar: Bar): string =>
  `${bytesText(sum(bar.held))}${bar.capacity ? ` of ${bytesText(bar.capacity)}` : ''}`;

/** All of a bar in words. */
export function barText(place: string, bar: Bar): string {
  const parts = bar.held.flatMap((bytes, index) =>
    bytes ? [`${categoryText(CATEGORIES[index] ?? '')} ${bytesText(bytes)}`] : []
  );
  return `${bar.label}, ${place}: ${ofCapacity(bar)}; ${parts.join(', ')}`;
}

export class MemoryView {
  readonly node = element('div', { class: 'sl-memory' });

  update(memory: readonly RankMemory[]): void {
    const text = JSON.stringify(memory);
    if (text === this.shown) return;
    this.shown = text;
    const places = placesOf(memory);
    this.node.replaceChildren(...places.map(placeNode), ...(places.length ? [legend(memory)] : []));
  }

  private shown = '';
}

function placeNode({ place, bars, scale }: PlaceBars): HTMLElement {
  const rows = bars.map(bar => {
    const track = element('div', { class: 'sl-bar', role: 'img' });
    const filled = bar.held.flatMap((bytes, index) => {
      if (!bytes) return [];
      const category = CATEGORIES[index] ?? '';
      const part = element('span', {
        class: `sl-part sl-${category}`,
        title: `${categoryText(category)} ${bytesText(bytes)}`
      });
      part.style.width = `${(100 * bytes) / scale}%`;
      return [part];
    });
    setAttributes(track, { 'aria-label': barText(place, bar), title: barText(place, bar) });
    track.append(...filled);
    if (bar.capacity && bar.capacity <= scale) {
      const line = element('span', { class: 'sl-capacity', title: `capacity ${bytesText(bar.capacity)}` });
      line.style.left = `${(100 * bar.capacity) / scale}%`;
      track.append(line);
    }
    const label = element('span', { class: 'sl-bar-label' }, bar.label);
    return element('li', {}, label, track, element('span', { class: 'sl-bar-sum' }, ofCapacity(bar)));
  });
  const heading = element('h4', {}, `Memory · ${place}`);
  return element('div', { class: 'sl-place' }, heading, element('ul', { class: 'sl-plain' }, ...rows));
}

function legend(memory: readonly RankMemory[]): HTMLElement {
  const used = CATEGORIES.filter((_, index) => memory.some(rank => rank.held.some(held => (held[index] ?? 0) > 0)));
  const entries = used.map(category => {
    const entry = element('li', {}, element('span', { class: `sl-swatch sl-${category}`, 'aria-hidden': 'true' }));
    const name = element('span');
    setText(name, categoryText(category));
    entry.append(name);
    return entry;
  });
  return element('ul', { class: 'sl-plain sl-legend', 'aria-label': 'colours of the bars' }, ...entries);
}
