import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';

import { Api } from '../api';
import { VERSION } from '../messages';
import type { Draw, Problem, Tensors } from '../messages';
import { Socket } from '../socket';
import { readFrame } from './figures';
import type { Source, Taker, Wish } from './source';
import type { Part } from './tensors';

/** The address of a run's drawing on the server. */
export function drawingUrl(run: string, settings: ServerConnection.ISettings): string {
  return withToken(
    URLExt.join(settings.wsUrl, 'speedlab', 'api', 'runs', encodeURIComponent(run), 'drawing'),
    settings
  );
}

/** A websocket has no headers of ours. */
export function withToken(url: string, settings: ServerConnection.ISettings): string {
  const token = settings.appendToken && settings.token ? `?token=${encodeURIComponent(settings.token)}` : '';
  return url + token;
}

/** A run as the Jupyter server draws it: no kernel is asked. */
export class ServerSource implements Source {
  constructor(
    protected readonly run: string,
    protected readonly settings: ServerConnection.ISettings
  ) {}

  start(taker: Taker): void {
    const { WebSocket: Wire } = this.settings;
    this.socket = new Socket(
      this.url(),
      {
        onOpen: () => {
          taker.onProblem('');
          this.say();
        },
        onMessage: data => {
          if (typeof data === 'string') taker.onProblem((JSON.parse(data) as Problem).text);
          else taker.onMessage(...readFrame(data));
        },
        onLost: text => taker.onProblem(text)
      },
      url => new Wire(url)
    );
  }

  ask(wish: Wish): void {
    this.wish = wish;
    this.say();
  }

  tensors(part: Part): Promise<Tensors> {
    const api = new Api((way, init) =>
      ServerConnection.makeRequest(URLExt.join(this.settings.baseUrl, 'speedlab/api', way), init, this.settings)
    );
    return api.tensors(this.run, part);
  }

  close(): void {
    this.socket?.close();
  }

  protected url(): string {
    return drawingUrl(this.run, this.settings);
  }

  private say(): void {
    const draw: Draw = { type: 'Draw', version: VERSION, ...this.wish };
    this.socket?.send(draw);
  }

  private socket: Socket | null = null;
  private wish: Wish = { watching: false };
}
