/** What a Socket tells of. */
export interface Handlers {
  /** It is open, for the first time or again: say what is wanted. */
  onOpen(): void;
  onMessage(data: string | ArrayBuffer): void;
  /** It is gone, and is tried again by itself; `text` says so to people. */
  onLost(text: string): void;
}

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 30_000;
/** A connection that held so long was a good one: the pauses begin anew. */
const GOOD_MS = 5_000;
/** The server's code for a page of another version of the messages (live.py): trying again would not help. */
const OTHER_VERSION = 4409;

/** A websocket that comes back: it is opened again after pauses that double, until it is closed for good. */
export class Socket {
  constructor(
    private readonly url: string,
    private readonly handlers: Handlers,
    private readonly make: (url: string) => WebSocket = address => new WebSocket(address)
  ) {
    this.open();
  }

  /** Sends a message as JSON; passed over while there is no connection, because onOpen says anew what is wanted. */
  send(message: unknown): void {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  /** Ends it for good; no handler is called any more. */
  close(): void {
    this.closed = true;
    clearTimeout(this.timer);
    this.socket?.close();
    this.socket = null;
  }

  private open(): void {
    const socket = this.make(this.url);
    this.socket = socket;
    socket.binaryType = 'arraybuffer';
    const current = () => !this.closed && this.socket === socket;
    socket.onopen = () => {
      if (!current()) return;
      this.opened = Date.now();
      this.handlers.onOpen();
    };
    socket.onmessage = (event: MessageEvent<string | ArrayBuffer>) => {
      if (current()) this.handlers.onMessage(event.data);
    };
    socket.onclose = event => {
      if (current()) this.lost(event.code);
    };
  }

  private lost(code: number): void {
    this.socket = null;
    if (code === OTHER_VERSION) {
      this.handlers.onLost("Jupyter's server has another version of SpeedLab. Reload this page.");
      return;
    }
    if (this.opened && Date.now() - this.opened >= GOOD_MS) this.pause = FIRST_PAUSE_MS;
    this.opened = 0;
    this.timer = setTimeout(() => this.open(), this.pause);
    this.pause = Math.min(2 * this.pause, LONGEST_PAUSE_MS);
    this.handlers.onLost("No connection to Jupyter's server; trying again.");
  }

  private socket: WebSocket | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private pause = FIRST_PAUSE_MS;
  private opened = 0;
  private closed = false;
}
