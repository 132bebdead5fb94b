/** Asks again and again, one question at a time, while it is on and the page is visible; at once when that begins. */
export class Poll {
  constructor(
    private readonly ask: () => Promise<void>,
    private readonly seconds: number
  ) {
    document.addEventListener('visibilitychange', this.settle);
  }

  set on(on: boolean) {
    this.wanted = on;
    this.settle();
  }

  dispose(): void {
    document.removeEventListener('visibilitychange', this.settle);
    this.on = false;
  }

  private readonly settle = () => {
    if (!this.wanted || document.hidden) {
      clearTimeout(this.timer);
      this.timer = undefined;
    } else if (!this.asking && this.timer === undefined) void this.turn();
  };

  private async turn(): Promise<void> {
    this.timer = undefined;
    this.asking = true;
    try {
      await this.ask();
    } finally {
      this.asking = false;
    }
    if (this.wanted && !document.hidden) this.timer = setTimeout(() => void this.turn(), this.seconds * 1000);
  }

  private wanted = false;
  private asking = false;
  private timer: ReturnType<typeof setTimeout> | undefined;
}
