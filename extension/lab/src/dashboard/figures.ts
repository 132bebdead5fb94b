import type { Changes, Compared, Comparison, HeadLine, Keyframe } from '../messages';

/** What of a plotly trace is looked at here. */
export interface Trace {
  name: string;
  x: Float32Array | string[];
  y: Float32Array | string[];
  yaxis?: string;
  meta?: string;
  line?: Record<string, unknown>;
  marker?: Record<string, unknown>;
  [key: string]: unknown;
}

export interface Axis {
  title?: { text: string };
  type?: string;
  ticktext?: string[];
  [key: string]: unknown;
}

export interface Shape {
  name?: string;
  line?: Record<string, unknown>;
  [key: string]: unknown;
}

export interface Note {
  text: string;
  [key: string]: unknown;
}

export interface Layout {
  title: { text: string; font?: object };
  xaxis: Axis;
  yaxis: Axis;
  yaxis2?: Axis;
  font?: Record<string, unknown>;
  height?: number;
  shapes: Shape[];
  annotations: Note[];
  /** Of bars of memory: see BarsMeta. */
  meta?: unknown;
  [key: string]: unknown;
}

export interface Figure {
  data: Trace[];
  layout: Layout;
}

/** What a source brings: at first everything of a run, or of several, and then what is new. */
export type Drawn = Keyframe | Comparison | Changes;

/** Numbers as they travel: float32, one after another. */
export type Buffer = ArrayBuffer | ArrayBufferView;

/** Figures over steps, which all wear the marks of events. */
const STEP_FIGURES = ['loss', 'throughput', 'anatomy', 'gradient', 'exchange'];

/** A message and its buffers out of one binary frame (speedlab_server/figure_socket.py). */
export function readFrame(frame: ArrayBuffer): [Drawn, Buffer[]] {
  const length = new DataView(frame).getUint32(0, true);
  const head = new TextDecoder().decode(new Uint8Array(frame, 4, length));
  const message = JSON.parse(head) as Drawn;
  const buffers: Buffer[] = [];
  let at = 4 + length;
  for (const size of message.buffers) {
    buffers.push(frame.slice(at, at + size));
    at += size;
  }
  if (at !== frame.byteLength) throw new Error(`a frame of ${frame.byteLength} bytes tells of ${at}`);
  return [message, buffers];
}

function floats(buffer: Buffer | undefined): Float32Array {
  if (buffer === undefined) throw new Error('a message points to numbers that it does not bring');
  if (!ArrayBuffer.isView(buffer)) return new Float32Array(buffer);
  // A copy: a part of a larger buffer may begin anywhere.
  return new Float32Array(buffer.buffer.slice(buffer.byteOffset, buffer.byteOffset + buffer.byteLength) as ArrayBuffer);
}

/** Text for plotly, which makes markup of it: only what our own figures use of that stays markup. A quote, which
 * Python escapes, is a quote: plotly does not know its name. */
export function harmless(text: string): string {
  return text.replace(/<(?!(br|\/?b|\/?extra)>)/g, '&lt;').replace(/&quot;/g, '"');
}

const ENTITIES: Record<string, string> = { lt: '<', gt: '>', quot: '"', amp: '&', '#x27': "'", '#39': "'" };

/** Plotly's text as plain text. */
export function plainText(markup: string): string {
  const bare = markup.replace(/<br>/g, ', ').replace(/<\/?b>/g, '');
  return bare.replace(/&(lt|gt|quot|amp|#x27|#39);/g, (_, name: string) => ENTITIES[name] ?? '');
}

/** `value` with its arrays in the place of {"f32": number}, and every text harmless. */
export function unpack(value: unknown, buffers: Buffer[]): unknown {
  if (typeof value === 'string') return harmless(value);
  if (Array.isArray(value)) return value.map(item => unpack(item, buffers));
  if (value === null || typeof value !== 'object') return value;
  if ('f32' in value) return floats(buffers[Number(value.f32)]);
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, unpack(item, buffers)]));
}

