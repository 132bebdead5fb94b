import type { IStateDB } from '@jupyterlab/statedb';

/** Which runs of a comparison are hidden, by number: what outlives a reload. */
export interface HiddenRuns {
  recall(): Promise<readonly number[]>;
  keep(hidden: readonly number[]): void;
}

/** In JupyterLab's state, which it keeps with the workspace; `runs` are the ids of the compared. */
export function hiddenIn(state: IStateDB | null, runs: readonly string[]): HiddenRuns {
  const key = `speedlab:hidden:${runs.join(',')}`;
  let saved = Promise.resolve<unknown>(null);
  return {
    async recall() {
      const kept = await state?.fetch(key).catch(() => null);
      if (!Array.isArray(kept)) return [];
      return kept.filter((each): each is number => Number.isInteger(each) && Number(each) in runs);
    },
    keep(hidden) {
      // One after the other; where nothing is hidden, nothing stays.
      saved = saved.then(() => (hidden.length ? state?.save(key, [...hidden]) : state?.remove(key))).catch(() => null);
    }
  };
}
