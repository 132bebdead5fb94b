// A run in the panel: state and figures in a row, its loss as a line, and, chosen, its controls.

import type { Row } from '../dom';
import { element, setAttributes, setShown, setText, showInstead } from '../dom';
import type { Note } from '../controls';
import type { RunData } from '../live';
import type { RunSummary, Word } from '../messages';
import { factsUnit, isLive, NOT_HELD, progress, refusal, runFacts, runLook, stageOf } from '../states';
import { MOST_COMPARED } from './comparing';
import { MemoryView } from './memory';
import { Action, freshId, ProblemText, RowHead } from './rows';
import { Sparkline } from './sparkline';

/** What a run's row shows. */
export interface RunItem {
  run: RunSummary;
  chosen: boolean;
  /** To be compared; 'full' where no more can be. */
  ticked: boolean | 'full';
  /** Whether `data` is asked for. */
  watched: boolean;
  data: RunData | undefined;
  config: Record<string, unknown> | undefined;
  note: Note | undefined;
  problem: string;
  /** Not while its cluster shows the same above. */
  showsMemory: boolean;
  now: number;
}

export interface RunActs {
  choose: (id: string) => void;
  tick: (id: string, on: boolean) => void;
  give: (id: string, word: Word) => Promise<boolean>;
  stop: (run: RunSummary) => void;
  refused: (id: string, why: string) => void;
  output: (run: RunSummary) => void;
  dashboard: (run: RunSummary) => void;
}

const STAGES = ['nothing partitioned', 'optimizer states', 'states, gradients', 'states, gradients, parameters'];

export class RunRow implements Row<RunItem> {
  readonly node = element('li', { class: 'sl-item' });

  constructor(
    private readonly id: string,
    private readonly acts: RunActs
  ) {
    this.head = new RowHead(this.body, () => acts.choose(id));
    const action = (...[picture, word, what, act]: ConstructorParameters<typeof Action>) =>
      new Action(picture, word, what, act, why => acts.refused(id, why));
    const give = (word: string, args = {}) => void acts.give(id, { word, arguments: args });
    const withRun = (act: (run: RunSummary) => void) => () => {
      if (this.run) act(this.run);
    };
    this.pause = action('pause', 'Pause', 'Pause after this step', () => give('pause'));
    this.resume = action('play', 'Resume', 'Go on from where it stands', () => give('resume'));
    this.step = action('step', 'Step', 'Compute one more step, then pause', () => give('step', { n: 1 }));
    this.save = action('save', 'Save', 'Write a checkpoint', () => give('save'));
    this.stop = action('stop', 'Stop', 'End the run; asks first', withRun(acts.stop));
    this.change = action('check', 'Change', 'Change the ZeRO stage while it trains', () => void this.reshape());
    const looks = [
      action('chart', 'Dashboard', 'Open its dashboard', withRun(acts.dashboard)),
      action('lines', 'Output', 'Show what its ranks have printed', withRun(acts.output))
    ];
    const controls = [this.pause, this.resume, this.step, this.save, this.stop].map(each => each.node);
    this.body.append(
      element('div', { class: 'sl-actions sl-words' }, ...controls),
      this.zero,
      element('div', { class: 'sl-actions' }, ...looks.map(each => each.node)),
      this.note,
      this.memory.node
    );
    this.stages.id = freshId();
    const label = element('label', { for: this.stages.id }, 'ZeRO stage');
    this.stages.append(...STAGES.map((what, stage) => element('option', { value: stage }, `${stage}: ${what}`)));
    this.stages.addEventListener('change', this.marked);
    this.zero.append(label, this.stages, this.change.node);
    this.tick.addEventListener('change', () => acts.tick(id, this.tick.checked));
    this.node.append(this.head.node, this.tick, this.problem.node, this.bar, this.spark.node, this.told, this.body);
  }