function joined(before: Float32Array | string[], after: Float32Array): Float32Array {
  const both = new Float32Array(before.length + after.length);
  both.set(before as Float32Array);
  both.set(after, before.length);
  return both;
}

/** The figures of a run as a page has them. Pure data: nothing is drawn here. */
export class Figures {
  figures: Record<string, Figure> = {};
  head: HeadLine = { text: '', state: '', mark: '', note: '' };
  /** Of several runs, what stands beside the figures. */
  compared: Compared | null = null;
  /** Of the last message that was taken; -1 before any. */
  seq = -1;
  /** Whether the source begins with the model states alone; null while nothing is known. */
  states: boolean | null = null;
  /** Whether something was missed, and a keyframe is waited for. */
  gap = false;

  /** Takes a message; returns the names of the figures that it has changed. */
  take(message: Drawn, buffers: Buffer[]): string[] {
    return message.type === 'Changes' ? this.takeChanges(message, buffers) : this.takeAll(message, buffers);
  }

  private takeAll(frame: Keyframe | Comparison, buffers: Buffer[]): string[] {
    const before = Object.keys(this.figures);
    this.figures = unpack(frame.figures, buffers) as Record<string, Figure>;
    if (frame.type === 'Comparison') this.compared = frame.compared;
    else [this.head, this.states] = [frame.head, frame.states];
    this.seq = frame.seq;
    this.gap = false;
    return [...new Set([...before, ...Object.keys(this.figures)])];
  }

  private takeChanges(changes: Changes, buffers: Buffer[]): string[] {
    if (changes.seq <= this.seq) return [];
    if (this.gap || changes.seq !== this.seq + 1) {
      this.gap = true;
      return [];
    }
    this.seq = changes.seq;
    return changes.parts.flatMap(part => this.takePart(part, buffers));
  }

  private takePart(part: Changes['parts'][number], buffers: Buffer[]): string[] {
    switch (part.part) {
      case 'figure':
        this.figures[part.figure] = unpack({ data: part.data, layout: part.layout }, buffers) as Figure;
        return [part.figure];
      case 'extend':
        this.extend(part.figure, part.traces, part.points, floats(buffers[part.buffer]));
        return [part.figure];
      case 'bars':
        this.raise(part.figure, part.notes, floats(buffers[part.buffer]));
        return [part.figure];
      case 'marks': {
        const marks = unpack({ shapes: part.shapes, annotations: part.annotations }, []);
        const marked = STEP_FIGURES.filter(name => this.figures[name]);
        for (const name of marked) Object.assign(this.figure(name).layout, marks);
        return marked;
      }
      case 'head':
        this.head = part;
        return [];
      case 'compared':
        this.compared = part;
        return [];
    }
  }

  private figure(name: string): Figure {
    const figure = this.figures[name];
    if (!figure) throw new Error(`there is no figure ${name}`);
    return figure;
  }

  private extend(name: string, traces: number[], points: number[], values: Float32Array): void {
    const { data } = this.figure(name);
    let at = 0;
    traces.forEach((index, i) => {
      const trace = data[index];
      const count = points[i] ?? 0;
      if (!trace) throw new Error(`figure ${name} has no curve ${index}`);
      trace.x = joined(trace.x, values.subarray(at, at + count));
      trace.y = joined(trace.y, values.subarray(at + count, at + 2 * count));
      at += 2 * count;
    });
  }

  private raise(name: string, notes: string[], values: Float32Array): void {
    const { data, layout } = this.figure(name);
    const width = values.length / data.length;
    data.forEach((trace, i) => {
      trace.y = values.subarray(i * width, (i + 1) * width);
    });
    layout.annotations = layout.annotations.map((note, i) => ({ ...note, text: harmless(notes[i] ?? '') }));
  }
}
