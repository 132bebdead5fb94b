import type { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import { Panel, Widget } from '@lumino/widgets';

import { OtherFaces } from '../src/dashboard/otherFaces';
import { MIME_TYPE, renderer as plugin } from '../src/dashboard/renderer';

// jest cannot load them, and of these no more than a token, and what the server says of a run, is used here.
jest.mock('@jupyterlab/rendermime', () => ({ IRenderMimeRegistry: {} }));
jest.mock('@jupyterlab/statedb', () => ({ IStateDB: {} }));
const mockAsked: string[] = [];
jest.mock('@jupyterlab/services', () => ({
  ServerConnection: { makeRequest: (url: string) => Promise.resolve({ status: mockAsked.push(url) && 404 }) }
}));

const WIDGET = 'application/vnd.jupyter.widget-view+json';
const SAVED = { [WIDGET]: { model_id: 'm' }, 'text/html': '<img>', 'image/svg+xml': '<svg/>', 'text/plain': 'a run' };

/** Shows what it is given as text. */
class Still extends Widget implements IRenderMime.IRenderer {
  constructor(private readonly type: string) {
    super();
  }
  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    await Promise.resolve();
    this.node.textContent = `${this.type}: ${model.data[this.type] as string}`;
  }
}

/** As ipywidgets' one: a text, until the view has come that `view` makes; without a kernel it never does. */
class Waiting extends Panel implements IRenderMime.IRenderer {
  constructor(private readonly view: Promise<Widget> | null) {
    super();
  }
  async renderModel(): Promise<void> {
    this.node.textContent = 'Loading widget...';
    if (!this.view) return new Promise(() => {});
    const view = await this.view;
    this.node.textContent = '';
    this.addWidget(view);
  }
}

type Factory = () => IRenderMime.IRenderer;

function registryOf(factories: Record<string, Factory>): IRenderMimeRegistry {
  const made = {
    get mimeTypes() {
      return Object.keys(factories);
    },
    getFactory: (type: string) => factories[type],
    createRenderer: (type: string) => factories[type]!()
  };
  return made as unknown as IRenderMimeRegistry;
}

const still = (type: string): Record<string, Factory> => ({ [type]: () => new Still(type) });
const application = () => ({ ...still('text/html'), ...still('text/plain'), [WIDGET]: () => new Waiting(null) });
const turn = () => jest.advanceTimersByTimeAsync(300);

/** In an output of a document with a registry of its own. */
function standing(
  data: Record<string, unknown>,
  global: IRenderMimeRegistry,
  own: IRenderMimeRegistry,
  trusted = true
): OtherFaces {
  const output = Object.assign(new Panel(), { rendermime: own });
  const outer = new Panel();
  const faces = new OtherFaces({ data, trusted } as unknown as IRenderMime.IMimeModel, global);
  output.addWidget(outer);
  outer.addWidget(faces);
  return faces;
}

const STILL =
  'A picture: the Jupyter server of this page does not know this run, and no kernel draws it here. It changes when the ' +
  'run comes to rest; run the cell again to see it live.';
const GONE = 'A picture that the notebook has kept: the folder of this run is gone.';
const texts = (faces: OtherFaces) => faces.widgets.map(each => `${each.isHidden ? '-' : '+'}${each.node.textContent}`);

beforeEach(() => jest.useFakeTimers());
afterEach(() => jest.useRealTimers());

test('the picture stands until the document’s own registry knows the kernel, and its widget has come', async () => {
  const global = application();
  const own: Record<string, Factory> = { ...global };
  const faces = standing(SAVED, registryOf(global), registryOf(own));
  await faces.render(false);
  await turn();
  expect(texts(faces)).toEqual(['+text/html: <img>']);
  let come: (view: Widget) => void = () => {};
  const view = new Promise<Widget>(found => (come = found));
  own[WIDGET] = () => new Waiting(view);
  await turn();
  expect(texts(faces)).toEqual(['+text/html: <img>', '-Loading widget...']);
  const living = new Widget();
  living.node.textContent = 'a dashboard';
  come(living);
  await turn();
  expect(texts(faces)).toEqual(['+a dashboard']);
  // It draws by itself: a picture that comes later is for the saved document.
  await faces.follow({ data: { ...SAVED, 'text/html': 'later' }, trusted: true } as unknown as IRenderMime.IMimeModel);
  await jest.advanceTimersByTimeAsync(10_000);
  expect(texts(faces)).toEqual(['+a dashboard']);
  faces.dispose();
  expect(jest.getTimerCount()).toBe(0);
});

