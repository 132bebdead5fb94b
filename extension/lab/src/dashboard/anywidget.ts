import { CompareView } from '../compare/view';
import { bundleId, bytesOf, ModelSource } from './modelSource';
import type { Model } from './modelSource';
import type { Plotly } from './plotly';
import { DashboardView } from './view';

// What anywidget loads: the same dashboard, fed by a kernel.

/** Of a page, by the model that brought it. */
const loaded = new Map<string, Promise<Plotly>>();

/** plotly out of the widget that all dashboards of a kernel share; it comes later where no view was awaited. */
async function loadPlotly(model: Model): Promise<Plotly> {
  const reference = await new Promise<string>(found => {
    const look = () => {
      const bundle = model.get('bundle');
      if (typeof bundle !== 'string') return;
      model.off('change:bundle', look);
      found(bundleId(bundle));
    };
    model.on('change:bundle', look);
    look();
  });
  const coming = loaded.get(reference) ?? unpacked(await model.widget_manager.get_model(reference));
  loaded.set(reference, coming);
  return coming;
}

async function unpacked(bundle: Model): Promise<Plotly> {
  const zipped = bytesOf(bundle.get('source') as string);
  const stream = new Blob([zipped]).stream().pipeThrough(new DecompressionStream('gzip'));
  const source = await new Response(stream).blob();
  // A module of a blob, as anywidget's own: no text is evaluated, so that a strict content policy allows it.
  const url = URL.createObjectURL(new Blob([source], { type: 'text/javascript' }));
  try {
    return ((await import(url)) as { default: Plotly }).default;
  } finally {
    URL.revokeObjectURL(url);
  }
}

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const source = new ModelSource(model, crypto.randomUUID());
  const View = model.get('compares') ? CompareView : DashboardView;
  const view = new View(source, () => loadPlotly(model));
  el.append(view.node);
  return () => view.dispose();
}

export default { render };
