import { bytesText, categoryText, countText } from '../format';
import { CATEGORIES, PLACES } from '../messages';
import type { Segment, TensorRow, Tensors } from '../messages';
import { element, OWN_KEYS } from './dom';

/** A segment of the memory bars. */
export type Part = Pick<Segment, 'rank' | 'category' | 'place'>;

/** What `layout.meta` of a figure with bars of memory says of them. */
export interface BarsMeta {
  /** Rank and place of each bar. */
  bars: [number | null, string][];
  /** All ranks there are. */
  ranks: number[];
}

const COLUMNS = ['tensor', 'bytes', 'unit', 'state', 'shape', 'elements here', 'owner', 'kept as'] as const;

/** The segment that a person has clicked: of which bar, and of which trace; null for a gap or another figure. */
export function partAt(meta: unknown, bar: number, category: unknown): Part | null {
  const [rank, place] = (meta as BarsMeta | undefined)?.bars[bar] ?? [null, ''];
  if (rank === null || typeof category !== 'string') return null;
  return { rank, category, place };
}

/** The tensors in a segment. It is chosen by a click, or by its own lists. */
export class TensorPanel {
  readonly node: HTMLElement;
  onClose: () => void = () => {};

  /** `find`: what is in a segment; rejected with an Error whose message says why that is not known. */
  constructor(private readonly find: (part: Part) => Promise<Tensors>) {
    const label = 'Close the list of tensors';
    const close = element('button', { type: 'button', 'aria-label': label, title: 'Close', ...OWN_KEYS }, '×');
    close.addEventListener('click', () => this.close());
    const choice = element('span', { class: 'sl-choice' });
    for (const [name, list] of Object.entries(this.lists)) {
      choice.append(element('label', {}, `${name} `, list));
      list.addEventListener('change', () => void this.look());
    }
    choose(this.lists.holds, CATEGORIES, categoryText);
    choose(this.lists.on, PLACES);
    this.node = element('section', { class: 'sl-tensors', 'aria-label': 'tensors in a segment of memory' });
    this.node.append(element('div', { class: 'sl-tensors-head' }, this.title, choice, close), this.note, this.rows);
    this.node.hidden = true;
    this.rows.append(this.table);
    this.node.addEventListener('keydown', event => {
      if (event.key !== 'Escape') return;
      event.stopPropagation();
      this.close();
    });
  }

  get isOpen(): boolean {
    return !this.node.hidden;
  }

  /** Shows a segment; `ranks` are all that may be chosen. */
  open(part: Part, ranks: number[]): void {
    choose(this.lists.rank, ranks.includes(part.rank) ? ranks.map(String) : [String(part.rank), ...ranks.map(String)]);
    this.lists.rank.value = String(part.rank);
    this.lists.holds.value = part.category;
    this.lists.on.value = part.place;
    this.node.hidden = false;
    void this.look();
  }

  focus(): void {
    this.lists.holds.focus();
  }

  close(): void {
    if (!this.isOpen) return;
    this.node.hidden = true;
    this.asked++;
    this.onClose();
  }

  /** Asks again: a run may hold other tensors now. */
  async look(): Promise<void> {
    if (!this.isOpen) return;
    const asked = ++this.asked;
    const { rank, holds, on } = this.lists;
    try {
      const found = await this.find({ rank: Number(rank.value), category: holds.value, place: on.value });
      if (asked === this.asked) this.show(found);
    } catch (error) {
      if (asked === this.asked) this.tell(error instanceof Error ? error.message : String(error));
    }
  }

  private show(told: Tensors): void {
    const { rank, category, place, count, rows, step } = told;
    const size = told.measured_bytes ?? told.tensor_bytes;
    const tensors = count ? ` in ${count === 1 ? '1 tensor' : `${countText(count)} tensors`}` : '';
    this.title.textContent = `${categoryText(category)} of rank ${rank}, ${place}: ${bytesText(size)}${tensors}`;
    const left = count - rows.length;
    const shown = rows.reduce((sum, row) => sum + row.bytes, 0);
    const others =
      left > 0 ? `The largest ${rows.length}; ${left} others hold ${bytesText(told.tensor_bytes - shown)}.` : '';
    const empty = !count && !told.text ? 'Nothing lies here.' : '';
    const when = step >= 0 ? `Measured at step ${step.toLocaleString()}.` : '';
    this.note.textContent = [told.text, empty, others, when].filter(Boolean).join(' ');
    this.rows.hidden = !rows.length;
    // Rows that stay are left alone: what is selected in them stays selected.
    const known = JSON.stringify(rows);
    if (known === this.shown) return;
    this.shown = known;
    this.table.replaceChildren();
    const head = element('tr', {}, ...COLUMNS.map(name => element('th', { scope: 'col' }, name)));
    this.table.append(element('thead', {}, head), element('tbody', {}, ...rows.map(line)));
  }

  private tell(problem: string): void {
    this.title.textContent = 'tensors';
    this.note.textContent = problem;
    this.rows.hidden = true;
  }

  /** Of the last question; an answer to an earlier one comes too late. */
  private asked = 0;
  private shown = '';
  private readonly title = element('strong', { role: 'status' });
  private readonly note = element('p', { class: 'sl-tensors-note' });
  private readonly table = element('table');
  private readonly rows = element('div', {
    class: 'sl-tensors-rows',
    tabindex: '0',
    role: 'group',
    'aria-label': 'tensors',
    ...OWN_KEYS
  });
  private readonly lists = {
    rank: element('select', OWN_KEYS),
    holds: element('select', OWN_KEYS),
    on: element('select', OWN_KEYS)
  };
}

function line(row: TensorRow): HTMLElement {
  const words = [bytesText(row.bytes), row.unit, row.state, row.shape, row.here, row.owner, row.form];
  const name = element('th', { scope: 'row', title: row.name }, row.name);
  return element('tr', {}, name, ...words.map(text => element('td', { title: text }, text)));
}

/** Gives a list these options, unless it has them. */
function choose(
  list: HTMLSelectElement,
  values: readonly string[],
  name: (value: string) => string = value => value
): void {
  if ([...list.options].map(option => option.value).join() === values.join()) return;
  list.replaceChildren(...values.map(value => element('option', { value }, name(value))));
}
