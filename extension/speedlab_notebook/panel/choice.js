// A radio group whose single options can be disabled, each with a reason.

function render({ model, el }) {
  const id = `speedlab-${crypto.randomUUID?.() ?? Math.random().toString(36).slice(2)}`;
  const label = document.createElement("span");
  label.id = `${id}-label`;
  label.className = "speedlab-choice-label";
  const group = document.createElement("div");
  group.className = "speedlab-options";
  group.setAttribute("role", "radiogroup");
  group.setAttribute("aria-labelledby", label.id);
  el.replaceChildren(label, group);

  function build() {
    const texts = model.get("options");
    group.replaceChildren(...texts.map((text, number) => {
      const option = document.createElement("label");
      const radio = document.createElement("input");
      radio.type = "radio";
      radio.name = id;
      radio.addEventListener("change", () => {
        model.set("index", number);
        model.save_changes();
      });
      option.append(radio, text);
      return option;
    }));
    show();
  }

  function show() {
    label.textContent = model.get("label");
    const reasons = model.get("reasons");
    [...group.children].forEach((option, number) => {
      const radio = option.firstElementChild;
      const chosen = number === model.get("index");
      radio.checked = chosen;
      radio.disabled = Boolean(reasons[number]);
      option.classList.toggle("speedlab-chosen-option", chosen);
      option.classList.toggle("speedlab-greyed", radio.disabled);
      option.title = reasons[number] || model.get("meaning");
    });
  }

  // Strings of the kernel are inserted as text, never as markup.
  const shown = ["change:index", "change:reasons", "change:label"];
  model.on("change:options", build);
  shown.forEach((event) => model.on(event, show));
  build();
  return () => {
    model.off("change:options", build);
    shown.forEach((event) => model.off(event, show));
  };
}

export default { render };
