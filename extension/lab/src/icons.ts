// Small pictures, drawn here so that they look alike with every font. They say nothing alone: a word stands beside each.

import { svg } from './dom';

const PATHS = {
  dot: 'M8 3a5 5 0 1 0 0 10a5 5 0 0 0 0-10z',
  ring: 'M8 2.5a5.5 5.5 0 1 0 0 11a5.5 5.5 0 0 0 0-11zm0 1.8a3.7 3.7 0 1 1 0 7.4a3.7 3.7 0 0 1 0-7.4z',
  pause: 'M4 3h3v10H4zM9 3h3v10H9z',
  play: 'M4.5 2.8v10.4L13 8z',
  step: 'M3 2.8v10.4L9.5 8zM10.5 3h2.5v10h-2.5z',
  stop: 'M3.5 3.5h9v9h-9z',
  save: 'M7.1 2h1.8v5.2h2.6L8 11L4.5 7.2h2.6zM3 12.2h10V14H3z',
  check: 'M6.4 12.9L2 8.5l1.5-1.5l2.9 2.9L12.6 3.4L14 4.9z',
  cross: 'M3.9 2.5L8 6.6l4.1-4.1l1.4 1.4L9.4 8l4.1 4.1l-1.4 1.4L8 9.4l-4.1 4.1l-1.4-1.4L6.6 8L2.5 3.9z',
  warning: 'M8 1.5L15.2 14H.8zM7.2 6v4.2h1.6V6zm0 5.2v1.6h1.6v-1.6z',
  chart: 'M2 2h1.7v10.3H14V14H2zM5 9l2.6-3.4l2.2 1.8L13 3.6l1.2 1l-4.1 4.9l-2.2-1.8L6.2 10z',
  lines: 'M2 3h12v1.7H2zM2 7.1h12v1.7H2zM2 11.3h8V13H2z',
  plus: 'M7.1 2h1.8v5.1H14v1.8H8.9V14H7.1V8.9H2V7.1h5.1z',
  fold: 'M4 6.2L5.2 5L8 7.8L10.8 5L12 6.2L8 10.2z'
} as const;

export type Icon = keyof typeof PATHS;

/** A picture that only eyes are told of. */
export function icon(name: Icon): SVGElement {
  const attributes = {
    class: `sl-icon sl-icon-${name}`,
    viewBox: '0 0 16 16',
    'aria-hidden': 'true',
    focusable: 'false'
  };
  return svg('svg', attributes, svg('path', { d: PATHS[name], 'fill-rule': 'evenodd' }));
}

/** The mark of the extension, for tabs and cards: bars of memory, the colours of the page. */
export const MARK =
  '<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 16 16"><g class="jp-icon3" fill="#616161">' +
  '<path d="M1.5 9.5h3v5h-3zM6.5 6h3v8.5h-3zM11.5 1.5h3v13h-3z"/></g></svg>';
