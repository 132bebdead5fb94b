import { inked, isDark, pageColours } from './colours';
import { Controls } from './controls';
import { element } from './dom';
import { Figures, plainText } from './figures';
import type { Buffer, Figure } from './figures';
import { pngPicture, save, svgPicture } from './pictures';
import { CONFIG } from './plotly';
import type { Plotly, Plotted } from './plotly';
import { Sight } from './sight';
import type { Source, Taker, Wish } from './source';
import { TableView, tableOf } from './tables';
import { partAt, TensorPanel } from './tensors';
import type { BarsMeta } from './tensors';
import { CATEGORIES, PLACES } from '../messages';
import type { Changes, Keyframe } from '../messages';

const CARDS = ['memory', 'loss', 'throughput', 'anatomy'];
/** Below those, where there are such figures. */
const MORE = ['gradient', 'step_memory', 'kernels', 'communication'];
const PIPELINE = 'pipeline';
/** Whose segments a person may click. */
const MEMORY = ['memory', 'places'];
/** Below the cards, across both columns, where there is such a figure. */
const WIDE = ['places', 'exchange', PIPELINE];
const MOST_OFTEN_MS = 90;
const MOST_SELDOM_MS = 800;
const POINTING_MS = 150;

/** A run on the page: it keeps the figures as data, takes in what its source brings, and draws when it can be seen. */
export class DashboardView implements Taker {
  readonly node: HTMLElement;

  constructor(
    private readonly source: Source,
    load: () => Promise<Plotly>
  ) {
    for (const name of [...MORE, ...WIDE]) this.plot(name).hidden = true;
    this.tables.hidden = true;
    this.node = element('div', { class: 'speedlab-dash', role: 'region', 'aria-label': 'run' });
    this.tensors = new TensorPanel(part => this.source.tensors(part));
    this.node.append(this.controls.node, this.note, this.grid, this.tables);
    this.placeTensors();
    this.connect();
    this.source.start(this);
    this.source.ask({ watching: true });
    load()
      .then(plotly => this.begin(plotly))
      .catch((error: unknown) => {
        this.tell(`The plots cannot be drawn (${String(error)}). Reload the page, or run the cell again.`);
      });
  }

  dispose(): void {
    this.gone = true;
    for (const timer of [this.timer, this.pointing, this.smooths]) clearTimeout(timer);
    this.sight?.dispose();
    for (const observer of [this.themes, this.sizes]) observer.disconnect();
    this.source.close();
    if (this.plotly) for (const plot of Object.values(this.plots)) this.plotly.purge(plot);
    this.node.remove();
  }

  // What the source brings

  onMessage(message: Keyframe | Changes, buffers: Buffer[]): void {
    const had = this.figures.gap;
    const changed = this.figures.take(message, buffers);
    if (this.figures.gap && !had) this.ask({ keyframe: true });
    // At first, unless a person has chosen: where the process holds far more than the model, the model's part alone.
    if (message.type === 'Keyframe' && !this.chosen && this.figures.states !== null) {
      this.chosen = true;
      this.controls.press('states', this.figures.states);
    }
    this.problem = '';
    this.showHead();
    this.changed(changed);
    // A run that was reshaped holds other tensors.
    if (message.type === 'Keyframe' || message.parts.some(part => part.part === 'marks')) void this.tensors.look();
  }

  onProblem(text: string): void {
    this.problem = text;
    this.showHead();
  }

  // What is drawn

  private begin(plotly: Plotly): void {
    if (this.gone) return;
    this.plotly = plotly;
    this.showHead();
    this.changed(this.cards());
  }

  private plot(name: string): Plotted {
    const plot = this.plots[name];
    if (!plot) throw new Error(`there is no place for a figure ${name}`);
    return plot;
  }

  private cards(): string[] {
    return [...CARDS, ...MORE, ...WIDE].filter(name => this.figureOf(name));
  }

  private figureOf(card: string): Figure | undefined {
    const { figures } = this.figures;
    if (card === 'anatomy' && this.controls.isOn('rank')) return figures['ranks'];
    return figures[card === 'memory' && this.controls.isOn('states') ? 'states' : card];
  }

