import type { IRenderMimeRegistry } from '@jupyterlab/rendermime';
import type { IRenderMime } from '@jupyterlab/rendermime-interfaces';
import { Panel, Widget } from '@lumino/widgets';

const WIDGET = 'application/vnd.jupyter.widget-view+json';
/** What stays in a saved document, the best first. */
const STILL = ['text/html', 'image/svg+xml', 'text/plain'];
/** Between two looks for the kernel of a document that is being opened, and of one that may never have one. */
const LOOK_MS = 250;
const SELDOM_MS = 2000;
/** After which a picture in whose place no widget has come says why it does not move. */
const PATIENCE_MS = 5000;

const GONE = 'A picture that the notebook has kept: the folder of this run is gone.';
const UNKNOWN =
  'A picture: the Jupyter server of this page does not know this run, and no kernel draws it here. It changes when the ' +
  'run comes to rest; run the cell again to see it live.';

/**
 * What else is in the output of a run that this server does not draw: its picture, and in the place of it the widget of a
 * kernel, as soon as there is one.
 *
 * 1. ipywidgets shows a widget through the registry of the document, and only once it has put a renderer there that
 *    knows the document's kernel. The one in the application's registry, and in a document's until then, waits for a
 *    kernel that it is given only if it stands in the output itself, which it does not here: it would wait for ever.
 * 2. A widget whose kernel has gone is an error text in its renderer. So the picture stands until a view has come.
 * 3. A kernel that the server does not share its runs with, as one behind a gateway, gives the output another picture
 *    when its run comes to rest: the picture follows. While it stands still, it says why.
 */
export class OtherFaces extends Panel {
  constructor(
    private model: IRenderMime.IMimeModel,
    private readonly application: IRenderMimeRegistry
  ) {
    super();
  }

  /** `gone`: so is the run, and no widget can live. */
  async render(gone: boolean): Promise<void> {
    await this.showPicture();
    // Widgets of a document that is not trusted, whose state may be in it, are no less foreign than its scripts.
    const may = !gone && this.model.trusted && WIDGET in this.model.data && this.application.getFactory(WIDGET);
    if (!may) return this.explain(gone ? GONE : UNKNOWN);
    this.patience = setTimeout(() => this.explain(UNKNOWN), PATIENCE_MS);
    this.lookForKernel();
  }

  /** The output was given another picture. */
  async follow(model: IRenderMime.IMimeModel): Promise<void> {
    this.model = model;
    if (!this.moves) await this.showPicture();
  }

  override dispose(): void {
    clearTimeout(this.timer);
    clearTimeout(this.patience);
    super.dispose();
  }

  private async showPicture(): Promise<void> {
    const type = STILL.find(each => each in this.model.data && this.application.mimeTypes.includes(each));
    if (!type) return;
    const before = this.picture;
    const fresh = (this.picture = this.made(this.application, type));
    try {
      await fresh.renderModel(this.model);
    } finally {
      before?.dispose();
    }
  }

  private explain(text: string): void {
    if (this.isDisposed || this.moves || this.why) return;
    this.why = new Widget({ node: document.createElement('p') });
    this.why.addClass('sl-still');
    this.why.node.textContent = text;
    this.addWidget(this.why);
  }

  private lookForKernel(): void {
    if (this.isDisposed) return;
    const own = this.documents();
    const bound = own?.getFactory(WIDGET);
    if (own && bound && bound !== this.application.getFactory(WIDGET)) void this.showWidget(own);
    else this.timer = setTimeout(() => this.lookForKernel(), this.why ? SELDOM_MS : LOOK_MS);
  }

  /** The registry of the document that this stands in. */
  private documents(): IRenderMimeRegistry | null {
    for (let at = this.parent; at; at = at.parent) {
      const own: unknown = Reflect.get(at, 'rendermime');
      if (own) return own as IRenderMimeRegistry;
    }
    return null;
  }

  private async showWidget(registry: IRenderMimeRegistry): Promise<void> {
    const renderer = this.made(registry, WIDGET);
    renderer.hide();
    await renderer.renderModel(this.model);
    if (this.isDisposed) return;
    const look = () => {
      if (!renderer.isHidden || !(renderer instanceof Panel && renderer.widgets.length)) return;
      this.moves = true;
      clearTimeout(this.patience);
      this.picture?.dispose();
      this.why?.dispose();
      renderer.show();
    };
    // A kernel that is still being restored brings its widgets later.
    const views = new MutationObserver(look);
    views.observe(renderer.node, { childList: true });
    renderer.disposed.connect(() => views.disconnect());
    look();
  }

  private made(registry: IRenderMimeRegistry, type: string): IRenderMime.IRenderer {
    const renderer = registry.createRenderer(type);
    this.insertWidget(this.why ? this.widgets.indexOf(this.why) : this.widgets.length, renderer);
    return renderer;
  }

  private timer: ReturnType<typeof setTimeout> | undefined;
  private patience: ReturnType<typeof setTimeout> | undefined;
  private picture: IRenderMime.IRenderer | undefined;
  private why: Widget | undefined;
  /** Whether a kernel's widget has come. */
  private moves = false;
}
