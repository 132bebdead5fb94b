import { VERSION } from '../messages';
import type { Changes, Draw, Keyframe, OwnDrawing, Problem, Segment, Tensors } from '../messages';
import type { Source, Taker, Wish } from './source';
import type { Part } from './tensors';

/** What of an anywidget's model is used here. */
export interface Model {
  get(name: string): unknown;
  on(name: string, callback: (...given: never[]) => void): void;
  off(name: string, callback: (...given: never[]) => void): void;
  send(content: unknown): void;
  /** Only of a model that the manager gives: anywidget hides it of the view's own. */
  comm_live?: boolean;
  widget_manager: { get_model(id: string): Promise<Model> };
}

/** Bytes as kernels send them: Jupyter servers that have their kernels from a gateway fail at binary messages. */
export function bytesOf(text: string): ArrayBuffer {
  return Uint8Array.from(atob(text), letter => letter.charCodeAt(0)).buffer;
}

/** The id of the model that a trait refers to. */
export function bundleId(reference: string): string {
  return reference.replace('IPY_MODEL_', '');
}

const GONE = 'The kernel that drew this has ended or was restarted. Run the cell again.';
/** A kernel that does not answer for so long is busy, or is no more. */
const ANSWER_MS = 10_000;

/** A kernel that a view has heard nothing from is told again that it is watched. */
const ALIVE_MS = 20_000;

/** What a kernel says, with what would be its buffers. */
type Told = (Changes | OwnDrawing | Problem | Tensors) & { buffers_as_text?: string[] };

/** A run as a kernel draws it, for places whose server does not. */
export class ModelSource implements Source {
  constructor(
    private readonly model: Model,
    private readonly view: string
  ) {}

  start(taker: Taker): void {
    this.taker = taker;
    this.model.on('change:keyframe', this.onKeyframe);
    this.model.on('msg:custom', this.onMessage);
    this.model.on('comm:close', this.onGone);
    this.model.on('comm_live_update', this.onGone);
    this.alive = setInterval(() => this.say({ ...this.wish, keyframe: false }), ALIVE_MS);
    this.onKeyframe();
    void this.lookForKernel();
  }

  /** A view that is made anew after a restart hears of none: the models of the old kernel are still there, without it.
   * The one that all dashboards of a kernel share tells whether it lives. */
  private async lookForKernel(): Promise<void> {
    const bundle = this.model.get('bundle');
    if (typeof bundle !== 'string') return;
    const shared = await this.model.widget_manager.get_model(bundleId(bundle));
    if (shared.comm_live === false) this.onGone();
  }

  ask(wish: Wish): void {
    this.wish = wish;
    this.say(wish);
  }

  tensors(part: Part): Promise<Tensors> {
    if (this.gone) return Promise.reject(new Error(GONE));
    return new Promise((found, failed) => {
      const timer = setTimeout(() => {
        this.waiters.delete(waiter);
        failed(new Error('The kernel does not answer: a cell may keep it busy. Choose the segment again.'));
      }, ANSWER_MS);
      const waiter = { part, found, failed, timer };
      this.waiters.add(waiter);
      const segment: Segment = { type: 'Segment', version: VERSION, ...part };
      this.model.send(segment);
    });
  }

  private answer(told: Tensors): void {
    for (const waiter of this.waiters) {
      const { rank, category, place } = waiter.part;
      if (told.rank !== rank || told.category !== category || told.place !== place) continue;
      clearTimeout(waiter.timer);
      this.waiters.delete(waiter);
      waiter.found(told);
    }
  }

  /** Nobody waits for tensors any longer: they are told why. */
  private refuse(text: string): void {
    const waiting = [...this.waiters];
    this.waiters.clear();
    for (const { timer, failed } of waiting) {
      clearTimeout(timer);
      failed(new Error(text));
    }
  }

  close(): void {
    this.refuse('The dashboard was closed.');
    clearInterval(this.alive);
    this.say({ watching: false });
    this.model.off('change:keyframe', this.onKeyframe);
    this.model.off('msg:custom', this.onMessage);
    this.model.off('comm:close', this.onGone);
    this.model.off('comm_live_update', this.onGone);
  }

  private say(wish: Wish): void {
    if (this.gone) return; // Nobody is there, and the console would fill with "Cannot send".
    const draw: Draw = { type: 'Draw', version: VERSION, view: this.view, ...wish };
    this.model.send(draw);
  }

  private readonly onKeyframe = (): void => {
    const packed = this.model.get('keyframe') as { message?: Keyframe; buffers?: string[] };
    if (!packed.message || this.own) return;
    this.gone = false;
    this.taker?.onMessage(packed.message, (packed.buffers ?? []).map(bytesOf));
  };

  private readonly onMessage = (message: Told): void => {
    this.gone = false;
    const buffers = (message.buffers_as_text ?? []).map(bytesOf);
    if (message.type === 'Tensors') this.answer(message);
    else if (message.type === 'Problem') this.onProblem(message.text);
    else if (message.type === 'Changes') {
      if (!this.own) this.taker?.onMessage(message, buffers);
    } else if (message.view === this.view) {
      this.own = true;
      this.taker?.onMessage(message.drawn, buffers);
    }
  };

  /** It does not tell of which question it is, or whether of any; '' is that an earlier one is over. */
  private onProblem(text: string): void {
    if (text) this.refuse(text);
    this.taker?.onProblem(text);
  }

  private readonly onGone = (): void => {
    if (this.gone) return;
    this.gone = true;
    this.refuse(GONE);
    this.taker?.onProblem(GONE);
  };

  private readonly waiters = new Set<{
    part: Part;
    found: (told: Tensors) => void;
    failed: (why: Error) => void;
    timer: ReturnType<typeof setTimeout>;
  }>();
  private taker: Taker | null = null;
  private wish: Wish = { watching: false };
  private gone = false;
  /** Whether the kernel draws for this view alone: what is for all views is not for it any more. */
  private own = false;
  private alive: ReturnType<typeof setInterval> | undefined;
}
