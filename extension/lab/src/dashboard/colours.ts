import type { Axis, Figure, Layout } from './figures';

/** The colours, and the letters, of the place that a figure is drawn in. */
export interface Colours {
  family: string;
  ink: string;
  line: string;
  card: string;
}

export const PAPER: Colours = { family: 'system-ui, sans-serif', ink: '#1c2530', line: '#dde2e8', card: '#ffffff' };

export function pageColours(element: HTMLElement): Colours {
  const style = getComputedStyle(element);
  const read = (name: string) => style.getPropertyValue(name).trim();
  return { family: style.fontFamily, ink: read('--sl-ink'), line: read('--sl-line'), card: read('--sl-card') };
}

/** Whether a colour as the browser computes it, rgb(…), is a dark one. */
export function isDark(colour: string): boolean {
  const [red = 255, green = 255, blue = 255] = (colour.match(/[\d.]+/g) ?? []).map(Number);
  return 0.299 * red + 0.587 * green + 0.114 * blue < 128;
}

/** In the place of axes that would count from -1 to 6, of nothing. */
const nothing = (text: string) => ({
  showlegend: false,
  shapes: [],
  annotations: [{ text, x: 0.5, y: 0.5, xref: 'paper', yref: 'paper', showarrow: false }]
});

/** The figure in these colours: what Python calls "ink" is drawn in that of the text. `empty`: what is said where there
 * is nothing to draw. */
export function inked(
  { data, layout }: Figure,
  { family, ink, line, card }: Colours,
  empty = 'begins with the first step'
): Figure {
  const axes = Object.keys(layout).filter(key => /^[xy]axis/.test(key));
  const visible = data.some(trace => trace.x.length > 0);
  const coloured = axes.map(key => {
    const axis = layout[key] as Axis;
    const title = axis.title && { title: { ...axis.title, font: { size: 12 } } };
    return [key, { ...axis, ...title, visible, gridcolor: line, linecolor: line, zerolinecolor: line }];
  });
  const inkedData = data.map(trace => {
    if (trace.meta !== 'ink') return trace;
    const marker = trace.marker && { marker: { ...trace.marker, color: ink } };
    return { ...trace, line: { ...trace.line, color: ink }, ...marker };
  });
  const inkedLayout: Layout = {
    ...layout,
    ...(Object.fromEntries(coloured) as Pick<Layout, 'xaxis' | 'yaxis'>),
    font: { ...layout.font, color: ink, family },
    title: { ...layout.title, font: { size: 13, weight: 600 } },
    hoverlabel: { bgcolor: card, bordercolor: line, font: { color: ink, family } },
    modebar: { color: ink, activecolor: ink, bgcolor: 'rgba(0,0,0,0)' },
    shapes: layout.shapes.map(shape =>
      shape.name === 'ink' ? { ...shape, line: { ...shape.line, color: ink } } : shape
    )
  };
  return { data: inkedData, layout: visible ? inkedLayout : { ...inkedLayout, ...nothing(empty) } };
}
