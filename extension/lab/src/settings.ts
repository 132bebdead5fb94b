// The person's settings. What does not fit is told, and the defaults are used in its place. The schema allows every
// type, the right one first, of which the editor's fields are made: what does not fit it, Jupyter's server leaves out,
// with all that stands beside it, and tells nobody.

export interface Settings {
  side: 'left' | 'right';
  statusBar: boolean;
  outputLines: number;
  foldOutput: boolean;
}

export const DEFAULTS: Settings = { side: 'left', statusBar: true, outputLines: 2000, foldOutput: true };

const LINES = [100, 20_000] as const;

/** Settings as they can be used, and what of `given` cannot. Also where no schema has looked at them. */
export function settingsFrom(given: Record<string, unknown>): { settings: Settings; problem: string } {
  const settings = { ...DEFAULTS };
  const problems: string[] = [];
  const refuse = (name: keyof Settings, rule: string) =>
    problems.push(`${name} is ${JSON.stringify(given[name])}, which is not ${rule}; ${String(DEFAULTS[name])} is used`);
  const { side, outputLines } = given;
  if (side === 'left' || side === 'right') settings.side = side;
  else if (side !== undefined) refuse('side', 'left or right');
  if (typeof outputLines === 'number' && outputLines >= LINES[0] && outputLines <= LINES[1]) {
    settings.outputLines = Math.round(outputLines);
  } else if (outputLines !== undefined) refuse('outputLines', `a number from ${LINES[0]} to ${LINES[1]}`);
  for (const name of ['statusBar', 'foldOutput'] as const) {
    const value = given[name];
    if (typeof value === 'boolean') settings[name] = value;
    else if (value !== undefined) refuse(name, 'true or false');
  }
  return { settings, problem: problems.length ? `Settings of SpeedLab: ${problems.join('; ')}.` : '' };
}
