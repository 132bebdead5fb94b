// A cluster is started from here: its name, how many engines or on which hosts, and with which Python where there are
// several.

import type { Api } from '../api';
import { ProblemError } from '../api';
import { element, setAttributes, setShown, setText } from '../dom';
import { icon } from '../icons';
import { Action, freshId, ProblemText } from './rows';

export class StartForm {
  /** Opens and closes it. */
  readonly button = element(
    'button',
    { class: 'sl-add', type: 'button', title: 'Start a cluster', 'aria-label': 'Start a cluster' },
    icon('plus')
  );
  readonly node = element('div', { class: 'sl-start', role: 'group', 'aria-label': 'A new cluster', hidden: true });

  /** `names`: of clusters that there are. */
  constructor(
    private readonly api: Pick<Api, 'places' | 'start'>,
    private readonly names: () => readonly string[]
  ) {
    this.node.id = freshId();
    setAttributes(this.button, { 'aria-controls': this.node.id, 'aria-expanded': 'false' });
    this.button.addEventListener('click', () => (this.node.hidden ? this.open() : this.close()));
    this.node.addEventListener('keydown', this.pressed);
    const close = new Action('cross', 'Close', 'Start nothing', () => this.close());
    this.node.append(
      field('Name', this.name),
      field('Engines', this.engines),
      element('p', { class: 'sl-hint' }, 'Automatic is one engine per GPU, else 4 on CPU cores.'),
      field('Hosts', this.hosts),
      element(
        'p',
        { class: 'sl-hint' },
        'Others over SSH: gpu-1:8, gpu-2:8. Or slurm nodes=4, gpus_per_node=8. Or mpi HOSTFILE.'
      ),
      this.pythonField,
      element('div', { class: 'sl-actions' }, this.start.node, close.node),
      this.note,
      this.problem.node
    );
  }

  private open(): void {
    this.name.value = freshName(this.names());
    this.problem.update('');
    this.show(true);
    this.name.focus();
    this.name.select();
    void this.look();
  }

  private close(): void {
    this.show(false);
    this.button.focus();
  }

  private show(shown: boolean): void {
    setShown(this.node, shown);
    setAttributes(this.button, { 'aria-expanded': String(shown) });
  }

  /** With what it can be started; another environment may have come since the last time. */
  private async look(): Promise<void> {
    this.start.refuse(LOOKS);
    setText(this.note, LOOKS);
    const chosen = this.python.value;
    try {
      const { places, problem } = await this.api.places();
      this.python.replaceChildren(...places.map(({ id, name }) => element('option', { value: id }, name)));
      if (places.some(({ id }) => id === chosen)) this.python.value = chosen;
      setShown(this.pythonField, places.length > 1);
      this.problem.update(problem);
      this.start.refuse(problem);
    } catch (error) {
      this.problem.update(textOf(error));
      this.start.refuse(textOf(error));
    }
    setText(this.note, '');
  }

  private async begin(): Promise<void> {
    const engines = this.engines.value === '' ? null : Number(this.engines.value);
    if (engines !== null && (!Number.isInteger(engines) || engines < 1)) {
      this.problem.update(`Engines is ${this.engines.value}; a whole number from 1 on, or nothing for one per GPU.`);
      return;
    }
    this.problem.update('');
    setText(this.note, 'The start is asked for.');
    this.start.refuse('it is asked for already');
    try {
      const [name, hosts] = [this.name.value.trim(), this.hosts.value.trim()];
      await this.api.start({ name, place: this.python.value, engines, hosts });
      // From here on its row in the list tells how it goes.
      this.close();
    } catch (error) {
      this.problem.update(textOf(error));
    }
    this.start.refuse('');
    setText(this.note, '');
  }

  private readonly pressed = (event: KeyboardEvent) => {
    if (event.key === 'Escape') this.close();
    else if (event.key === 'Enter' && event.target instanceof HTMLInputElement) this.start.node.click();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };

  private readonly name = element('input', { class: 'sl-input', type: 'text', autocomplete: 'off', maxlength: 60 });
  private readonly engines = element('input', {
    ...{ class: 'sl-input', type: 'number', min: 1, max: 1024, step: 1 },
    placeholder: 'automatic'
  });
  private readonly hosts = element('input', {
    ...{ class: 'sl-input', type: 'text', autocomplete: 'off', maxlength: 2000, spellcheck: 'false' },
    placeholder: 'this machine'
  });
  private readonly python = element('select', { class: 'sl-stages' });
  private readonly pythonField = field('Python', this.python);
  private readonly note = element('p', { class: 'sl-hint', role: 'status' });
  private readonly problem = new ProblemText();
  private readonly start = new Action('play', 'Start', 'Start its engines', () => void this.begin());
}

const LOOKS = 'Looking for a Python that can start engines.';

function field(text: string, input: HTMLElement): HTMLElement {
  input.id = freshId();
  return element('div', { class: 'sl-start-field' }, element('label', { for: input.id }, text), input);
}

/** 'default', or the first 'default-2', 'default-3', … that there is not. */
export function freshName(names: readonly string[]): string {
  if (!names.includes('default')) return 'default';
  let number = 2;
  while (names.includes(`default-${number}`)) number += 1;
  return `default-${number}`;
}

const textOf = (error: unknown): string => (error instanceof ProblemError ? error.message : String(error));
