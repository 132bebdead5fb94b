import { Widget } from '@lumino/widgets';

import type { PanelView } from './view';

/** The panel in JupyterLab's side area; hidden, its view asks for nothing. */
export class PanelWidget extends Widget {
  constructor(readonly view: PanelView) {
    super();
    this.id = 'speedlab-panel';
    this.addClass('sl-panel-widget');
    this.title.caption = 'SpeedLab: clusters and runs';
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', 'SpeedLab');
    this.node.append(view.node);
  }

  override dispose(): void {
    if (this.isDisposed) return;
    this.view.dispose();
    super.dispose();
  }

  /** Who opens it by a key goes on in it: from the row that is next. */
  protected override onActivateRequest(): void {
    this.view.focus();
  }

  protected override onAfterAttach(): void {
    this.view.visible = this.isVisible;
  }

  protected override onAfterShow(): void {
    this.view.visible = true;
  }

  protected override onAfterHide(): void {
    this.view.visible = false;
  }

  protected override onBeforeDetach(): void {
    this.view.visible = false;
  }
}
