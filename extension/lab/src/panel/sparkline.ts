// The loss of a run in one line of text's height.

import { element, setAttributes, svg } from '../dom';
import type { Records } from '../messages';
import { lossText } from '../states';
import { wholeText } from '../format';

const WIDTH = 240;
const HEIGHT = 32;
const MARGIN = 2;
/** Keeps a line's height. */
const NO_BREAK_SPACE = '\u00a0';

type Point = readonly [step: number, loss: number];

/** (step, smoothed loss) where both are numbers. */
export function pointsOf(records: Records | null): Point[] {
  const steps = records?.columns['step'] ?? [];
  const losses = records?.columns['smoothed_loss'] ?? [];
  return steps.flatMap((step, index) => {
    const loss = losses[index];
    return typeof step === 'number' && typeof loss === 'number' ? [[step, loss] as const] : [];
  });
}

/** The path of a line through points, the lowest loss at the bottom. */
export function pathOf(points: readonly Point[]): string {
  const steps = points.map(point => point[0]);
  const losses = points.map(point => point[1]);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const [low, high] = [Math.min(...losses), Math.max(...losses)];
  const x = (step: number) => MARGIN + ((step - first) / (last - first || 1)) * (WIDTH - 2 * MARGIN);
  const y = (loss: number) => MARGIN + ((high - loss) / (high - low || 1)) * (HEIGHT - 2 * MARGIN);
  return points
    .map(([step, loss], index) => `${index ? 'L' : 'M'}${x(step).toFixed(1)} ${y(loss).toFixed(1)}`)
    .join('');
}

export class Sparkline {
  readonly node: HTMLElement;

  constructor() {
    const drawing = svg('svg', {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: 'none',
      'aria-hidden': 'true'
    });
    drawing.append(this.line);
    this.node = element('div', { class: 'sl-spark', role: 'img', hidden: true }, drawing, this.ends);
  }

  /** `awaited`: a line is to come, and its place is kept, so that what stands below does not move under a pointer. */
  update(records: Records | null, awaited = false): void {
    if (records === this.shown && awaited === this.awaited) return;
    this.shown = records;
    this.awaited = awaited;
    const points = pointsOf(records);
    const [first, last] = [points[0], points.at(-1)];
    const drawn = first && last && points.length > 1;
    this.node.hidden = !drawn && !awaited;
    setAttributes(this.node, { 'aria-hidden': drawn ? null : 'true' });
    if (!drawn) {
      setAttributes(this.line, { d: null });
      setAttributes(this.node, { 'aria-label': null, title: null });
      this.ends.replaceChildren(NO_BREAK_SPACE);
      return;
    }
    setAttributes(this.line, { d: pathOf(points) });
    this.ends.replaceChildren(
      element('span', {}, lossText(first[1])),
      element('span', {}, `${lossText(last[1])} smoothed`)
    );
    const text = `smoothed loss ${lossText(first[1])} at step ${wholeText(first[0])}, ${lossText(last[1])} at step ${wholeText(last[0])}`;
    setAttributes(this.node, { 'aria-label': text, title: text });
  }

  private shown: Records | null = null;
  private awaited = false;
  private readonly line = svg('path', { class: 'sl-spark-line' });
  private readonly ends = element('div', { class: 'sl-spark-ends', 'aria-hidden': 'true' });
}
