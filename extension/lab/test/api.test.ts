import { Api, ProblemError } from '../src/api';

function makeApi(status: number, body: unknown): { api: Api; asked: [string, RequestInit][] } {
  const asked: [string, RequestInit][] = [];
  const api = new Api((way, init) => {
    asked.push([way, init]);
    if (status === 0) return Promise.reject(new TypeError('Failed to fetch'));
    const json = () => (body === undefined ? Promise.reject(new SyntaxError('no JSON')) : Promise.resolve(body));
    return Promise.resolve({ ok: status < 300, status, json } as Response);
  });
  return { api, asked };
}

test('ids are parts of an address, whatever they hold, and every question tells its version', async () => {
  const { api, asked } = makeApi(200, { type: 'ClusterWordGiven', version: 1, cluster: '../a b', word: 'stop' });
  await api.tellCluster('../a b', 'stop');
  expect(asked[0]![0]).toBe('clusters/..%2Fa%20b/words');
  expect(asked[0]![1]).toMatchObject({ method: 'POST', body: '{"word":"stop"}' });
  expect(asked[0]![1].headers).toMatchObject({ 'X-SpeedLab-Version': '1' });
});

test('a control word is posted', async () => {
  const { api, asked } = makeApi(202, { type: 'WordGiven', version: 1, run: 'a1', word: 'reshape', number: 7 });
  expect((await api.give('a1', { word: 'reshape', arguments: { zero: 3 } })).number).toBe(7);
  expect(asked[0]![0]).toBe('runs/a1/words');
  expect(asked[0]![1]).toMatchObject({ method: 'POST', body: '{"word":"reshape","arguments":{"zero":3}}' });
});

const problem = (text: string) => ({ type: 'Problem', version: 1, text });

test.each([
  [0, undefined, 'does not answer'],
  [409, problem('tp 3: 16 heads do not divide by 3'), 'tp 3: 16 heads do not divide by 3'],
  [404, { message: 'Not Found' }, 'jupyter server extension enable speedlab_server'],
  [403, problem('Forbidden'), 'no right'],
  [403, problem('/r/config.json may not be read'), '/r/config.json may not be read'],
  [500, undefined, 'its log has details'],
  [200, { type: 'Runs' }, 'none of SpeedLab’s']
])('an answer of status %d is an error that says what to do', async (status, body, text) => {
  const { api } = makeApi(status, body);
  const error: unknown = await api.clusters().catch((reason: unknown) => reason);
  expect(error).toBeInstanceOf(ProblemError);
  expect((error as ProblemError).message).toContain(text);
});
