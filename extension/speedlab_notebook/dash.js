// The dashboard's page side. It keeps the figures as data, takes in ticks, and draws when it can be seen.
// Messages are described in drawing.py.

const CARDS = ["memory", "loss", "throughput", "anatomy"];
const PIPELINE = "pipeline";
// Below the cards, across both columns, where there is such a figure.
const WIDE = ["places", "exchange", PIPELINE];
const STEP_FIGURES = ["loss", "throughput", "anatomy"];
const TABLE_ROWS = 12;
const ALIVE_MS = 20000;
const HIDE_AFTER_MS = 1500;
const MOST_OFTEN_MS = 90;
const MOST_SELDOM_MS = 800;
const POINTING_MS = 150;
const CONFIG = {
  displaylogo: false, showSendToCloud: false, responsive: true,
  modeBarButtonsToRemove: ["sendChartToCloud", "sendDataToCloud", "lasso2d", "select2d", "toImage", "downloadJson"],
};
const PAPER = {ink: "#1c2530", line: "#dde2e8", card: "#ffffff"};

// ---- plotly, once a page ----------------------------------------------------------------------------------------------

async function loadPlotly(model) {
  const reference = model.get("bundle").replace("IPY_MODEL_", "");
  const bundle = await model.widget_manager.get_model(reference);
  const loaded = (globalThis.speedlabPlotly ??= {});
  return (loaded[bundle.get("version")] ??= evaluate(bundle.get("source")));
}

async function evaluate(zipped) {
  const stream = new Blob([zipped]).stream().pipeThrough(new DecompressionStream("gzip"));
  const source = await new Response(stream).text();
  const module = {exports: {}};
  // Given a module object, the bundle hands itself over and leaves no global and no AMD module behind.
  new Function("module", "exports", source).call(globalThis, module, module.exports);
  return module.exports;
}

// ---- figures as data --------------------------------------------------------------------------------------------------

const floats = (view) => new Float32Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));

function unpack(value, buffers) {
  if (Array.isArray(value)) return value.map((item) => unpack(item, buffers));
  if (value === null || typeof value !== "object" || ArrayBuffer.isView(value)) return value;
  if ("f32" in value) return floats(typeof value.f32 === "number" ? buffers[value.f32] : value.f32);
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, unpack(item, buffers)]));
}

function joined(a, b) {
  const both = new Float32Array(a.length + b.length);
  both.set(a);
  both.set(b, a.length);
  return both;
}

const take = {
  figure(state, part, buffers) {
    state.figures[part.figure] = {data: unpack(part.data, buffers), layout: unpack(part.layout, buffers)};
    return [part.figure];
  },
  extend(state, part, buffers) {
    const values = floats(buffers[part.buffer]);
    let at = 0;
    part.traces.forEach((index, i) => {
      const trace = state.figures[part.figure].data[index], count = part.points[i];
      trace.x = joined(trace.x, values.subarray(at, at + count));
      trace.y = joined(trace.y, values.subarray(at + count, at + 2 * count));
      at += 2 * count;
    });
    return [part.figure];
  },
  bars(state, part, buffers) {
    const {data, layout} = state.figures[part.figure], values = floats(buffers[part.buffer]), width = values.length / data.length;
    data.forEach((trace, i) => { trace.y = values.subarray(i * width, (i + 1) * width); });
    layout.annotations = layout.annotations.map((note, i) => ({...note, text: part.notes[i]}));
    return [part.figure];
  },
  marks(state, part) {
    for (const name of STEP_FIGURES) {
      Object.assign(state.figures[name].layout, {shapes: part.shapes, annotations: part.annotations});
    }
    return STEP_FIGURES;
  },
  head(state, part) {
    state.head = part;
    return [];
  },
};

// ---- colours of the page ----------------------------------------------------------------------------------------------

function pageColours(element) {
  const style = getComputedStyle(element);
  const read = (name) => style.getPropertyValue(name).trim();
  return {ink: read("--sl-ink"), line: read("--sl-line"), card: read("--sl-card")};
}

function inked({data, layout}, {ink, line, card}) {
  const axes = Object.keys(layout).filter((key) => /^[xy]axis/.test(key));
  const colouredAxes = axes.map((key) => [key, {...layout[key], gridcolor: line, linecolor: line, zerolinecolor: line}]);
  return {
    data: data.map((trace) => trace.meta !== "ink" ? trace : {
      ...trace, line: {...trace.line, color: ink}, ...(trace.marker && {marker: {...trace.marker, color: ink}}),
    }),
    layout: {
      ...layout,
      ...Object.fromEntries(colouredAxes),
      font: {...layout.font, color: ink},
      hoverlabel: {bgcolor: card, bordercolor: line, font: {color: ink}},
      modebar: {color: line, activecolor: ink, bgcolor: "rgba(0,0,0,0)"},
      shapes: layout.shapes.map((s) => s.name === "ink" ? {...s, line: {...s.line, color: ink}} : s),
    },
  };
}

