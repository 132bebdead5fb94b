// The quickstart in the person's own folder: a copy that is theirs, made once.

import type { Contents } from '@jupyterlab/services';

import type { Api } from './api';

export const QUICKSTART = '01_quickstart.ipynb';

/** The path of the notebook below the server's root; one that is there is taken as it is, with what was changed in it. */
export async function quickstart(
  api: Pick<Api, 'notebook'>,
  contents: Pick<Contents.IManager, 'get' | 'save'>,
  folder: string
): Promise<string> {
  const path = folder ? `${folder.replace(/\/$/, '')}/${QUICKSTART}` : QUICKSTART;
  try {
    await contents.get(path, { content: false });
    return path;
  } catch (error) {
    if (statusOf(error) !== 404) throw error;
  }
  const { content } = await api.notebook(QUICKSTART);
  await contents.save(path, { type: 'notebook', format: 'json', content });
  return path;
}

function statusOf(error: unknown): number {
  const response: unknown = typeof error === 'object' && error !== null ? Reflect.get(error, 'response') : null;
  const status: unknown = typeof response === 'object' && response !== null ? Reflect.get(response, 'status') : null;
  return typeof status === 'number' ? status : 0;
}
