import { VERSION } from '../messages';
import type { Changes, Draw, Keyframe, Problem } from '../messages';
import type { Buffer } from './figures';
import type { Source, Taker, Wish } from './source';

/** What of an anywidget's model is used here. */
export interface Model {
  get(name: string): unknown;
  on(name: string, callback: (...given: never[]) => void): void;
  off(name: string, callback: (...given: never[]) => void): void;
  send(content: unknown): void;
  widget_manager: { get_model(id: string): Promise<Model> };
}

/** A kernel that a view has heard nothing from is told again that it is watched. */
const ALIVE_MS = 20_000;

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
  }

  ask(wish: Wish): void {
    this.wish = wish;
    this.say(wish);
  }

  close(): void {
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
    const packed = this.model.get('keyframe') as { message?: Keyframe; buffers?: Buffer[] };
    if (!packed.message) return;
    this.gone = false;
    this.taker?.onMessage(packed.message, packed.buffers ?? []);
  };

  private readonly onMessage = (message: Changes | Problem, buffers: Buffer[]): void => {
    this.gone = false;
    if (message.type === 'Problem') this.taker?.onProblem(message.text);
    else this.taker?.onMessage(message, buffers);
  };

  private readonly onGone = (): void => {
    this.gone = true;
    this.taker?.onProblem('The kernel that drew this has ended or was restarted. Run the cell again.');
  };

  private taker: Taker | null = null;
  private wish: Wish = { watching: false };
  private gone = false;
  private alive: ReturnType<typeof setInterval> | undefined;
}
