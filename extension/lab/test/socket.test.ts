import { Socket } from '../src/socket';

/** A websocket that a test opens and breaks. */
class Wire {
  readyState: number = WebSocket.CONNECTING;
  binaryType = 'blob';
  sent: string[] = [];
  onopen: (() => void) | null = null;
  onmessage: ((event: { data: string | ArrayBuffer }) => void) | null = null;
  onclose: ((event: { code: number }) => void) | null = null;

  send(text: string): void {
    this.sent.push(text);
  }

  close(): void {
    this.break(1000);
  }

  open(): void {
    this.readyState = WebSocket.OPEN;
    this.onopen?.();
  }

  break(code = 1006): void {
    this.readyState = WebSocket.CLOSED;
    this.onclose?.({ code });
  }
}

describe('Socket', () => {
  let wires: Wire[];
  let heard: unknown[];
  let socket: Socket;

  beforeEach(() => {
    jest.useFakeTimers();
    wires = [];
    heard = [];
    const make = () => {
      wires.push(new Wire());
      return wires[wires.length - 1] as unknown as WebSocket;
    };
    const handlers = {
      onOpen: () => heard.push('open'),
      onMessage: (data: string | ArrayBuffer) => heard.push(data),
      onLost: (text: string) => heard.push(text)
    };
    socket = new Socket('ws://here/live', handlers, make);
  });

  afterEach(() => jest.useRealTimers());

  const wire = () => wires[wires.length - 1]!;

  it('sends JSON while it is open, and hands over texts and buffers', () => {
    socket.send({ early: 1 });
    wire().open();
    socket.send({ late: 2 });
    const numbers = new ArrayBuffer(4);
    wire().onmessage?.({ data: 'words' });
    wire().onmessage?.({ data: numbers });
    expect(wire().sent).toEqual(['{"late":2}']);
    expect(wire().binaryType).toBe('arraybuffer');
    expect(heard).toEqual(['open', 'words', numbers]);
  });

  it('comes back after pauses that double, up to half a minute', () => {
    const pauses = [];
    for (let lost = 0; lost < 9; lost++) {
      const count = wires.length;
      wire().break();
      const began = Date.now();
      while (wires.length === count) jest.advanceTimersByTime(100);
      pauses.push(Date.now() - began);
    }
    expect(pauses).toEqual([500, 1000, 2000, 4000, 8000, 16000, 30000, 30000, 30000]);
    expect(heard).toHaveLength(9);
  });

  it('begins with the short pause again when a connection has held', () => {
    for (let lost = 0; lost < 4; lost++) {
      wire().break();
      jest.advanceTimersByTime(30_000);
    }
    wire().open();
    jest.advanceTimersByTime(5_000);
    wire().break();
    const count = wires.length;
    jest.advanceTimersByTime(500);
    expect(wires).toHaveLength(count + 1);
  });

  it('tries no more when it was closed, or is of another version', () => {
    wire().open();
    socket.close();
    wire().onmessage?.({ data: 'late' });
    jest.advanceTimersByTime(60_000);
    expect([wires.length, heard]).toEqual([1, ['open']]);
  });

  it('asks for a reload where the server is of another version', () => {
    wire().open();
    wire().break(4409);
    jest.advanceTimersByTime(60_000);
    expect(wires).toHaveLength(1);
    expect(heard[1]).toMatch(/another version of SpeedLab. Reload/);
  });
});