  private changed(names: string[]): void {
    for (const name of names) this.dirty.add(name === 'ranks' ? 'anatomy' : name === 'states' ? 'memory' : name);
    if (names.length) this.timer ??= setTimeout(() => this.draw(), Math.max(0, this.quietUntil - performance.now()));
  }

  private draw(): void {
    this.timer = undefined;
    if (this.gone || !this.seen || !this.plotly || this.figures.seq < 0) return;
    const start = performance.now();
    this.node.dataset['theme'] = isDark(getComputedStyle(this.node).backgroundColor) ? 'dark' : 'light';
    if (this.controls.isOn('table')) this.drawTables();
    else this.drawPlots(this.plotly);
    this.dirty.clear();
    this.node.dataset['seq'] = String(this.figures.seq);
    // At most a third of the page's time on a slow machine; the first time takes long anywhere.
    const pause = Math.min(MOST_SELDOM_MS, Math.max(MOST_OFTEN_MS, 2 * (performance.now() - start)));
    this.quietUntil = performance.now() + pause;
  }

  private drawPlots(plotly: Plotly): void {
    const colours = pageColours(this.node);
    for (const name of [...MORE, ...WIDE]) this.plot(name).hidden = !this.figureOf(name);
    for (const name of this.cards().filter(card => this.dirty.has(card))) {
      const figure = this.figureOf(name);
      if (!figure) continue;
      const { data, layout } = inked(figure, colours);
      this.plot(name).setAttribute('aria-label', plainText(layout.title.text));
      void plotly.react(this.plot(name), data, layout, CONFIG);
    }
    this.followPointer();
    this.followClicks();
  }

  private drawTables(): void {
    const shown = this.cards();
    for (const name of shown) {
      const figure = this.figureOf(name);
      if (figure) (this.tableViews[name] ??= new TableView(name)).show(tableOf(figure));
    }
    const nodes = shown.flatMap(name => this.tableViews[name]?.node ?? []);
    // Only when they are others: a table that is put anew loses what is selected in it.
    if (nodes.length !== this.tables.children.length || nodes.some((node, i) => node !== this.tables.children[i]))
      this.tables.replaceChildren(...nodes);
  }

  private showHead(): void {
    this.controls.show(this.figures.head);
    const loading = this.plotly ? '' : 'Loading plots …';
    this.tell(this.problem || loading || this.figures.head.note);
  }

  private tell(note: string): void {
    if (this.note.textContent === note) return;
    this.note.textContent = note;
    // One that scrolls is scrolled by keys, too.
    if (this.note.scrollHeight > this.note.clientHeight) this.note.tabIndex = 0;
    else this.note.removeAttribute('tabindex');
  }

  // What the person does

  private connect(): void {
    this.tensors.onClose = () => {
      this.controls.press('tensors', false);
      this.controls.focus('tensors');
    };
    this.controls.onPress = name => {
      if (name === 'tensors') return this.toggleTensors();
      this.chosen ||= name === 'states';
      this.grid.hidden = this.controls.isOn('table');
      this.tables.hidden = !this.grid.hidden;
      this.placeTensors();
      this.changed(this.cards());
    };
    this.controls.onSmooth = share => {
      clearTimeout(this.smooths);
      this.smooths = setTimeout(() => {
        this.smoothing = share;
        this.ask();
      }, POINTING_MS);
    };
    this.controls.onPicture = kind => void this.savePicture(kind);
    this.themes.observe(document.body, { attributes: true });
    this.sight = new Sight(this.node, on => this.watch(on));
    this.sizes.observe(this.grid);
  }

  /** Below the bars that are clicked, which stay where they are; above the numbers, which have none. */
  private placeTensors(): void {
    if (this.grid.hidden) this.tables.before(this.tensors.node);
    else this.plot('memory').after(this.tensors.node);
  }

  private async savePicture(kind: 'png' | 'svg'): Promise<void> {
    if (!this.plotly || this.figures.seq < 0) return;
    const { head } = this.figures;
    const of = (names: string[]) => names.flatMap(name => this.figureOf(name) ?? []);
    const figures = { cards: of([...CARDS, ...MORE]), wide: of(WIDE) };
    const title = `${head.text} · ${head.mark} ${head.state}`;
    const name = (head.text.split(' · ')[0] ?? '').replace(/[^\w.-]+/g, '-') || 'run';
    try {
      const picture = await (kind === 'png' ? pngPicture : svgPicture)(this.plotly, figures, title);
      save(picture, `${name}.${kind}`);
    } catch (error) {
      this.tell(`The picture could not be made: ${String(error)}`);
    }
  }