// ---- numbers ----------------------------------------------------------------------------------------------------------

const number = (value) => Number.isFinite(value) ? value.toLocaleString(undefined, {maximumSignificantDigits: 5}) : "–";

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function table(name, {data, layout}) {
  const unit = (name === PIPELINE ? layout.xaxis : layout.yaxis).title.text, title = layout.title.text;
  const [corner, columns, rows] = name === PIPELINE ? byLane(data, layout)
    : layout.xaxis.type === "category" ? byCategory(data) : bySteps(data, layout);
  const line = (tag, [first, ...cells]) => element("tr", {}, element("th", {}, first), ...cells.map((cell) => element(tag, {}, cell)));
  const caption = element("figcaption", {}, unit === title ? title : `${title} (${unit})`);
  const body = rows.map(([first, ...values]) => line("td", [first, ...values.map((value) => value === undefined ? "" : number(value))]));
  return element("figure", {"data-table": name}, caption,
    element("table", {}, element("thead", {}, line("th", [corner, ...columns])), element("tbody", {}, ...body)));
}

function byCategory(data) {
  // A row for each part of the bars, their sum below, a column for each bar.
  const bars = [...data[0].x];
  const rows = data.map((trace) => [trace.name, ...trace.y]);
  const sums = bars.map((_, i) => data.reduce((sum, trace) => sum + trace.y[i], 0));
  return ["", bars, [...rows, ["sum", ...sums]]];
}

function byLane(data, {yaxis}) {
  // A row for each rank: what it did took so long, all micro-batches together.
  const sum = (trace, lane) => trace.x.reduce((all, length, i) => trace.y[i] === lane ? all + length : all, 0);
  const rows = yaxis.ticktext.map((name, lane) => [name.replace("<br>", ", "), ...data.map((trace) => sum(trace, lane))]);
  return ["", data.map((trace) => trace.name), rows];
}

function bySteps(data, layout) {
  // The last steps, a column for each curve.
  const steps = [...new Set(data.flatMap((trace) => [...trace.x]))].sort((a, b) => a - b).slice(-TABLE_ROWS);
  const second = layout.yaxis2?.title.text;
  const columns = data.map((trace) => trace.yaxis === "y2" && second !== trace.name ? `${trace.name} (${second})` : trace.name);
  return ["step", columns, steps.map((step) => [String(step), ...data.map((trace) => trace.y[trace.x.lastIndexOf(step)])])];
}

// ---- pictures ---------------------------------------------------------------------------------------------------------

const CELL = {width: 620, height: 370, top: 44};

async function cells(Plotly, figures, format) {
  const images = [];
  let bottom = CELL.top + 2 * CELL.height;
  for (const [i, figure] of figures.entries()) {
    const {data, layout} = inked(figure, PAPER), wide = i >= CARDS.length;
    const size = wide ? {width: 2 * CELL.width, height: layout.height} : {width: CELL.width, height: CELL.height};
    const uri = await Plotly.toImage({data, layout: {...layout, ...size}}, {format, ...size, ...(format === "png" && {scale: 1})});
    images.push({uri, x: wide ? 0 : (i % 2) * CELL.width, y: wide ? bottom : CELL.top + Math.floor(i / 2) * CELL.height});
    if (wide) bottom += layout.height;
  }
  return {images, width: 2 * CELL.width, height: bottom};
}

