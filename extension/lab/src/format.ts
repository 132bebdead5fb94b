// Numbers as users read them, in the words of speedlab.display.formatting. GiB is 1024³; every number has a unit.

const BINARY = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'] as const;
const DECIMAL = [
  ['T', 1e12],
  ['G', 1e9],
  ['M', 1e6],
  ['k', 1e3]
] as const;

/** Three digits, as Python's '.3g': '0.5', '41.2', '1.5e-05'. */
export function digitsText(value: number): string {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? 'nan' : value < 0 ? '-inf' : 'inf';
  if (value === 0) return '0';
  const [digits = '0', power = '0'] = value.toExponential(2).split('e');
  const exponent = Number(power);
  if (exponent >= -4 && exponent < 3) return String(Number(value.toPrecision(3)));
  const sign = exponent < 0 ? '-' : '+';
  return `${Number(digits)}e${sign}${String(Math.abs(exponent)).padStart(2, '0')}`;
}

/** '1.4 GiB', '312 MiB', '0 B'. */
export function bytesText(count: number): string {
  let power = 0;
  let value = count;
  while (Math.abs(value) >= 1024 && power < BINARY.length - 1) {
    value /= 1024;
    power += 1;
  }
  return `${value.toFixed(power === 0 || Math.abs(value) >= 100 ? 0 : 1)} ${BINARY[power] ?? ''}`;
}

/** '950', '41.2 k', '3.1 M': three digits and a decimal prefix. */
export function countText(count: number): string {
  for (const [prefix, size] of DECIMAL) {
    if (Math.abs(count) >= 0.9995 * size) return `${digitsText(count / size)} ${prefix}`;
  }
  return digitsText(count);
}

/** '12.3 ms', '1.24 s', '3 min 5 s', '26 h 3 min'. */
export function secondsText(seconds: number): string {
  if (seconds < 1) return `${digitsText(seconds * 1000)} ms`;
  if (seconds < 60) return `${digitsText(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** What a person still waits, no finer than it is known: '40 s left', '3 min left', '2 h 5 min left', '3 days left'. */
export function leftText(seconds: number): string {
  if (seconds < 60) return `${Math.ceil(seconds)} s left`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min left`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min left`;
  return `${Math.round(minutes / 1440)} days left`;
}

/** When something was: 'now', '5 min ago', '3 h ago', 'yesterday', '12 days ago', '2026-03-01'. Both in seconds. */
export function agoText(time: number, now: number): string {
  const minutes = Math.floor((now - time) / 60);
  if (minutes < 1) return 'now';
  if (minutes < 60) return `${minutes} min ago`;
  const days = Math.round((startOfDay(now) - startOfDay(time)) / 86_400_000);
  if (days < 1) return `${Math.floor(minutes / 60)} h ago`;
  if (days === 1) return 'yesterday';
  if (days < 60) return `${days} days ago`;
  const day = new Date(time * 1000);
  return [day.getFullYear(), day.getMonth() + 1, day.getDate()].map(part => String(part).padStart(2, '0')).join('-');
}

function startOfDay(seconds: number): number {
  return new Date(seconds * 1000).setHours(0, 0, 0, 0);
}

/** '2,000'. */
export function wholeText(count: number): string {
  return String(Math.round(count)).replace(/\B(?=(\d{3})+$)/g, ',');
}

/** 'rank 2', 'ranks 0–3', 'ranks 0, 2–3'. */
export function ranksText(ranks: readonly number[]): string {
  const ordered = [...new Set(ranks)].sort((a, b) => a - b);
  const spans: [number, number][] = [];
  for (const rank of ordered) {
    const last = spans.at(-1);
    if (last && rank === last[1] + 1) last[1] = rank;
    else spans.push([rank, rank]);
  }
  const text = spans.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(', ');
  return `rank${ordered.length === 1 ? '' : 's'} ${text}`;
}

const CATEGORY_NAMES: Record<string, string> = {
  other_framework: 'other framework memory',
  outside_framework: 'outside the framework'
};

/** A category of the ledger in words. */
export const categoryText = (category: string): string => CATEGORY_NAMES[category] ?? category.replaceAll('_', ' ');
