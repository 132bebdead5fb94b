/** An element with attributes and children; texts are texts, never markup. */
export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Record<string, string> = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** Of an element that has the focus, where arrows and Escape are its own: a notebook around it would take them. */
export const OWN_KEYS = { 'data-lm-suppress-shortcuts': 'true' } as const;
