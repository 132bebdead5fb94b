import type { Draw, Tensors } from '../messages';
import type { Buffer, Drawn } from './figures';
import type { Part } from './tensors';

/** Who takes what a source brings. */
export interface Taker {
  /** A problem that was told is over with it. */
  onMessage(message: Drawn, buffers: Buffer[]): void;
  /** Why nothing comes, and what to do; '' when it comes again. */
  onProblem(text: string): void;
}

export type Wish = Pick<Draw, 'watching' | 'keyframe' | 'step' | 'smoothing'>;

/** Where a dashboard has its figures from: the Jupyter server, or a widget of a kernel. */
export interface Source {
  start(taker: Taker): void;
  /** Says how the run is to be drawn from now on. */
  ask(wish: Wish): void;
  /** What is in a segment of the memory bars; rejected with what keeps it from being known. */
  tensors(part: Part): Promise<Tensors>;
  /** Ends it for good. */
  close(): void;
}
