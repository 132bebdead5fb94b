import { inked, PAPER } from './colours';
import { element } from './dom';
import type { Figure } from './figures';
import type { Plotly } from './plotly';

const CELL = { width: 620, height: 370, top: 44 };
const SVG = 'http://www.w3.org/2000/svg';

interface Cells {
  images: { uri: string; x: number; y: number }[];
  width: number;
  height: number;
}

/** What is put into a picture. */
export interface Pictured {
  /** Two beside each other. */
  cards: Figure[];
  /** Below them, across both columns. */
  wide: Figure[];
  /** What is said where a figure has nothing to draw. */
  empty?: string;
}

async function cells(plotly: Plotly, figures: Pictured, format: 'png' | 'svg'): Promise<Cells> {
  const images: Cells['images'] = [];
  let bottom = CELL.top + Math.ceil(figures.cards.length / 2) * CELL.height;
  for (const [i, figure] of [...figures.cards, ...figures.wide].entries()) {
    const { data, layout } = inked(figure, PAPER, figures.empty);
    const wide = i >= figures.cards.length;
    const height = wide ? (layout.height ?? CELL.height) : CELL.height;
    const size = { width: wide ? 2 * CELL.width : CELL.width, height };
    const uri = await plotly.toImage({ data, layout: { ...layout, ...size } }, { format, ...size });
    images.push({
      uri,
      x: wide ? 0 : (i % 2) * CELL.width,
      y: wide ? bottom : CELL.top + Math.floor(i / 2) * CELL.height
    });
    if (wide) bottom += height;
  }
  return { images, width: 2 * CELL.width, height: bottom };
}

/** All figures as one picture with a title, dark on white. */
export async function pngPicture(plotly: Plotly, figures: Pictured, title: string): Promise<Blob> {
  const { images, width, height } = await cells(plotly, figures, 'png');
  const canvas = Object.assign(element('canvas'), { width, height });
  const context = canvas.getContext('2d');
  if (!context) throw new Error('this browser has no canvas');
  context.fillStyle = PAPER.card;
  context.fillRect(0, 0, width, height);
  context.fillStyle = PAPER.ink;
  context.font = '600 17px system-ui, sans-serif';
  context.fillText(title, 14, 28, width - 28);
  for (const { uri, x, y } of images) {
    const image = new Image();
    image.src = uri;
    await image.decode();
    context.drawImage(image, x, y);
  }
  return new Promise((done, failed) =>
    canvas.toBlob(blob => (blob ? done(blob) : failed(new Error('it is too large'))), 'image/png')
  );
}

/** The same as a drawing. */
export async function svgPicture(plotly: Plotly, figures: Pictured, title: string): Promise<Blob> {
  const { images, width, height } = await cells(plotly, figures, 'svg');
  const size = { width: String(width), height: String(height) };
  const root = drawn('svg', { ...size, viewBox: `0 0 ${width} ${height}` });
  // A long title is smaller: its end tells the run's state.
  const letters = String(Math.min(17, (width - 28) / (0.6 * Math.max(1, title.length))));
  const words = drawn('text', { x: '14', y: '28', fill: PAPER.ink, 'font-size': letters, 'font-family': 'sans-serif' });
  words.textContent = title;
  root.append(drawn('rect', { ...size, fill: PAPER.card }), words);
  for (const { uri, x, y } of images) {
    const source = decodeURIComponent(uri.slice(uri.indexOf(',') + 1));
    const inner = new DOMParser().parseFromString(source, 'image/svg+xml').documentElement;
    inner.setAttribute('x', String(x));
    inner.setAttribute('y', String(y));
    root.append(document.importNode(inner, true));
  }
  return new Blob([new XMLSerializer().serializeToString(root)], { type: 'image/svg+xml' });
}

function drawn(tag: string, attributes: Record<string, string>): SVGElement {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

/** Hands a file to the person. */
export function save(blob: Blob, name: string): void {
  const url = URL.createObjectURL(blob);
  element('a', { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