async function pngPicture(Plotly, figures, title) {
  const {images, width, height} = await cells(Plotly, figures, "png");
  const canvas = Object.assign(document.createElement("canvas"), {width, height});
  const context = canvas.getContext("2d");
  context.fillStyle = PAPER.card;
  context.fillRect(0, 0, width, height);
  context.fillStyle = PAPER.ink;
  context.font = "600 17px system-ui, sans-serif";
  context.fillText(title, 14, 28, width - 28);
  for (const {uri, x, y} of images) {
    const image = new Image();
    image.src = uri;
    await image.decode();
    context.drawImage(image, x, y);
  }
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

async function svgPicture(Plotly, figures, title) {
  const {images, width, height} = await cells(Plotly, figures, "svg");
  const space = "http://www.w3.org/2000/svg";
  const root = document.createElementNS(space, "svg");
  for (const [key, value] of Object.entries({xmlns: space, width, height, viewBox: `0 0 ${width} ${height}`})) root.setAttribute(key, value);
  const page = document.createElementNS(space, "rect"), text = document.createElementNS(space, "text");
  for (const [key, value] of Object.entries({width, height, fill: PAPER.card})) page.setAttribute(key, value);
  for (const [key, value] of Object.entries({x: 14, y: 28, fill: PAPER.ink, "font-size": 17, "font-family": "sans-serif"})) text.setAttribute(key, value);
  text.textContent = title;
  root.append(page, text);
  for (const {uri, x, y} of images) {
    const source = decodeURIComponent(uri.slice(uri.indexOf(",") + 1));
    const inner = new DOMParser().parseFromString(source, "image/svg+xml").documentElement;
    inner.setAttribute("x", x);
    inner.setAttribute("y", y);
    root.append(document.importNode(inner, true));
  }
  return new Blob([new XMLSerializer().serializeToString(root)], {type: "image/svg+xml"});
}

function save(blob, name) {
  const url = URL.createObjectURL(blob);
  element("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// ---- the view ---------------------------------------------------------------------------------------------------------

function render({model, el}) {
  const state = {figures: {}, head: {text: "", state: "", mark: "", note: ""}, seq: -1, trouble: ""};
  const view = crypto.randomUUID();
  const dirty = new Set();
  let Plotly = null, seen = true, gap = false, timer = 0, byRank = false, states = false, chosen = false, showTable = false, gone = false, pictureWanted = false;

  const text = element("span", {class: "sl-text", role: "status", "aria-label": "run"});
  const word = element("span", {class: "sl-state", "aria-label": "state"});
  const tool = (label, hint) => element("button", {type: "button", title: hint, "aria-label": hint}, label);
  const buttons = {
    states: tool("model states", "Show only what a ZeRO stage partitions, or all memory"),
    rank: tool("by rank", "Show the anatomy of a step by rank"),
    table: tool("table", "Show the numbers"),
    png: tool("PNG", "Save all plots as PNG"),
    svg: tool("SVG", "Save all plots as SVG"),
  };
  const note = element("div", {class: "sl-note", role: "alert"}, "Loading plots …");
  const plots = Object.fromEntries([...CARDS, ...WIDE].map((name) => [name, element("div", {class: "sl-plot", "data-plot": name})]));
  for (const name of WIDE) plots[name].hidden = true;
  const grid = element("div", {class: "sl-grid"}, ...Object.values(plots));
  const tables = element("div", {class: "sl-tables", hidden: ""});
  const head = element("div", {class: "sl-head"}, element("span", {class: "sl-line"}, text, word), element("span", {class: "sl-tools"}, ...Object.values(buttons)));
  const root = element("div", {class: "speedlab-dash"}, head, note, grid, tables);
  el.append(root);

  const figureOf = (card) => {
    if (card === "anatomy" && byRank) return state.figures.ranks;
    return state.figures[card === "memory" && states ? "states" : card];
  };
  const cards = () => [...CARDS, ...WIDE.filter((name) => state.figures[name])];
  const schedule = (wait = 0) => { timer ||= setTimeout(draw, wait); };

  function draw() {
    timer = 0;
    if (gone || !seen || !Plotly || state.seq < 0) return;
    const start = performance.now(), colours = pageColours(root);
    if (showTable) {
      tables.replaceChildren(...cards().map((card) => table(card, figureOf(card))));
    } else {
      for (const name of WIDE) plots[name].hidden = !state.figures[name];
      for (const card of cards().filter((name) => dirty.has(name))) {
        const {data, layout} = inked(figureOf(card), colours);
        Plotly.react(plots[card], data, layout, CONFIG);
      }
      followPointer();
    }
    dirty.clear();
    root.dataset.seq = state.seq;
    // At most a third of the page's time on a slow machine; the first time takes long anywhere.
    quietUntil = performance.now() + Math.min(MOST_SELDOM_MS, Math.max(MOST_OFTEN_MS, 2 * (performance.now() - start)));
  }
  let quietUntil = 0;

  function changed(names) {
    for (const name of names) dirty.add({ranks: "anatomy", states: "memory"}[name] ?? name);
    schedule(Math.max(0, quietUntil - performance.now()));
  }

  function showHead() {
    text.textContent = state.head.text;
    word.textContent = `${state.head.mark} ${state.head.state}`;
    word.dataset.state = state.head.state;
    if (Plotly) note.textContent = state.trouble || state.head.note;
  }

  function onKeyframe() {
    const frame = model.get("keyframe");
    if (!frame || frame.seq === undefined || frame.seq < state.seq) return;
    state.figures = unpack(frame.figures, []);
    Object.assign(state, {head: frame.head, seq: frame.seq});
    gap = false;
    // At first, unless a person has chosen: where the process holds far more than the model, the model's part alone.
    if (!chosen && frame.states !== null) chooseStates(frame.states);
    showHead();
    changed(cards());
  }

  function onMessage(message, buffers) {
    if (message.kind === "picture") return void sendPicture();
    if (message.kind === "trouble") {
      state.trouble = message.text;
      return showHead();
    }
    if (message.kind !== "tick" || message.seq <= state.seq) return;
    if (gap || message.seq !== state.seq + 1) {
      if (!gap) model.send({kind: "keyframe"});
      gap = true;
      return;
    }
    state.seq = message.seq;
    const names = message.parts.flatMap((part) => take[part.part](state, part, buffers));
    if (message.parts.some((part) => part.part === "head")) showHead();
    changed(names);
  }

  const headline = () => `${state.head.text} · ${state.head.mark} ${state.head.state}`;
  const picture = (make) => make(Plotly, cards().map(figureOf), headline());

  async function sendPicture() {
    pictureWanted = !Plotly || state.seq < 0;
    if (pictureWanted) return;
    const blob = await picture(pngPicture);
    model.send({kind: "picture"}, undefined, [await blob.arrayBuffer()]);
  }

  function watch(on) {
    seen = on;
    model.send({kind: "watching", view, on});
    if (on) changed(cards());
  }

  // A step of the anatomy that the pointer rests on shows its own timeline; else the newest one is shown.
  let pointing = 0, follows = false;
  function followPointer() {
    if (follows || !plots.anatomy.on) return;
    follows = true;
    const ask = (step) => {
      clearTimeout(pointing);
      pointing = setTimeout(() => { if (state.figures[PIPELINE]) model.send({kind: "timeline", step}); }, POINTING_MS);
    };
    plots.anatomy.on("plotly_hover", ({points}) => { if (!byRank) ask(points[0].x); });
    plots.anatomy.on("plotly_unhover", () => ask(null));
  }

  function chooseStates(on) {
    states = on;
    chosen = true;
    buttons.states.setAttribute("aria-pressed", on);
    changed(["memory"]);
  }

  buttons.states.addEventListener("click", () => chooseStates(!states));
  buttons.rank.addEventListener("click", () => {
    byRank = !byRank;
    buttons.rank.setAttribute("aria-pressed", byRank);
    changed(["anatomy"]);
  });
  buttons.table.addEventListener("click", () => {
    showTable = !showTable;
    buttons.table.setAttribute("aria-pressed", showTable);
    grid.hidden = showTable;
    tables.hidden = !showTable;
    changed(cards());
  });
  const file = (kind) => `${state.head.text.split(" · ")[0].replace(/[^\w.-]+/g, "-") || "run"}.${kind}`;
  const shown = (error) => { note.textContent = `The picture could not be made: ${error.message}`; };
  buttons.png.addEventListener("click", () => picture(pngPicture).then((blob) => save(blob, file("png"))).catch(shown));
  buttons.svg.addEventListener("click", () => picture(svgPicture).then((blob) => save(blob, file("svg"))).catch(shown));

  const themes = new MutationObserver(() => changed(cards()));
  themes.observe(document.body, {attributes: true});
  let inSight = true, hideTimer = 0;
  const look = () => {
    clearTimeout(hideTimer);
    const now = inSight && !document.hidden;
    if (now && !seen) watch(true);
    if (!now && seen) hideTimer = setTimeout(() => watch(false), HIDE_AFTER_MS);
  };
  const sight = new IntersectionObserver((entries) => { inSight = entries.at(-1).isIntersecting; look(); });
  sight.observe(root);
  document.addEventListener("visibilitychange", look);
  const alive = setInterval(() => { if (seen) model.send({kind: "watching", view, on: true}); }, ALIVE_MS);

  model.on("change:keyframe", onKeyframe);
  model.on("msg:custom", onMessage);
  onKeyframe();
  watch(true);
  loadPlotly(model).then((loaded) => {
    Plotly = loaded;
    showHead();
    changed(cards());
    if (pictureWanted) return sendPicture();
  }).catch((error) => { note.textContent = `The plots cannot be drawn: ${error.message}. Run the cell again.`; });

  // The static picture stands in the next output, for when no kernel is there; beside the live one it would be twice.
  const tidy = setInterval(() => {
    const next = root.closest(".jp-OutputArea-child")?.nextElementSibling;
    if (next) next.classList.add("speedlab-live-shown");
  }, 500);

  return () => {
    gone = true;
    clearInterval(alive);
    clearInterval(tidy);
    clearTimeout(timer);
    clearTimeout(hideTimer);
    clearTimeout(pointing);
    root.closest(".jp-OutputArea-child")?.nextElementSibling?.classList.remove("speedlab-live-shown");
    themes.disconnect();
    sight.disconnect();
    document.removeEventListener("visibilitychange", look);
    model.off("change:keyframe", onKeyframe);
    model.off("msg:custom", onMessage);
    model.send({kind: "watching", view, on: false});
    if (Plotly) Object.values(plots).forEach((plot) => Plotly.purge(plot));
  };
}

export default {render};
