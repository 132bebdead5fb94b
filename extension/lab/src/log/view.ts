// What ranks have printed: followed, filtered by rank and text, equal lines folded. Asks only while it is seen.

import type { Api, Printer } from '../api';
import { ProblemError } from '../api';
import { element, setAttributes, setShown, setText } from '../dom';
import { ranksText, wholeText } from '../format';
import { icon } from '../icons';
import { freshId, ProblemText } from '../panel/rows';
import { Poll } from '../poll';
import type { Folded } from './fold';
import { LineFolder } from './fold';

const SECONDS = 1;

export interface OutputOptions {
  /** Lines that are kept. */
  most: number;
  folds: boolean;
}

export class OutputView {
  readonly node = element('div', { class: 'sl-output' });

  constructor(
    private readonly api: Pick<Api, 'output'>,
    private readonly of: Printer,
    private readonly options: OutputOptions
  ) {
    this.folding = options.folds;
    const pause = () => {
      this.paused = !this.paused;
      this.settle();
    };
    const follow = () => {
      this.following = !this.following;
      this.settle();
    };
    const fold = () => {
      this.folding = !this.folding;
      this.again();
    };
    this.pauseButton = toggle('pause', 'Pause', 'Ask for nothing new until it goes on', pause);
    this.followButton = toggle('save', 'Follow', 'Keep the newest line in sight', follow);
    this.foldButton = toggle('lines', 'Fold', 'Show equal lines of several ranks once', fold);
    this.rank.addEventListener('change', this.filter);
    this.match.addEventListener('input', this.filter);
    this.lines.addEventListener('scroll', this.scrolled);
    this.node.append(
      element(
        'div',
        { class: 'sl-output-bar', role: 'group', 'aria-label': 'What of the output is shown' },
        labelled('Rank', this.rank),
        labelled('Lines with', this.match),
        this.foldButton,
        this.followButton,
        this.pauseButton,
        this.count
      ),
      this.problem.node,
      this.lines
    );
    this.settle();
  }

  set visible(visible: boolean) {
    this.seen = visible;
    this.settle();
    // What came while it was hidden has moved the end.
    if (visible) this.toEnd();
  }

  dispose(): void {
    this.seen = false;
    this.poll.dispose();
  }

  /** Takes one answer of the server. */
  readonly look = async (): Promise<void> => {
    const turn = this.turns;
    try {
      const answer = await this.api.output(this.of, { after: this.cursor });
      if (turn !== this.turns) return;
      this.cursor = answer.cursor;
      this.problem.update('');
      for (const { rank } of answer.ranks) this.know(rank);
      this.add(this.folder.feed(answer.ranks, this.folding));
    } catch (error) {
      this.problem.update(error instanceof ProblemError ? error.message : String(error));
    }
    this.tellCount();
  };

  private add(found: readonly Folded[]): void {
    for (const { ranks, text } of found) {
      const line = element('div', { class: 'sl-line' });
      line.append(
        element('span', { class: 'sl-line-ranks' }, ranksText(ranks)),
        element('span', { class: 'sl-line-text' }, text)
      );
      this.kept.push({ ranks, text: text.toLowerCase(), node: line });
      setShown(line, this.shows(ranks, text.toLowerCase()));
      this.lines.append(line);
    }
    for (const { node } of this.kept.splice(0, Math.max(0, this.kept.length - this.options.most))) node.remove();
    if (found.length) this.toEnd();
  }

  private know(rank: number): void {
    if (this.known.has(rank)) return;
    this.known.add(rank);
    const ordered = [...this.known].sort((a, b) => a - b);
    const chosen = this.rank.value;
    this.rank.replaceChildren(
      element('option', { value: '' }, 'all'),
      ...ordered.map(each => element('option', { value: each }, String(each)))
    );
    this.rank.value = chosen;
  }

  private shows(ranks: readonly number[], text: string): boolean {
    const { value } = this.rank;
    return (value === '' || ranks.includes(Number(value))) && text.includes(this.match.value.toLowerCase());
  }

  private readonly filter = () => {
    for (const { ranks, text, node } of this.kept) setShown(node, this.shows(ranks, text));
    this.tellCount();
    this.toEnd();
  };

  private tellCount(): void {
    const shown = this.kept.filter(line => !line.node.hidden).length;
    const all = wholeText(this.kept.length);
    setText(this.count, shown === this.kept.length ? `${all} lines` : `${wholeText(shown)} of ${all} lines`);
    setShown(this.empty, shown === 0);
    setText(this.empty, this.kept.length ? 'No line fits.' : 'Its ranks have printed nothing yet.');
  }

  /** From the end of what there is, folded otherwise. */
  private again(): void {
    this.turns += 1;
    this.cursor = '';
    this.folder = new LineFolder();
    this.kept = [];
    this.lines.replaceChildren(this.empty);
    this.settle();
    void this.look();
  }

  private settle(): void {
    this.poll.on = this.seen && !this.paused;
    setAttributes(this.pauseButton, { 'aria-pressed': String(this.paused) });
    setAttributes(this.followButton, { 'aria-pressed': String(this.following) });
    setAttributes(this.foldButton, { 'aria-pressed': String(this.folding) });
    this.toEnd();
  }

  private toEnd(): void {
    if (this.following && this.seen) this.lines.scrollTop = this.lines.scrollHeight;
  }

  /** Who scrolls up wants to read; who comes back to the end, to follow. */
  private readonly scrolled = () => {
    const { scrollTop, scrollHeight, clientHeight } = this.lines;
    const atEnd = scrollHeight - scrollTop - clientHeight < 24;
    if (atEnd === this.following) return;
    this.following = atEnd;
    setAttributes(this.followButton, { 'aria-pressed': String(atEnd) });
  };

  private seen = false;
  private paused = false;
  private following = true;
  private folding: boolean;
  private cursor = '';
  private turns = 0;
  private folder = new LineFolder();
  private kept: { ranks: number[]; text: string; node: HTMLElement }[] = [];
  private readonly known = new Set<number>();
  private readonly empty = element('p', { class: 'sl-empty' }, 'Its ranks have printed nothing yet.');
  private readonly rank = element('select', { class: 'sl-stages' }, element('option', { value: '' }, 'all'));
  private readonly match = element('input', { type: 'search', class: 'sl-input', placeholder: 'text' });
  private readonly count = element('span', { class: 'sl-count' });
  private readonly problem = new ProblemText();
  private readonly lines = element(
    'div',
    // Followed by eye; said aloud, each line would be one too many.
    { class: 'sl-lines', role: 'log', 'aria-live': 'off', 'aria-label': "Ranks' output", tabindex: 0 },
    this.empty
  );
  private readonly pauseButton: HTMLButtonElement;
  private readonly followButton: HTMLButtonElement;
  private readonly foldButton: HTMLButtonElement;
  private readonly poll = new Poll(this.look, SECONDS);
}

function labelled(text: string, field: HTMLElement): HTMLElement {
  field.id = freshId();
  return element('span', { class: 'sl-field' }, element('label', { for: field.id }, text), field);
}

function toggle(picture: Parameters<typeof icon>[0], word: string, what: string, act: () => void): HTMLButtonElement {
  const button = element('button', { class: 'sl-action', type: 'button', title: what }, icon(picture), word);
  button.addEventListener('click', act);
  return button;
}
