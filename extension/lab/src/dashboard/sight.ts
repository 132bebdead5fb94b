const HIDE_AFTER_MS = 1500;

/** Whether an element can be seen: it is in sight, and its page is. Told with each change; at first it is. */
export class Sight {
  constructor(
    node: HTMLElement,
    private readonly changed: (seen: boolean) => void
  ) {
    this.observer.observe(node);
    document.addEventListener('visibilitychange', this.look);
  }

  dispose(): void {
    clearTimeout(this.timer);
    this.observer.disconnect();
    document.removeEventListener('visibilitychange', this.look);
  }

  private readonly look = (): void => {
    clearTimeout(this.timer);
    const now = this.inSight && !document.hidden;
    if (now && !this.seen) this.tell(true);
    // Whoever scrolls past and back misses nothing.
    if (!now && this.seen) this.timer = setTimeout(() => this.tell(false), HIDE_AFTER_MS);
  };

  private tell(seen: boolean): void {
    this.seen = seen;
    this.changed(seen);
  }

  private seen = true;
  private inSight = true;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private readonly observer = new IntersectionObserver(entries => {
    this.inSight = entries[entries.length - 1]?.isIntersecting ?? true;
    this.look();
  });
}
