import {
  answerTo,
  clusterFacts,
  fits,
  isLive,
  refusal,
  runAtHand,
  runFacts,
  stageOf,
  statusText,
  stopText
} from '../src/states';
import { makeCluster, makeEvent, makeRun } from './samples';

test('what stands beside a run', () => {
  expect(runFacts(makeRun(), 0)).toBe('step 131/2,000 · 41.2 k tokens/s · 3 min left');
  expect(runFacts(makeRun({ state: 'paused' }), 0)).toBe('paused · step 131/2,000 · loss 5.912');
  expect(runFacts(makeRun({ state: 'finished', updated: 1000 }), 1400)).toBe('5.912 · 6 min ago');
  expect(runFacts(makeRun({ tokens_per_second: null, seconds_left: null, steps: 0 }), 0)).toBe('step 131');
});

test('the status bar speaks of the run that computes, before one that waits', () => {
  const waits = makeRun({ id: 'b', state: 'paused' });
  expect(runAtHand([waits, makeRun()])?.id).toBe('a1');
  expect(runAtHand([waits, makeRun({ state: 'finished' })])?.id).toBe('b');
  expect(runAtHand([makeRun({ state: 'paused', cluster: '' })])).toBeUndefined();
  expect(statusText(makeRun())).toBe('quickstart · 131/2,000 · 41.2 k tokens/s · 3 min left');
  expect(isLive(makeRun({ state: 'failed' }))).toBe(false);
});

test('a cluster says its engines, or what its start waits for', () => {
  expect(clusterFacts(makeCluster({ hosts: ['a', 'b'] }))).toBe('4 engines · 2 hosts');
  expect(clusterFacts(makeCluster({ state: 'starting', text: 'queued, 3rd (Priority)' }))).toBe(
    'queued, 3rd (Priority)'
  );
});

test('search takes every word, in name or state', () => {
  expect(fits(makeRun(), ' QUICK running')).toBe(true);
  expect(fits(makeRun(), 'quick paused')).toBe(false);
});

test.each([
  ['pause', {}, ''],
  ['pause', { state: 'paused', cluster: '' }, 'no cluster that runs here holds it'],
  ['pause', { state: 'finished' }, 'the run is finished'],
  ['save', { state: 'finished' }, ''],
  ['stop', { state: 'starting' }, ''],
  ['save', { state: 'starting' }, 'wait for its first step'],
  ['resume', { state: 'finished' }, 'makes it longer'],
  ['resume', { state: 'paused', cluster: '' }, 'attach(name).resume()'],
  ['resume', { state: 'stopped' }, ''],
  ['reshape', { state: 'damaged' }, 'cannot be read']
] as const)('%s of a run that is %j', (word, changes, text) => {
  const reason = refusal(word, makeRun(changes));
  if (text) expect(reason).toContain(text);
  else expect(reason).toBe('');
});

test('the stage is what the last change left', () => {
  const events = [
    makeEvent('reshaped', 5, { details: { before: { zero: 1 }, after: { zero: 3 } } }),
    makeEvent('reshaped', 9, { details: { after: { tp: 2 } } })
  ];
  expect(stageOf({ zero: { stage: 1 } }, events)).toBe(3);
  expect(stageOf({ zero: { stage: 1 } }, [])).toBe(1);
  expect(stageOf({ zero: 'none' }, [])).toBeNull();
});

test('stopping says what would be lost', () => {
  expect(stopText(makeRun(), [])).toContain('no checkpoint: when its engines end, all 131 steps are lost');
  const saved = makeEvent('checkpoint', 130, { text: 'step-000130' });
  expect(stopText(makeRun(), [saved])).toContain('is step-000130: when its engines end, 1 step is lost');
  expect(stopText(makeRun(), [makeEvent('checkpoint', 131, { text: 'mine' })])).toContain('nothing is lost');
});

test('the answer to a word is found by its number', () => {
  const events = [
    makeEvent('paused', 131, { command: 3, text: 'after step 131' }),
    makeEvent('warning', 131, { command: 4, text: 'reshape: no room', details: { error: true } })
  ];
  expect(answerTo(3, events)).toEqual({ text: 'paused after step 131', refused: false });
  expect(answerTo(4, events)).toEqual({ text: 'reshape: no room', refused: true });
  expect(answerTo(5, events)).toBeNull();
});
