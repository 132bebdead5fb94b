// The panel's own script on the page: keyboard shortcuts, focus of a field found by search, names for screen readers.

const TEXT = 'input[type="text"], input[type="number"], textarea';

function render({ model, el }) {
  let panel = null;

  function attach() {
    panel = el.closest(".speedlab-panel");
    if (!panel) {
      if (!ended) requestAnimationFrame(attach);
      return;
    }
    panel.setAttribute("role", "region");
    panel.setAttribute("aria-label", "SpeedLab panel");
    window.addEventListener("keydown", onKey, true); // Capture on window: runs before JupyterLab, which listens on document.
    panel.addEventListener("focusin", describe);
    panel.addEventListener("click", copy);
    for (const name of ["effect", "changes"]) {
      panel.querySelector(`.speedlab-${name} .widget-html-content`)?.setAttribute("aria-live", "polite");
    }
    panel.querySelector(".speedlab-step-count input")?.setAttribute("aria-label", "steps");
  }

  function onKey(event) {
    if (!panel.contains(event.target)) {
      return;
    }
    // JupyterLab uses arrows, Enter and letters as shortcuts unless the focused element has this attribute.
    const plain = !(event.ctrlKey || event.metaKey || event.altKey);
    event.target.toggleAttribute("data-lm-suppress-shortcuts", plain);
    const key = event.key.toLowerCase();
    if (plain && key === "enter" && event.target.closest(".speedlab-search")) {
      model.send({ do: "choose" });
    }
    if (plain || event.altKey || (key !== "z" && key !== "y") || isBeingWritten(event.target)) {
      return;
    }
    event.preventDefault();
    event.stopImmediatePropagation();
    model.send({ do: key === "y" || event.shiftKey ? "redo" : "undo" });
  }

  // While a box has text that is not committed yet, the browser undoes letters in the box.
  function isBeingWritten(box) {
    return box.matches(TEXT) && box.value !== box.dataset.speedlabValue;
  }

  // Let a screen reader read the note together with its control.
  function describe(event) {
    if (event.target.matches(TEXT)) {
      event.target.dataset.speedlabValue = event.target.value;
    }
    const note = event.target.closest(".speedlab-page > *")?.nextElementSibling;
    if (note?.classList.contains("speedlab-note")) {
      note.id ||= `speedlab-note-${Math.random().toString(36).slice(2)}`;
      event.target.setAttribute("aria-describedby", note.id);
    }
  }

  async function copy(event) {
    const button = event.target.closest(".speedlab-copy");
    const text = panel.querySelector(".speedlab-text textarea");
    if (!button || !text) {
      return;
    }
    text.select();
    try {
      await navigator.clipboard.writeText(text.value);
    } catch {
      document.execCommand("copy"); // Pages that are not served over https have no clipboard.
    }
    model.send({ do: "copied" });
  }

  function onMessage(message) {
    if (message.do !== "focus" || !panel) {
      return;
    }
    const until = performance.now() + 3000;
    // The tab of the field may not be drawn yet: retry for 3 seconds.
    (function find() {
      const row = panel.querySelector(`.${CSS.escape(message.name)}`);
      const control = row?.querySelector("input:checked, input:not([type=radio]), select, textarea") ?? row?.querySelector("input");
      if (control && control.offsetParent !== null) {
        row.scrollIntoView({ block: "nearest" });
        control.focus();
        row.classList.add("speedlab-sought");
        setTimeout(() => row.classList.remove("speedlab-sought"), 1600);
      } else if (performance.now() < until) {
        requestAnimationFrame(find);
      }
    })();
  }

  let ended = false;
  attach();
  model.on("msg:custom", onMessage);
  return () => {
    ended = true;
    model.off("msg:custom", onMessage);
    window.removeEventListener("keydown", onKey, true);
    panel?.removeEventListener("focusin", describe);
    panel?.removeEventListener("click", copy);
  };
}

export default { render };
