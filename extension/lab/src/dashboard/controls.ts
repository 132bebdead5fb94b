import { element, OWN_KEYS } from './dom';
import { factNodes } from '../facts';
import { SMOOTHING, SMOOTHINGS } from '../messages';
import type { HeadLine } from '../messages';

const SWITCHES = {
  states: ['model states', 'Show only what a ZeRO stage partitions, or all memory'],
  rank: ['by rank', 'Show the anatomy of a step by rank'],
  table: ['table', 'Show the numbers'],
  tensors: ['tensors', 'List the tensors in a segment of the memory bars; a click on a segment does, too']
} as const;
const PICTURES = { png: 'Save all plots as PNG', svg: 'Save all plots as SVG' } as const;

/** '10 steps': about as many as count in what is smoothed by this share of the past. */
export function smoothingText(share: number): string {
  return share ? `${Math.round(1 / (1 - share)).toLocaleString()} steps` : 'off';
}

export type Switch = keyof typeof SWITCHES;
export type Picture = keyof typeof PICTURES;

/** The lines above the plots: what the run does, its state, and buttons. */
export class Controls {
  readonly node: HTMLElement;
  onPress: (name: Switch) => void = () => {};
  onPicture: (kind: Picture) => void = () => {};
  /** With the share of the past in smoothed curves. */
  onSmooth: (share: number) => void = () => {};

  constructor() {
    const tools = element('span', { class: 'sl-tools', role: 'toolbar', 'aria-label': 'view' });
    for (const [name, [label, hint]] of Object.entries(SWITCHES) as [Switch, (typeof SWITCHES)[Switch]][]) {
      const button = element('button', { type: 'button', title: hint, 'aria-label': hint }, label);
      button.setAttribute('aria-pressed', 'false');
      button.addEventListener('click', () => {
        this.press(name, !this.isOn(name));
        this.onPress(name);
      });
      this.buttons.set(name, button);
      tools.append(button);
    }
    for (const [kind, hint] of Object.entries(PICTURES) as [Picture, string][]) {
      const attributes = { type: 'button', title: hint, 'aria-label': hint };
      const button = element('button', attributes, kind.toUpperCase());
      button.addEventListener('click', () => this.onPicture(kind));
      tools.append(button);
    }
    this.smoothing.addEventListener('input', () => {
      this.showSmoothing();
      this.onSmooth(this.share);
    });
    tools.append(element('label', { class: 'sl-smoothing' }, 'smoothing ', this.smoothing, this.smoothed));
    this.showSmoothing();
    const title = element('span', { class: 'sl-title' }, this.state, this.name);
    this.node = element('div', { class: 'sl-head' }, title, this.told, tools, this.text);
  }

  isOn(name: Switch): boolean {
    return this.buttons.get(name)?.getAttribute('aria-pressed') === 'true';
  }

  press(name: Switch, on: boolean): void {
    this.buttons.get(name)?.setAttribute('aria-pressed', String(on));
  }

  focus(name: Switch): void {
    this.buttons.get(name)?.focus();
  }

  show({ text, state, mark }: HeadLine): void {
    if (this.shown !== text) {
      this.shown = text;
      const [name = '', ...parts] = text.split(' · ');
      if (this.name.textContent !== name) this.name.textContent = name;
      this.facts.replaceChildren(...factNodes(parts));
    }
    if (this.state.dataset['state'] === state) return;
    this.state.dataset['state'] = state;
    this.state.textContent = `${mark} ${state}`;
    // What a screen reader says by itself: the state when it changes, not the numbers ten times a second.
    if (state) this.told.textContent = `${text.split(' · ')[0] ?? 'run'}: ${state}`;
  }

  private get share(): number {
    return SMOOTHINGS[Number(this.smoothing.value)] ?? SMOOTHING;
  }

  private showSmoothing(): void {
    const words = smoothingText(this.share);
    this.smoothed.textContent = words;
    this.smoothing.setAttribute('aria-valuetext', words);
  }

  private readonly smoothing = element('input', {
    type: 'range',
    min: '0',
    max: String(SMOOTHINGS.length - 1),
    value: String(SMOOTHINGS.indexOf(SMOOTHING)),
    title: 'Over how many steps loss and gradient norm are smoothed',
    ...OWN_KEYS
  });
  private readonly smoothed = element('span', { 'aria-hidden': 'true' });
  private readonly buttons = new Map<Switch, HTMLButtonElement>();
  private shown = '';
  private readonly name = element('span', { class: 'sl-title-name' });
  private readonly facts = element('span', { class: 'sl-dotted' });
  private readonly text = element('div', { class: 'sl-text' }, this.facts);
  private readonly state = element('span', { class: 'sl-state' });
  private readonly told = element('span', { class: 'sl-told', role: 'status' });
}