test('a picture that stands still says why, and follows what its kernel leaves behind', async () => {
  const global = application();
  const own: Record<string, Factory> = { ...global };
  const faces = standing({ [WIDGET]: {}, 'text/plain': 'a run' }, registryOf(global), registryOf(own));
  await faces.render(false);
  expect(texts(faces)).toEqual(['+text/plain: a run']);
  await jest.advanceTimersByTimeAsync(5000);
  expect(texts(faces)).toEqual(['+text/plain: a run', `+${STILL}`]);
  const paused = { data: { ...SAVED, 'text/html': 'paused' }, trusted: true } as unknown as IRenderMime.IMimeModel;
  const finished = { data: { ...SAVED, 'text/html': 'finished' }, trusted: true } as unknown as IRenderMime.IMimeModel;
  await Promise.all([faces.follow(paused), faces.follow(finished)]);
  expect(texts(faces)).toEqual(['+text/html: finished', `+${STILL}`]);
  own[WIDGET] = () => new Waiting(Promise.resolve(new Widget()));
  await turn(); // It looks less often by now.
  expect(texts(faces)).not.toEqual(['+']);
  await jest.advanceTimersByTimeAsync(2000);
  expect(texts(faces)).toEqual(['+']);
  faces.dispose();
  expect(jest.getTimerCount()).toBe(0);
});

test('a widget whose kernel has gone leaves the picture; one that comes late is shown', async () => {
  class Late extends Panel implements IRenderMime.IRenderer {
    async renderModel(): Promise<void> {
      await Promise.resolve();
      this.node.textContent = 'Error displaying widget: model not found';
    }
  }
  const late = new Late();
  const global = application();
  const faces = standing(SAVED, registryOf(global), registryOf({ ...global, [WIDGET]: () => late }));
  await faces.render(false);
  await turn();
  expect(texts(faces)).toEqual(['+text/html: <img>', '-Error displaying widget: model not found']);
  late.node.textContent = '';
  late.addWidget(new Widget());
  await turn();
  expect(texts(faces)).toEqual(['+']);
});

test.each([
  ['a run that is gone', SAVED, application(), true, true],
  ['an output without a widget', { 'text/plain': 'a run', 'text/html': '<img>' }, application(), false, true],
  ['a place without ipywidgets', SAVED, still('text/html'), false, true],
  ['a document that is not trusted', SAVED, application(), false, false]
])('of %s the best picture is shown, and nothing is waited for', async (_, data, factories, gone, trusted) => {
  const own = { ...factories, [WIDGET]: () => new Waiting(Promise.resolve(new Widget())) };
  const faces = standing(data, registryOf(factories), registryOf(own), trusted);
  await faces.render(gone);
  expect([texts(faces), jest.getTimerCount()]).toEqual([['+text/html: <img>', `+${gone ? GONE : STILL}`], 0]);
});

test('an output that is given its picture anew shows it, where the server does not know the run', async () => {
  const registry = registryOf(still('text/html'));
  const made: Factory[] = [];
  Object.assign(registry, {
    addFactory: ({ createRenderer }: { createRenderer: Factory }) => made.push(createRenderer)
  });
  void plugin.activate({ serviceManager: { serverSettings: { baseUrl: 'http://here/' } } } as never, registry, null);
  const output = made[0]!();
  const show = (html: string) =>
    output.renderModel({
      data: { [MIME_TYPE]: { run: 'r1' }, 'text/html': html }
    } as unknown as IRenderMime.IMimeModel);
  await show('running');
  await show('finished');
  expect(output.node.textContent).toBe(`text/html: finished${STILL}`);
  expect(mockAsked).toEqual(['http://here/speedlab/api/runs/r1']);
});