  update(item: RunItem): void {
    const { run, chosen, data } = item;
    this.run = run;
    this.head.update(run.name, runLook(run), runFacts(run, item.now), chosen, factsUnit(run));
    const full = item.ticked === 'full';
    this.tick.checked = item.ticked === true;
    setAttributes(this.tick, {
      'aria-label': `Compare ${run.name}`,
      title: full ? `${MOST_COMPARED} runs are ticked, the most that are compared` : `Tick to compare ${run.name}`,
      disabled: full || (run.state === 'damaged' && !item.ticked)
    });
    this.problem.update(item.problem || run.problem || data?.problem || '');
    setAttributes(this.problem.node, { class: `sl-problem${chosen ? '' : ' sl-short'}` });
    const live = isLive(run);
    this.showProgress(run, live && run.steps > 0);
    const records = live || chosen ? (data?.records ?? null) : null;
    this.spark.update(records, item.watched && (live || !records));
    setText(this.told, run.text);
    setShown(this.told, run.text !== '' && (chosen || run.state === 'failed'));
    setAttributes(this.told, { class: `sl-told${chosen ? '' : ' sl-one-line'}`, title: chosen ? null : run.text });
    setShown(this.body, chosen);
    if (chosen) this.showControls(item);
  }

  private showProgress(run: RunSummary, shown: boolean): void {
    setShown(this.bar, shown);
    if (!shown) return;
    const percent = Math.floor(100 * progress(run));
    const value = { 'aria-valuenow': percent, 'aria-label': `Progress of ${run.name}`, title: `${percent} %` };
    setAttributes(this.bar, value);
    this.filled.style.width = `${percent}%`;
    setText(this.percent, `${percent} %`);
  }

  private showControls({ run, data, config, note, showsMemory }: RunItem): void {
    const computes = run.state === 'running' || run.state === 'starting';
    if (computes) showInstead(this.pause.node, this.resume.node);
    else showInstead(this.resume.node, this.pause.node);
    for (const [action, word] of [
      [this.pause, 'pause'],
      [this.resume, 'resume'],
      [this.step, 'step'],
      [this.save, 'save'],
      [this.stop, 'stop'],
      [this.change, 'reshape']
    ] as const) {
      action.refuse(refusal(word, run));
    }
    const stage = config ? stageOf(config, data?.events ?? []) : null;
    setShown(this.zero, stage !== null && isLive(run));
    if (stage !== null && stage !== this.stage) {
      this.stage = stage;
      this.stages.value = String(stage);
    }
    this.marked();
    const apart = !run.problem && run.cluster === '' && runLook(run).tone !== 'bad';
    setText(this.note, note?.text ?? (apart ? `It can be looked at: ${NOT_HELD}.` : ''));
    setAttributes(this.note, { class: `sl-note${note?.bad ? ' sl-bad' : ''}` });
    this.memory.update(showsMemory ? (data?.memory ?? []) : []);
  }

  /** The button is there while another stage is chosen than the run has: going through a list changes nothing. */
  private readonly marked = () => {
    if (this.stages.value === String(this.stage)) showInstead(this.stages, this.change.node);
    else setShown(this.change.node, true);
  };

  private async reshape(): Promise<void> {
    const done = await this.acts.give(this.id, { word: 'reshape', arguments: { zero: Number(this.stages.value) } });
    if (done) return;
    this.stages.value = String(this.stage ?? 0);
    this.marked();
  }

  private run: RunSummary | undefined;
  private stage: number | null = null;
  private readonly head: RowHead;
  private readonly tick = element('input', { type: 'checkbox', class: 'sl-tick' });
  private readonly body = element('div', { class: 'sl-body' });
  private readonly zero = element('div', { class: 'sl-zero' });
  private readonly stages = element('select', { class: 'sl-stages' });
  private readonly told = element('p', { class: 'sl-told', hidden: true });
  private readonly note = element('p', { class: 'sl-note', role: 'status' });
  private readonly filled = element('span', { class: 'sl-progress-filled' });
  private readonly percent = element('span', { class: 'sl-progress-text', 'aria-hidden': 'true' });
  private readonly bar = element(
    'div',
    { class: 'sl-progress', role: 'progressbar', 'aria-valuemin': 0, 'aria-valuemax': 100, hidden: true },
    element('span', { class: 'sl-progress-track' }, this.filled),
    this.percent
  );
  private readonly spark = new Sparkline();
  private readonly memory = new MemoryView();
  private readonly problem = new ProblemText();
  private readonly pause: Action;
  private readonly resume: Action;
  private readonly step: Action;
  private readonly save: Action;
  private readonly stop: Action;
  private readonly change: Action;
}
