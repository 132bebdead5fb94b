// The loss of a run in one line of text's height.

import { element, setAttributes, svg } from '../dom';
import type { Records } from '../messages';
import { lossText } from '../states';
import { wholeText } from '../format';

const WIDTH = 240;
const HEIGHT = 32;
const MARGIN = 2;

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

  update(records: Records | null): void {
    if (records === this.shown) return;
    this.shown = records;
    const points = pointsOf(records);
    const [first, last] = [points[0], points.at(-1)];
    this.node.hidden = !first || !last || points.length < 2;
    if (!first || !last || points.length < 2) return;
    setAttributes(this.line, { d: pathOf(points) });
    this.ends.replaceChildren(
      element('span', {}, lossText(first[1])),
      element('span', {}, `${lossText(last[1])} smoothed`)
    );
    const text = `smoothed loss ${lossText(first[1])} at step ${wholeText(first[0])}, ${lossText(last[1])} at step ${wholeText(last[0])}`;
    setAttributes(this.node, { 'aria-label': text, title: text });
  }

  private shown: Records | null = null;
  private readonly line = svg('path', { class: 'sl-spark-line' });
  private readonly ends = element('div', { class: 'sl-spark-ends', 'aria-hidden': 'true' });
}
