// What ranks print, as the server sends it: followed, filtered by rank and text, equal lines folded. Only while it is seen.

import type { Printer } from '../api';
import { element, setAttributes, setShown, setText } from '../dom';
import { ranksText, wholeText } from '../format';
import { icon } from '../icons';
import type { Listening, Live, News } from '../live';
import type { RankLines } from '../messages';
import { freshId, ProblemText } from '../panel/rows';
import type { Folded } from './fold';
import { LineFolder } from './fold';

/** A line waits for its like of other ranks once or twice as long. */
const AGE_MS = 300;

export interface OutputOptions {
  /** Lines that are kept. */
  most: number;
  folds: boolean;
}

export class OutputView {
  readonly node = element('div', { class: 'sl-output' });

  constructor(
    private readonly live: Pick<Live, 'listen' | 'trouble'>,
    private readonly of: Printer,
    private readonly options: OutputOptions
  ) {
    this.folding = options.folds;
    this.listening = live.listen(this.heard);
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
    this.pauseButton = toggle('pause', 'Pause', 'Nothing new comes until it goes on', pause);
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
    this.listening.dispose();
    clearTimeout(this.timer);
  }

  private readonly heard = (news: News) => {
    // What was on its way when it was paused comes again when it goes on.
    const mine = this.wanted ? news.outputs.filter(each => each.kind === this.of.kind && each.id === this.of.id) : [];
    for (const { output, problem } of mine) {
      this.said = problem ?? this.said;
      if (output) this.take(output.ranks);
    }
    this.problem.update(this.live.trouble || this.said);
  };

  private take(told: readonly RankLines[]): void {
    for (const { rank, lines, skipped } of told) {
      this.know(rank);
      this.raw.push({ rank, lines, skipped });
      this.rawLines += lines.length;
    }
    // Enough to fold otherwise what is shown.
    while (this.rawLines > this.options.most * Math.max(1, this.known.size)) {
      this.rawLines -= this.raw.shift()?.lines.length ?? this.rawLines;
    }
    this.add(this.folder.feed(told, this.folding));
    this.age();
  }

  /** While lines wait for their like. */
  private age(): void {
    this.tellCount();
    if (this.timer !== undefined || !this.folder.waits) return;
    this.timer = setTimeout(() => {
      this.timer = undefined;
      this.add(this.folder.age(this.folding));
      this.age();
    }, AGE_MS);
  }

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

  /** What is here, folded otherwise. */
  private again(): void {
    this.folder = new LineFolder();
    this.kept = [];
    this.lines.replaceChildren(this.empty);
    this.add(this.folder.feed(this.raw, this.folding));
    this.age();
    this.settle();
  }

  private get wanted(): boolean {
    return this.seen && !this.paused;
  }

  private settle(): void {
    this.listening.want(this.wanted ? { outputs: [this.of] } : {});
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
  private said = '';
  private timer: ReturnType<typeof setTimeout> | undefined;
  /** As it came, for as many lines as may be shown. */
  private readonly raw: RankLines[] = [];
  private rawLines = 0;
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
  private readonly listening: Listening;
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
