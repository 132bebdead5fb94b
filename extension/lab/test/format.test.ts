import { agoText, bytesText, countText, leftText, ranksText, secondsText, wholeText } from '../src/format';
import numbers from './numbers.json';

type Pair = [number, string];

// The same file is held against Python's side by tests/unit/test_numbers_of_pages.py.
test.each(numbers.bytes as Pair[])('%d bytes are %s', (count, text) => expect(bytesText(count)).toBe(text));
test.each(numbers.count as Pair[])('a count of %d is %s', (count, text) => expect(countText(count)).toBe(text));
test.each(numbers.seconds as Pair[])('%d seconds are %s', (count, text) => expect(secondsText(count)).toBe(text));
test.each(numbers.ranks as [number[], string][])('%j are %s', (ranks, text) => expect(ranksText(ranks)).toBe(text));

test.each([
  [0, '0'],
  [999, '999'],
  [2000, '2,000'],
  [1234567, '1,234,567']
])('%d as a whole number is %s', (count, text) => expect(wholeText(count)).toBe(text));

test.each([
  [12.2, '13 s left'],
  [179, '3 min left'],
  [7500, '2 h 5 min left'],
  [3599, '1 h 0 min left'],
  [3 * 86400, '3 days left']
])('%d seconds are waited for as %s', (seconds, text) => expect(leftText(seconds)).toBe(text));

test('when something was, from a moment to a date', () => {
  const now = new Date(2026, 10, 24, 12).getTime() / 1000;
  const before = [10, 300, 3 * 3600, 14 * 3600, 86400 * 12, 86400 * 100];
  expect(before.map(seconds => agoText(now - seconds, now))).toEqual([
    'now',
    '5 min ago',
    '3 h ago',
    'yesterday',
    '12 days ago',
    '2026-08-16'
  ]);
});
