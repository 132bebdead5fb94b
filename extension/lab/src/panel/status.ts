// The run that is on, in the status bar: '● quickstart · 131/2,000 · 41.2 k tokens/s · 3 min left'.

import { Widget } from '@lumino/widgets';

import type { Api } from '../api';
import { element, setAttributes, setText } from '../dom';
import { icon } from '../icons';
import type { Listening, Live } from '../live';
import type { RunSummary } from '../messages';
import { Poll } from '../poll';
import { isLive, runAtHand, runLook, statusText } from '../states';

const LOOK_SECONDS = 5;
/** After so long without news, another run may be the one that is on. */
const QUIET_SECONDS = 30;

/** Follows the one run that is on: while there is none, the list is asked for now and then, else only its status. */
export class RunOn {
  /** Called when there is something new of it. */
  changed: () => void = () => undefined;

  constructor(
    private readonly api: Pick<Api, 'runs'>,
    live: Live
  ) {
    this.listening = live.listen(news => {
      if (this.run && news.runs.has(this.run.id)) this.take(live.run(this.run.id)?.status);
      else if (news.lists) this.choose(live.runs ?? []);
    });
  }

  run: RunSummary | undefined;

  dispose(): void {
    this.on = false;
    clearTimeout(this.quietly);
    this.poll.dispose();
    this.listening.dispose();
  }

  /** Only while somebody shows it. */
  set on(on: boolean) {
    this.shown = on;
    this.settle();
  }

  private settle(): void {
    const follows = this.run !== undefined && isLive(this.run);
    this.poll.on = this.shown && (!follows || this.quiet);
    const id = this.shown && follows ? this.run?.id : undefined;
    if (id === this.wished) return;
    this.wished = id;
    this.listening.want(id === undefined ? {} : { runs: [{ id, parts: ['status'], points: 1 }] });
  }

  private choose(runs: readonly RunSummary[]): void {
    if (this.run?.state === 'running' && !this.quiet) return;
    const found = runAtHand(runs) ?? runs.find(run => run.id === this.run?.id);
    if (found) this.take(found);
  }

  private take(run: RunSummary | null | undefined): void {
    if (!run) return;
    const changed = JSON.stringify(run) !== JSON.stringify(this.run);
    this.run = run;
    if (changed) {
      this.quiet = false;
      clearTimeout(this.quietly);
      this.quietly = setTimeout(() => {
        this.quiet = true;
        this.settle();
      }, QUIET_SECONDS * 1000);
    }
    this.settle();
    this.changed();
  }

  private shown = false;
  private quiet = false;
  private quietly: ReturnType<typeof setTimeout> | undefined;
  private wished: string | undefined;
  private readonly listening: Listening;
  private readonly poll = new Poll(async () => {
    // Who has no server extension is told so in the panel; a status bar keeps silent.
    this.choose(
      await this.api.runs().then(
        answer => answer.runs,
        () => []
      )
    );
  }, LOOK_SECONDS);
}

export class StatusItem extends Widget {
  constructor(
    private readonly on: RunOn,
    open: () => void
  ) {
    super();
    this.addClass('sl-status');
    this.button.append(this.glyph, this.text);
    this.button.addEventListener('click', open);
    this.node.append(this.button, this.announced);
    on.changed = () => this.draw();
    this.draw();
  }

  protected override onAfterShow(): void {
    this.on.on = true;
  }

  protected override onAfterAttach(): void {
    this.on.on = true;
  }

  protected override onBeforeHide(): void {
    this.on.on = false;
  }

  protected override onBeforeDetach(): void {
    this.on.on = false;
  }

  private draw(): void {
    const { run } = this.on;
    this.button.hidden = !run;
    if (!run) return;
    const look = runLook(run);
    setText(this.text, statusText(run));
    setAttributes(this.button, { title: `SpeedLab: ${run.name} is ${look.word}. Opens the panel` });
    // A screen reader hears of another state, and not of each step.
    const state = `${run.name} is ${look.word}`;
    if (state === this.state) return;
    const first = this.state === '';
    this.state = state;
    if (!first) setText(this.announced, state);
    setAttributes(this.glyph, { class: `sl-glyph sl-tone-${look.tone}` });
    this.glyph.replaceChildren(icon(look.glyph));
  }

  private state = '';
  private readonly glyph = element('span', { class: 'sl-glyph' });
  private readonly text = element('span');
  private readonly button = element('button', { class: 'sl-status-button', type: 'button' });
  private readonly announced = element('span', { class: 'sl-unseen', role: 'status' });
}
