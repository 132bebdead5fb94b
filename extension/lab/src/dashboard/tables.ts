import { element } from './dom';
import { plainText } from './figures';
import type { Figure, Layout, Trace } from './figures';

/** A figure as a table: a first column of names, the others of numbers. */
export interface Table {
  title: string;
  columns: string[];
  rows: [string, ...string[]][];
}

const MOST_STEPS = 12;

const DIGITS = 5;
const FEWEST_DIGITS = 3;

/** A column of numbers, with as many decimals in each as its largest needs for five digits: points stand below each
 * other. A number that would keep fewer than three of its digits so has more decimals. */
function column(values: readonly (number | undefined)[]): string[] {
  const told = values.filter(value => value !== undefined && Number.isFinite(value)).map(Number);
  const most = Math.max(0, ...told.map(Math.abs));
  const whole = most > 0 ? Math.floor(Math.log10(most)) + 1 : 1;
  const digits = told.every(Number.isInteger) ? 0 : Math.min(12, Math.max(0, DIGITS - whole));
  const places = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return values.map(value => {
    if (value === undefined) return '';
    if (!Number.isFinite(value)) return '–';
    const small = value !== 0 && !Number.isInteger(value) && Math.abs(value) < 10 ** (2 - digits);
    return value.toLocaleString(undefined, small ? { maximumSignificantDigits: FEWEST_DIGITS } : places);
  });
}

/** Rows of names and of columns beside them. */
function rowsOf(names: readonly string[], columns: readonly (readonly (number | undefined)[])[]): Table['rows'] {
  const texts = columns.map(column);
  return names.map((name, row) => [name, ...texts.map(column => column[row] ?? '')]);
}

const numbers = (values: Float32Array | string[]): number[] => [...values].map(Number);

/** The numbers of a figure. */
export function tableOf({ data, layout }: Figure): Table {
  const title = plainText(layout.title.text);
  if (layout.yaxis.ticktext) {
    const unit = plainText(layout.xaxis.title?.text ?? '');
    return { title: `${title} (${unit})`, ...byLane(data, layout.yaxis.ticktext) };
  }
  const unit = plainText(layout.yaxis.title?.text ?? '');
  const told = layout.xaxis.type === 'category' ? byCategory(data) : bySteps(data, layout);
  return { title: unit && !title.endsWith(unit) ? `${title} (${unit})` : title, ...told };
}

type Body = Omit<Table, 'title'>;

/** A row for each part of the bars, their sum below, a column for each bar. */
function byCategory(data: Trace[]): Body {
  const names = [...(data[0]?.x ?? [])].map(name => plainText(String(name)));
  const bars = [...names.keys()].filter(i => names[i]?.trim()); // A gap between hosts has no name.
  const columns = bars.map(bar => {
    const heights = data.map(trace => Number(trace.y[bar]));
    return [...heights, heights.reduce((sum, height) => sum + height, 0)];
  });
  const rows = rowsOf([...data.map(trace => plainText(trace.name)), 'sum'], columns);
  return { columns: ['', ...bars.map(i => names[i] ?? '')], rows };
}

/** A row for each rank: what it did took so long, all micro-batches together. */
function byLane(data: Trace[], lanes: string[]): Body {
  const sum = (trace: Trace, lane: number) =>
    numbers(trace.x).reduce((all, length, i) => (Number(trace.y[i]) === lane ? all + length : all), 0);
  const columns = data.map(trace => lanes.map((_, lane) => sum(trace, lane)));
  const rows = rowsOf(lanes.map(plainText), columns);
  return { columns: ['', ...data.map(trace => plainText(trace.name))], rows };
}

/** The last steps, or moments of a step, a column for each curve. */
function bySteps(traces: Trace[], layout: Layout): Body {
  const data = traces.filter(trace => trace['hoverinfo'] !== 'skip'); // A line through the points of others.
  const steps = [...new Set(data.flatMap(trace => numbers(trace.x)))].sort((a, b) => a - b).slice(-MOST_STEPS);
  const second = plainText(layout.yaxis2?.title?.text ?? '');
  const names = data.map(trace => {
    const name = plainText(trace.name);
    return trace.yaxis === 'y2' && second !== name ? `${name} (${second})` : name;
  });
  const at = (trace: Trace, step: number) => {
    const index = numbers(trace.x).lastIndexOf(step);
    return index < 0 ? undefined : Number(trace.y[index]);
  };
  const named = steps.every(Number.isInteger) ? steps.map(String) : column(steps);
  const columns = data.map(trace => steps.map(step => at(trace, step)));
  const rows = rowsOf(named, columns);
  return { columns: [plainText(layout.xaxis.title?.text ?? '') || 'step', ...names], rows };
}

/** A table on the page. Rows stay the elements they are while their first cell does, so that what a person has
 * selected stays selected while numbers come. */
export class TableView {
  readonly node: HTMLElement;

  constructor(name: string) {
    this.node = element('figure', { 'data-table': name }, this.caption, this.table);
    this.table.append(this.head, this.body);
  }

  show({ title, columns, rows }: Table): void {
    setText(this.caption, title);
    setCells(this.head, columns, () => element('th', { scope: 'col' }));
    const known = new Map([...this.body.rows].map(row => [row.cells[0]?.textContent, row]));
    for (const [index, cells] of rows.entries()) {
      const row = known.get(cells[0]) ?? element('tr');
      known.delete(cells[0]);
      setCells(row, cells, i => (i ? element('td') : element('th', { scope: 'row' })));
      // What is in its place is not moved: that, too, would take the selection away.
      while (this.body.rows[index] && this.body.rows[index] !== row && isGone(this.body.rows[index], rows))
        this.body.rows[index].remove();
      if (this.body.rows[index] !== row) this.body.insertBefore(row, this.body.rows[index] ?? null);
    }
    while (this.body.rows.length > rows.length) this.body.lastElementChild?.remove();
  }

  private readonly caption = element('figcaption');
  private readonly table = element('table');
  private readonly head = element('tr');
  private readonly body = element('tbody');
}

function isGone(row: HTMLTableRowElement, rows: Table['rows']): boolean {
  return !rows.some(cells => cells[0] === row.cells[0]?.textContent);
}

function setText(node: HTMLElement, text: string): void {
  if (node.textContent !== text) node.textContent = text;
}

function setCells(row: HTMLTableRowElement, texts: string[], make: (index: number) => HTMLTableCellElement): void {
  texts.forEach((text, i) => setText(row.cells[i] ?? row.appendChild(make(i)), text));
  while (row.cells.length > texts.length) row.lastElementChild?.remove();
}
