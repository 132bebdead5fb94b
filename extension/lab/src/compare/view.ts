import { inked, isDark, pageColours } from '../dashboard/colours';
import { element } from '../dashboard/dom';
import { Figures, plainText } from '../dashboard/figures';
import type { Buffer, Drawn, Figure } from '../dashboard/figures';
import { pngPicture, save, svgPicture } from '../dashboard/pictures';
import { CONFIG } from '../dashboard/plotly';
import type { Plotly, Plotted } from '../dashboard/plotly';
import { Sight } from '../dashboard/sight';
import type { Source, Taker } from '../dashboard/source';
import { TableView } from '../dashboard/tables';
import type { ComparedRow } from '../messages';
import { Chips } from './chips';
import type { HiddenRuns } from './hidden';
import { figureOf, labelOf } from './shown';

const CARDS = ['loss', 'throughput', 'memory', 'anatomy'];
const MOST_OFTEN_MS = 200;

/** Several runs on the page: the same axes, a colour for each, and tables of what each has come to and what differs. */
export class CompareView implements Taker {
  readonly node: HTMLElement;

  constructor(
    private readonly source: Pick<Source, 'start' | 'ask' | 'close'>,
    load: () => Promise<Plotly>,
    private readonly memory?: HiddenRuns
  ) {
    const tools = element('span', { class: 'sl-tools', role: 'toolbar', 'aria-label': 'pictures' });
    for (const kind of ['png', 'svg'] as const) {
      const hint = `Save all plots as ${kind.toUpperCase()}`;
      const button = element('button', { type: 'button', title: hint, 'aria-label': hint }, kind.toUpperCase());
      button.addEventListener('click', () => void this.savePicture(kind));
      tools.append(button);
    }
    const head = element('div', { class: 'sl-head' }, this.chips.node, tools);
    this.settings.node.append(this.same);
    const tables = element('div', { class: 'sl-tables sl-beside' }, this.settings.node, this.facts.node);
    this.node = element('div', { class: 'speedlab-dash', role: 'region', 'aria-label': 'runs side by side' });
    this.node.append(head, this.note, this.grid, tables);
    this.sight = new Sight(this.node, on => this.watch(on));
    this.themes.observe(document.body, { attributes: true });
    this.sizes.observe(this.grid);
    this.source.start(this);
    this.source.ask({ watching: true });
    void this.memory?.recall().then(hidden => this.recalled(hidden));
    load().then(
      plotly => {
        this.plotly = plotly;
        this.changed(CARDS);
      },
      (error: unknown) => {
        this.onProblem(`The plots cannot be drawn (${String(error)}). Reload the page, or run the cell again.`);
      }
    );
  }

  dispose(): void {
    this.gone = true;
    clearTimeout(this.timer);
    this.sight.dispose();
    for (const observer of [this.themes, this.sizes]) observer.disconnect();
    this.source.close();
    if (this.plotly) for (const plot of Object.values(this.plots)) this.plotly.purge(plot);
    this.node.remove();
  }

  onMessage(message: Drawn, buffers: Buffer[]): void {
    const had = this.figures.gap;
    const changed = this.figures.take(message, buffers);
    if (this.figures.gap && !had) this.source.ask({ watching: true, keyframe: true });
    this.onProblem('');
    this.changed(changed);
  }

  onProblem(text: string): void {
    if (this.note.textContent !== text) this.note.textContent = text;
  }

  /** What was hidden before the page was loaded, unless a person has been quicker. */
  private recalled(hidden: readonly number[]): void {
    if (this.gone || this.chosen || !hidden.length) return;
    this.chips.hide(hidden);
    this.changed(CARDS);
  }

  private choose(): void {
    this.chosen = true;
    this.memory?.keep([...this.chips.hidden]);
    this.changed(CARDS);
  }

  private changed(names: string[]): void {
    for (const name of names) this.dirty.add(name);
    this.timer ??= setTimeout(() => this.draw(), Math.max(0, this.quietUntil - performance.now()));
  }

