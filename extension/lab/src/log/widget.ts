import { Widget } from '@lumino/widgets';

import type { OutputView } from './view';

/** Ranks' output in the main area. */
export class OutputWidget extends Widget {
  constructor(private readonly view: OutputView) {
    super();
    this.addClass('sl-output-widget');
    this.node.append(view.node);
  }

  override dispose(): void {
    if (this.isDisposed) return;
    this.view.dispose();
    super.dispose();
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
