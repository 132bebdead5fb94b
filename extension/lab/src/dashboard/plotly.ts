import type { Trace, Layout } from './figures';

/** What of plotly is used here. */
export interface Plotly {
  react(place: HTMLElement, data: Trace[], layout: Layout, config: object): Promise<unknown>;
  purge(place: HTMLElement): void;
  toImage(figure: { data: Trace[]; layout: Layout }, options: object): Promise<string>;
  Plots: { resize(place: HTMLElement): Promise<unknown> | undefined };
}

/** An element that plotly has drawn in. */
export type Plotted = HTMLElement & {
  on?(name: 'plotly_click' | 'plotly_hover' | 'plotly_unhover', callback: (event: { points: Point[] }) => void): void;
};

/** What an event tells of a point. */
export interface Point {
  x: number;
  curveNumber: number;
  pointNumber: number;
}

export const CONFIG = {
  displaylogo: false,
  showSendToCloud: false,
  responsive: true,
  modeBarButtonsToRemove: ['sendChartToCloud', 'sendDataToCloud', 'lasso2d', 'select2d', 'toImage', 'downloadJson']
};