  private draw(): void {
    this.timer = undefined;
    const told = this.figures.compared;
    if (this.gone || !this.seen || !told) return;
    const dark = isDark(getComputedStyle(this.node).backgroundColor);
    this.node.dataset['theme'] = dark ? 'dark' : 'light';
    this.chips.show(told.runs, dark);
    this.drawTables();
    if (this.plotly) this.drawPlots(this.plotly, dark);
    this.node.dataset['seq'] = String(this.figures.seq);
    this.quietUntil = performance.now() + MOST_OFTEN_MS;
  }

  private drawPlots(plotly: Plotly, dark: boolean): void {
    const colours = pageColours(this.node);
    for (const name of this.dirty) {
      const [plot, figure] = [this.plots[name], this.shown(name, dark)];
      if (!plot || !figure) continue;
      const { data, layout } = inked(figure, colours, this.empty);
      plot.setAttribute('aria-label', plainText(layout.title.text));
      void plotly.react(plot, data, layout, CONFIG);
    }
    this.dirty.clear();
  }

  /** What a figure without curves says. */
  private get empty(): string | undefined {
    return this.chips.hidden.size === this.figures.compared?.runs.length ? 'all runs are hidden' : undefined;
  }

  private shown(name: string, dark: boolean): Figure | undefined {
    const figure = this.figures.figures[name];
    const runs = this.figures.compared?.runs ?? [];
    return figure && figureOf(figure, { runs, hidden: this.chips.hidden, dark });
  }

  private drawTables(): void {
    const told = this.figures.compared;
    if (!told) return;
    const columns = ['', ...told.runs.map(labelOf)];
    const rows = (of: readonly ComparedRow[]) => of.map((row): [string, ...string[]] => [row.name, ...row.values]);
    this.facts.show({ title: 'so far', columns, rows: rows(told.facts) });
    this.settings.show({ title: 'settings that differ', columns, rows: rows(told.settings) });
    if (this.same.textContent !== told.note) this.same.textContent = told.note;
  }

  private watch(on: boolean): void {
    this.seen = on;
    this.source.ask({ watching: on });
    if (on) this.changed(CARDS);
  }

  private async savePicture(kind: 'png' | 'svg'): Promise<void> {
    const told = this.figures.compared;
    if (!this.plotly || !told) return;
    const cards = CARDS.flatMap(name => this.shown(name, false) ?? []);
    // On a picture no buttons say whose a curve is.
    for (const { layout } of cards) Object.assign(layout, { showlegend: true, margin: { b: 84, l: 58, r: 20, t: 66 } });
    const names = told.runs.filter((_, number) => !this.chips.hidden.has(number)).map(run => run.name);
    const { empty } = this;
    try {
      const make = kind === 'png' ? pngPicture : svgPicture;
      const title = names.join(' · ') || (empty ?? '');
      save(await make(this.plotly, { cards, wide: [], ...(empty && { empty }) }, title), `comparison.${kind}`);
    } catch (error) {
      this.onProblem(`The picture could not be made: ${String(error)}`);
    }
  }

  private resize(): void {
    for (const plot of Object.values(this.plots)) {
      if (this.plotly && plot.on && plot.clientWidth) void this.plotly.Plots.resize(plot);
    }
  }

  private readonly chips = new Chips(() => this.choose());
  private readonly note = element('div', { class: 'sl-note', role: 'alert' }, 'Loading runs …');
  private readonly plots: Record<string, Plotted> = Object.fromEntries(
    CARDS.map(name => [name, element('div', { class: 'sl-plot', 'data-plot': name, role: 'figure' })])
  );
  private readonly grid = element('div', { class: 'sl-grid' }, ...Object.values(this.plots));
  private readonly facts = new TableView('facts');
  private readonly settings = new TableView('settings');
  private readonly same = element('div', { class: 'sl-note' });
  private readonly figures = new Figures();
  private readonly dirty = new Set<string>();
  private readonly themes = new MutationObserver(() => this.changed(CARDS));
  private readonly sizes = new ResizeObserver(() => this.resize());
  private readonly sight: Sight;
  private plotly: Plotly | null = null;
  private seen = true;
  /** Whether a person has hidden a run, or shown one again. */
  private chosen = false;
  private gone = false;
  private quietUntil = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;
}
