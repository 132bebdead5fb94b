import type { Figure, Note, Shape, Trace } from '../dashboard/figures';
import type { ComparedRun } from '../messages';

/** What of the runs is shown: which are hidden, by number, and on which ground. */
export interface Shown {
  runs: readonly ComparedRun[];
  hidden: ReadonlySet<number>;
  dark: boolean;
}

/** Pixels below an axis of steps, for its numbers and its title. */
const BELOW = 50;

/** The colour of a run on the ground it is shown on. */
export const colourOf = (run: ComparedRun | undefined, dark: boolean): string =>
  run?.colours[dark ? 1 : 0] ?? '#888888';

/** '1 · name', as in the figures. */
export const labelOf = (run: ComparedRun, number: number): string => `${number + 1} · ${run.name}`;

/** The figure without what is hidden, each run in its colour. Bars stand in the order of the runs. */
export function figureOf({ data, layout }: Figure, { runs, hidden, dark }: Shown): Figure {
  const seen = (part: { name?: string }) => part.name === undefined || !hidden.has(Number(part.name));
  const colour = (number: unknown) => colourOf(runs[Number(number)], dark);
  const overSteps = data.some(trace => trace['legendgroup'] !== undefined);
  const traces = data.flatMap((trace): Trace[] => {
    const number = trace['legendgroup'];
    if (number === undefined) return [without(trace, hidden)];
    if (hidden.has(Number(number))) return [];
    const marker = trace.marker && { marker: { ...trace.marker, color: colour(number) } };
    return [{ ...trace, line: { ...trace.line, color: colour(number) }, ...marker }];
  });
  const shapes = layout.shapes
    .filter(seen)
    .map((shape): Shape => ({ ...shape, line: { ...shape.line, color: colour(shape.name) } }));
  const annotations = layout.annotations
    .filter(note => seen(note as { name?: string }))
    .map((note): Note => ({ ...note, font: { ...(note['font'] as object), color: colour(note['name']) } }));
  // The buttons above are the legend of the curves, which need no room for one below.
  const legend = overSteps && { showlegend: false, margin: { ...(layout['margin'] as object), b: BELOW } };
  return { data: traces, layout: { ...layout, shapes, annotations, ...legend } };
}

function without(bars: Trace, hidden: ReadonlySet<number>): Trace {
  const left = <Item>(items: readonly Item[]): Item[] => items.filter((_, number) => !hidden.has(number));
  const text = Array.isArray(bars['text']) && { text: left(bars['text']) };
  return { ...bars, x: left([...(bars.x as string[])]), y: Float32Array.from(left([...bars.y].map(Number))), ...text };
}
