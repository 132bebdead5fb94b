// The runs as buttons: each is the legend of its run, and hides it or shows it again.

import { element } from '../dashboard/dom';
import type { ComparedRun } from '../messages';
import { colourOf, labelOf } from './shown';

export class Chips {
  readonly node = element('div', { class: 'sl-chips', role: 'toolbar', 'aria-label': 'runs' });
  /** Numbers of those that are hidden. */
  readonly hidden = new Set<number>();

  constructor(private readonly changed: () => void) {
    this.all.hidden = true;
    this.all.addEventListener('click', () => {
      // It goes away: the focus goes to what it has brought back.
      const first = Math.min(...this.hidden);
      this.hidden.clear();
      this.marked();
      this.chips[first]?.button.focus();
    });
    this.node.append(this.all, this.told);
  }

  /** In the place of what is hidden, where that came from before. */
  hide(numbers: readonly number[]): void {
    this.hidden.clear();
    for (const number of numbers) this.hidden.add(number);
    this.mark();
  }

  show(runs: readonly ComparedRun[], dark: boolean): void {
    runs.forEach((run, number) => {
      const chip = (this.chips[number] ??= this.made(number));
      chip.swatch.style.background = colourOf(run, dark);
      setText(chip.name, labelOf(run, number));
      const state = run.problem ? '▲ cannot be read' : `${run.mark} ${run.state}`;
      if (chip.state.textContent !== state) {
        // What a screen reader says by itself: a state when it has changed.
        if (chip.state.textContent)
          this.told.textContent = `${run.name}: ${run.problem ? 'cannot be read' : run.state}`;
        chip.state.textContent = state;
      }
    });
    this.runs = runs;
    this.mark();
  }

  private made(number: number) {
    const swatch = element('span', { class: 'sl-swatch', 'aria-hidden': 'true' });
    const [name, state] = [element('span', { class: 'sl-chip-name' }), element('span', { class: 'sl-chip-state' })];
    const button = element('button', { type: 'button', class: 'sl-chip' }, swatch, name, state);
    button.addEventListener('click', () => {
      if (!this.hidden.delete(number)) this.hidden.add(number);
      this.marked();
    });
    this.node.insertBefore(button, this.all);
    return { button, swatch, name, state };
  }

  private marked(): void {
    this.mark();
    this.changed();
  }

  private mark(): void {
    this.chips.forEach(({ button }, number) => {
      const on = !this.hidden.has(number);
      button.setAttribute('aria-pressed', String(on));
      const { name = '', text = '', problem = '' } = this.runs[number] ?? {};
      const told = [text, problem].filter(Boolean).join(' · ');
      button.title = `${on ? 'Hide' : 'Show'} ${name}${told && `: ${told}`}`;
    });
    this.all.hidden = this.hidden.size === 0;
    setText(this.all, `Show all ${this.chips.length}`);
  }

  private runs: readonly ComparedRun[] = [];
  private readonly chips: ReturnType<Chips['made']>[] = [];
  private readonly all = element('button', { type: 'button', class: 'sl-all' });
  private readonly told = element('span', { class: 'sl-told', role: 'status' });
}

function setText(node: HTMLElement, text: string): void {
  if (node.textContent !== text) node.textContent = text;
}
