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

function number(value: number | undefined): string {
  if (value === undefined) return '';
  return Number.isFinite(value) ? value.toLocaleString(undefined, { maximumSignificantDigits: 5 }) : '–';
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
  return { title: unit && unit !== title ? `${title} (${unit})` : title, ...told };
}

type Body = Omit<Table, 'title'>;

/** A row for each part of the bars, their sum below, a column for each bar. */
function byCategory(data: Trace[]): Body {
  const names = [...(data[0]?.x ?? [])].map(name => plainText(String(name)));
  const bars = [...names.keys()].filter(i => names[i]?.trim()); // A gap between hosts has no name.
  const heights = (trace: Trace) => bars.map(i => number(Number(trace.y[i])));
  const rows = data.map((trace): [string, ...string[]] => [plainText(trace.name), ...heights(trace)]);
  const sums = bars.map(i => data.reduce((sum, trace) => sum + Number(trace.y[i] ?? 0), 0));
  return { columns: ['', ...bars.map(i => names[i] ?? '')], rows: [...rows, ['sum', ...sums.map(number)]] };
}

/** A row for each rank: what it did took so long, all micro-batches together. */
function byLane(data: Trace[], lanes: string[]): Body {
  const sum = (trace: Trace, lane: number) =>
    numbers(trace.x).reduce((all, length, i) => (Number(trace.y[i]) === lane ? all + length : all), 0);
  const rows = lanes.map((name, lane): [string, ...string[]] => [
    plainText(name),
    ...data.map(trace => number(sum(trace, lane)))
  ]);
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
  const rows = steps.map((step): [string, ...string[]] => [
    Number.isInteger(step) ? String(step) : number(step),
    ...data.map(trace => number(at(trace, step)))
  ]);
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