  /** A step of the anatomy that the pointer rests on shows its own timeline; else the newest one is shown. */
  private followPointer(): void {
    const anatomy = this.plot('anatomy');
    if (this.follows || !anatomy.on) return;
    this.follows = true;
    const ask = (step: number | null) => {
      clearTimeout(this.pointing);
      this.pointing = setTimeout(() => {
        if (!this.figures.figures[PIPELINE] || this.step === step) return;
        this.step = step;
        this.ask();
      }, POINTING_MS);
    };
    anatomy.on('plotly_hover', ({ points }) => {
      if (!this.controls.isOn('rank')) ask(points[0]?.x ?? null);
    });
    anatomy.on('plotly_unhover', () => ask(null));
  }

  /** Of the lowest rank's first category, where no segment was clicked. */
  private toggleTensors(): void {
    if (!this.controls.isOn('tensors')) return this.tensors.close();
    const { bars = [], ranks = [] } = (this.figureOf('memory')?.layout.meta ?? {}) as Partial<BarsMeta>;
    this.tensors.open({ rank: bars[0]?.[0] ?? 0, category: CATEGORIES[0], place: PLACES[0] }, ranks);
    this.tensors.focus();
  }

  /** A click on a segment of memory lists the tensors in it. */
  private followClicks(): void {
    for (const name of MEMORY) {
      const plot = this.plot(name);
      if (this.clickable.has(name) || !plot.on) continue;
      this.clickable.add(name);
      plot.on('plotly_click', ({ points: [point] }) => {
        const figure = this.figureOf(name);
        const part = point && partAt(figure?.layout.meta, point.pointNumber, figure?.data[point.curveNumber]?.meta);
        if (!part) return;
        this.controls.press('tensors', true);
        this.tensors.open(part, (this.figureOf('memory')?.layout.meta as BarsMeta).ranks);
      });
    }
  }

  /** Hidden, it asks for nothing. */
  private ask(more: Pick<Wish, 'keyframe'> = {}): void {
    this.source.ask({ watching: this.seen, step: this.step, smoothing: this.smoothing, ...more });
  }

  private watch(on: boolean): void {
    this.seen = on;
    this.ask();
    if (on) this.changed(this.cards());
  }

  private resize(): void {
    for (const name of this.cards()) {
      const plot = this.plot(name);
      if (this.plotly && plot.on && !plot.hidden && plot.clientWidth) void this.plotly.Plots.resize(plot);
    }
  }

  private readonly controls = new Controls();
  private readonly note = element('div', { class: 'sl-note', role: 'alert' });
  private readonly plots: Record<string, Plotted> = Object.fromEntries(
    [...CARDS, ...MORE, ...WIDE].map(name => [
      name,
      element('div', { class: 'sl-plot', 'data-plot': name, role: 'figure' })
    ])
  );
  private readonly grid = element('div', { class: 'sl-grid' }, ...Object.values(this.plots));
  private readonly tensors: TensorPanel;
  private readonly clickable = new Set<string>();
  private readonly tables = element('div', { class: 'sl-tables' });
  private readonly tableViews: Record<string, TableView> = {};
  private readonly figures = new Figures();
  private readonly dirty = new Set<string>();
  private readonly themes = new MutationObserver(() => this.changed(this.cards()));
  private readonly sizes = new ResizeObserver(() => this.resize());
  private sight: Sight | undefined;
  private plotly: Plotly | null = null;
  private problem = '';
  private step: number | null = null;
  /** The share of the past in smoothed curves; null is the usual one. */
  private smoothing: number | null = null;
  private seen = true;
  private gone = false;
  /** Whether it is settled which memory is shown. */
  private chosen = false;
  private follows = false;
  private quietUntil = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private pointing: ReturnType<typeof setTimeout> | undefined;
  private smooths: ReturnType<typeof setTimeout> | undefined;
}
