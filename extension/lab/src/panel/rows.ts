// What rows of the panel have in common: a button that opens them, keys that go from one to the next, problems in place.

import { element, setAttributes, setShown, setText } from '../dom';
import { factNodes } from '../facts';
import type { Icon } from '../icons';
import { icon } from '../icons';
import type { Look } from '../states';

let made = 0;
/** An id that no other element of the page has. */
export const freshId = (): string => `sl-${(made += 1)}`;

/** The head of a row: state, name and facts, as one button that opens what is below. */
export class RowHead {
  readonly node: HTMLButtonElement;

  constructor(body: HTMLElement, toggle: () => void) {
    body.id = freshId();
    const attributes = { class: 'sl-row', type: 'button', 'aria-expanded': 'false', 'aria-controls': body.id };
    const texts = element('span', { class: 'sl-texts' }, this.name, this.word, this.unit, this.facts);
    this.node = element('button', attributes, this.glyph, texts);
    this.node.addEventListener('click', toggle);
  }

  /** `unit`: said before the facts where there is no room to show it. */
  update(name: string, look: Look, facts: string, open: boolean, unit = ''): void {
    setText(this.name, name);
    setText(this.word, `, ${look.word}, `);
    setText(this.unit, unit);
    if (this.told !== facts) {
      this.told = facts;
      this.dotted.replaceChildren(...factNodes(facts ? facts.split(' · ') : []));
    }
    setAttributes(this.node, {
      'aria-expanded': String(open),
      title: `${name} · ${look.word}${facts && ` · ${unit}${facts}`}`
    });
    if (this.shown === look.glyph + look.tone) return;
    this.shown = look.glyph + look.tone;
    setAttributes(this.glyph, { class: `sl-glyph sl-tone-${look.tone}` });
    this.glyph.replaceChildren(icon(look.glyph));
  }

  private shown = '';
  private told = '';
  private readonly glyph = element('span', { class: 'sl-glyph' });
  private readonly name = element('span', { class: 'sl-name' });
  private readonly word = element('span', { class: 'sl-unseen' });
  private readonly unit = element('span', { class: 'sl-unseen' });
  private readonly dotted = element('span', { class: 'sl-dotted' });
  private readonly facts = element('span', { class: 'sl-facts' }, this.dotted);
}

/** Text that says what is wrong, where it is wrong; nothing while it is empty. */
export class ProblemText {
  readonly node = element('p', { class: 'sl-problem', hidden: true });

  constructor() {
    this.node.append(icon('warning'), this.text);
  }

  update(text: string): void {
    setText(this.text, text);
    setShown(this.node, text !== '');
  }

  private readonly text = element('span');
}

/** A button with a picture and a word; why it cannot be used is its tooltip, and what it says when it is used. */
export class Action {
  readonly node: HTMLButtonElement;

  constructor(
    picture: Icon,
    word: string,
    private readonly what: string,
    private readonly act: () => void,
    private readonly refused: (why: string) => void = () => undefined
  ) {
    this.node = element('button', { class: 'sl-action', type: 'button', title: what }, icon(picture), word);
    this.node.addEventListener('click', () => {
      if (this.why) this.refused(this.why);
      else this.act();
    });
  }

  /** '' is that it can be used. It stays in the order of the keys either way, so that the reason can be read. */
  refuse(why: string): void {
    this.why = why;
    setAttributes(this.node, { 'aria-disabled': why ? 'true' : null, title: why ? `${this.what}: ${why}` : this.what });
  }

  private why = '';
}

/** Arrow keys, Home and End go from row to row of a list, which is one stop of the Tab key. */
export class Roving {
  constructor(private readonly list: HTMLElement) {
    list.addEventListener('keydown', this.pressed);
    list.addEventListener('focusin', event => {
      if (event.target instanceof HTMLElement && event.target.matches(ROW)) this.settle(event.target);
    });
  }

  /** After rows came or went. */
  settle(at?: HTMLElement): void {
    const rows = this.rows();
    const here = at ?? rows.find(row => row.tabIndex === 0) ?? rows[0];
    for (const row of rows) {
      setAttributes(row, { tabindex: row === here ? 0 : -1 });
      // What stands beside the row is reached from it.
      for (const tick of row.parentElement?.querySelectorAll(':scope > .sl-tick') ?? [])
        setAttributes(tick, { tabindex: row === here ? 0 : -1 });
    }
  }

  private readonly pressed = (event: KeyboardEvent) => {
    const rows = this.rows();
    const at = rows.findIndex(row => row === event.target);
    if (at < 0) return;
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key];
    const row = to === undefined ? undefined : rows[to];
    if (!row) return;
    event.preventDefault();
    row.focus();
  };

  private readonly rows = () => [...this.list.querySelectorAll<HTMLElement>(ROW)];
}

const ROW = '.sl-row';
