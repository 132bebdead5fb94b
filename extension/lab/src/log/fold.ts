// What ranks print, folded: equal lines of several ranks become one. As speedlab.cluster.output_folding does it.

import type { RankLines } from '../messages';

export interface Folded {
  ranks: number[];
  text: string;
}

/**
 * Folds equal lines of several ranks.
 *
 * 1. Each rank has one queue, so the order of a rank's lines is kept.
 * 2. A line is due when every rank has it at its head, or when it has grown older twice (`age`).
 * 3. A due line leaves together with the equal heads of other ranks. Among due lines, one that another rank still has
 *    further down its queue goes later, so that it is folded when it comes up there; else the lowest rank goes first.
 */
export class LineFolder {
  /** Some time has passed: what waits for its like since before the last call waits no longer, and is returned. */
  age(folds = true): Folded[] {
    this.turn += 1;
    return this.takeDue(folds);
  }

  /** `told`: what ranks have printed since the last call. Returns what is due, in order. */
  feed(told: readonly RankLines[], folds = true): Folded[] {
    for (const { rank, lines, skipped } of told) {
      const queue = this.queues.get(rank) ?? this.added(rank);
      if (skipped) queue.push(this.line('… lines before these are not shown'));
      for (const line of lines) queue.push(this.line(line));
    }
    return this.takeDue(folds);
  }

  private takeDue(folds: boolean): Folded[] {
    const found: Folded[] = [];
    for (let due = this.due(folds); due; due = this.due(folds)) found.push(due);
    return found;
  }

  /** Whether lines wait for their like. */
  get waits(): boolean {
    return [...this.queues.values()].some(queue => queue.head);
  }

  private added(rank: number): Queue {
    const queue = new Queue();
    this.queues.set(rank, queue);
    this.queues = new Map([...this.queues].sort(([a], [b]) => a - b));
    return queue;
  }

  private readonly line = (text: string): Line => ({ text: plain(text), turn: this.turn });

  private due(folds: boolean): Folded | null {
    const queues = [...this.queues].filter(([, queue]) => queue.head);
    const [first] = queues;
    if (!first) return null;
    const take = (text: string): Folded => {
      const same = (folds ? queues : [first]).filter(([, queue]) => queue.head?.text === text);
      for (const [, queue] of same) queue.take();
      return { ranks: same.map(([rank]) => rank), text };
    };
    const head = first[1].head?.text ?? '';
    if (!folds) return take(head);
    if (queues.length === this.queues.size && queues.every(([, queue]) => queue.head?.text === head)) return take(head);
    const late = queues.filter(([, queue]) => (queue.head?.turn ?? this.turn) + 1 < this.turn);
    const comesAgain = (text: string) =>
      queues.some(([, queue]) => queue.head?.text !== text && (queue.counts.get(text) ?? 0) > 0);
    const chosen = late.find(([, queue]) => !comesAgain(queue.head?.text ?? '')) ?? late[0];
    return chosen ? take(chosen[1].head?.text ?? '') : null;
  }

  private turn = 0;
  private queues = new Map<number, Queue>();
}

interface Line {
  text: string;
  turn: number;
}

class Queue {
  /** How often each text waits here. */
  readonly counts = new Map<string, number>();

  get head(): Line | undefined {
    return this.lines[this.first];
  }

  push(line: Line): void {
    this.lines.push(line);
    this.counts.set(line.text, (this.counts.get(line.text) ?? 0) + 1);
  }

  take(): void {
    const line = this.lines[this.first];
    if (!line) return;
    this.counts.set(line.text, (this.counts.get(line.text) ?? 1) - 1);
    this.first += 1;
    if (this.first < this.lines.length) return;
    this.lines = [];
    this.first = 0;
    this.counts.clear();
  }

  private lines: Line[] = [];
  private first = 0;
}

/* eslint-disable no-control-regex -- control characters are what these two are about */
/** Colours and moves of a terminal. */
const ESCAPES = /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)|[@-Z\\-_])/g;
/** What is not seen in a line, or turns it around. */
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f\u202a-\u202e\u2066-\u2069]/g;
/* eslint-enable no-control-regex */

const plain = (text: string): string => text.replace(ESCAPES, '').replace(UNSEEN, '');
