// Runs that are ticked, and the button that puts them side by side.

import { element, setShown, setText } from '../dom';
import type { RunSummary } from '../messages';
import { Action } from './rows';

/** The server draws so many at once (speedlab/telemetry/figures/compare.py). */
export const MOST_COMPARED = 8;

/** What comparing runs opens: their ids, the first one first, and a title. */
export interface Comparison {
  id: string;
  name: string;
}

/** Of runs in the order in which they were ticked: the first is what the others stand beside. Null for too few. */
export function comparisonOf(runs: readonly RunSummary[]): Comparison | null {
  if (runs.length < 2) return null;
  return {
    id: runs.map(run => run.id).join(','),
    name: `${runs.length} runs: ${runs.map(run => run.name).join(' · ')}`
  };
}

/** Shown while something is ticked. */
export class CompareBar {
  readonly node = element('div', { class: 'sl-compare', hidden: true });

  constructor(compare: () => void, clear: () => void) {
    this.compare = new Action('chart', 'Compare', 'Show the ticked runs side by side', compare, why => {
      setText(this.told, why);
    });
    const none = new Action('cross', 'Untick', 'Tick none', clear);
    const buttons = element('div', { class: 'sl-actions sl-words' }, this.compare.node, none.node);
    this.node.append(this.told, buttons);
  }

  update(ticked: readonly RunSummary[]): void {
    const { length } = ticked;
    setShown(this.node, length > 0);
    this.compare.refuse(length < 2 ? 'tick two runs or more' : '');
    const most = length >= MOST_COMPARED ? `, the most that are compared` : '';
    setText(this.told, length === 1 ? '1 run ticked; tick another to compare' : `${length} runs ticked${most}`);
  }

  private readonly told = element('p', { class: 'sl-compare-told', role: 'status' });
  private readonly compare: Action;
}
