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
  on?(name: 'plotly_hover' | 'plotly_unhover', callback: (event: { points: { x: number }[] }) => void): void;
};

export const CONFIG = {
  displaylogo: false,
  showSendToCloud: false,
  responsive: true,
  modeBarButtonsToRemove: ['sendChartToCloud', 'sendDataToCloud', 'lasso2d', 'select2d', 'toImage', 'downloadJson']
};
