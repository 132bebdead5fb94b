import { element } from './dashboard/dom';

/** Beyond so many letters a fact is a sentence, which may break anywhere. */
const SHORT = 40;

/** Facts with dots between them. A short one stays in one line with its unit, and begins with its dot, which a style
 * sheet puts out of sight where a line begins. */
export function factNodes(facts: readonly string[]): (Node | string)[] {
  return facts.flatMap((fact, number) => {
    const dot = element('span', { class: 'sl-dot' }, '·');
    const node = element('span', { class: fact.length < SHORT ? 'sl-fact' : '' }, dot, ` ${fact}`);
    return number ? [' ', node] : [node];
  });
}
