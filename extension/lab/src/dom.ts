// Elements without markup: text from anywhere is text, whatever it holds.

export type Child = Node | string | null | false;

/** Attributes of an element; a boolean one is there or not, one that is null is left out. */
export type Attributes = Record<string, string | number | boolean | null>;

/** An element with attributes and children; strings become text. */
export function element<Name extends keyof HTMLElementTagNameMap>(
  name: Name,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[Name] {
  const made = document.createElement(name);
  setAttributes(made, attributes);
  for (const child of children) if (child !== null && child !== false) made.append(child);
  return made;
}

const SVG = 'http://www.w3.org/2000/svg';

/** The same for SVG. */
export function svg(name: string, attributes: Attributes = {}, ...children: Child[]): SVGElement {
  const made = document.createElementNS(SVG, name);
  setAttributes(made, attributes);
  for (const child of children) if (child !== null && child !== false) made.append(child);
  return made;
}

/** Sets what differs, so that a screen reader hears of nothing that stays. */
export function setAttributes(of: Element, attributes: Attributes): void {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false) of.removeAttribute(name);
    else if (of.getAttribute(name) !== (value === true ? '' : String(value)))
      of.setAttribute(name, value === true ? '' : String(value));
  }
}

/** Sets the text where it differs. */
export function setText(of: Element, text: string): void {
  if (of.textContent !== text) of.textContent = text;
}

/** Shows or hides, where that differs. */
export function setShown(of: HTMLElement, shown: boolean): void {
  if (of.hidden === shown) of.hidden = !shown;
}

/** Shows one in the place of the other, which gives it the focus: who works by keys keeps the place. */
export function showInstead(shown: HTMLElement, hidden: HTMLElement): void {
  setShown(shown, true);
  if (document.activeElement === hidden) shown.focus();
  setShown(hidden, false);
}

/** Something that shows an item and takes in what is new of it. */
export interface Row<Item> {
  readonly node: HTMLElement;
  update(item: Item): void;
  dispose?(): void;
}

/** Rows of a list by key: what stays is kept with its focus, and moved only where the order has changed. */
export class Rows<Item, Kind extends Row<Item> = Row<Item>> {
  constructor(
    private readonly parent: HTMLElement,
    private readonly key: (item: Item) => string,
    private readonly make: (item: Item) => Kind
  ) {}

  update(items: readonly Item[]): void {
    const wanted = new Set(items.map(this.key));
    for (const [key, row] of this.rows) {
      if (wanted.has(key)) continue;
      row.node.remove();
      row.dispose?.();
      this.rows.delete(key);
    }
    let before: ChildNode | null = this.parent.firstChild;
    for (const item of items) {
      const key = this.key(item);
      let row = this.rows.get(key);
      if (!row) this.rows.set(key, (row = this.make(item)));
      if (row.node === before) before = before.nextSibling;
      else this.parent.insertBefore(row.node, before);
      row.update(item);
    }
  }

  get(key: string): Kind | undefined {
    return this.rows.get(key);
  }

  private readonly rows = new Map<string, Kind>();
}
