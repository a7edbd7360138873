// Draws every chart of the page, in the theme of the system, of the address (#dark, #light) or of
// the button. Each script.spec holds a Vega-Lite specification, its rows packed as columns, and names
// the element to draw in.
const themes = JSON.parse(document.getElementById("themes").textContent);
const button = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");
const NARROW = 480;
const PAPER = 640; // pixels, the width of a saved picture
const NEAREST = "the point nearest to the pointer";
const hidden = new Set();
const before = new Map(); // what was chosen in a chart when it was last drawn
let chosen = ["dark", "light"].find((name) => location.hash === `#${name}`);
let drawn = new Map();
let drawing = Promise.resolve();

function configuration(theme, width) {
  const config = structuredClone(themes[theme]);
  config.background = "transparent";
  if (width < NARROW) {
    config.axis.labelLimit = 110;
    config.legend.labelLimit = 260;
    config.legend.columns = 1;
  }
  return config;
}

let usual;

// Of the point that is nearest to the pointer Vega-Lite finds the numbers, but looks for names in
// the place around the point: there they are undefined.
function tooltip(handler, event, item, value) {
  const point = item?.datum?.datum;
  const named = value && point
    ? Object.fromEntries(Object.entries(value).map(
        ([key, told]) => [key, told === "undefined" ? point[key] : told]))
    : value;
  usual.call(handler, handler, event, item, named);
}

async function embed(place, spec, config) {
  const options = { renderer: "svg", actions: false, ast: true, logLevel: 1 };
  if (!usual) {
    const nothing = { data: { values: [] }, mark: "point" };
    const made = await window.vegaEmbed(document.createElement("div"), nothing, options);
    usual = made.view.tooltip();
    made.finalize();
  }
  const own = { ...spec, config: { ...(spec.config || {}), ...config } };
  return window.vegaEmbed(place, own, { ...options, tooltip });
}

// Names that are switched off fade in every chart that knows the parameter.
function fade(view) {
  try {
    view.signal("hidden", [...hidden]).runAsync();
  } catch {
    // This chart has no names to switch.
  }
}

// Choose in a chart what was chosen before, but for the point nearest to the pointer.
async function choose(view, spec, signals) {
  for (const { name, select } of spec.params || []) {
    if (name in signals && !select?.nearest) view.signal(name, signals[name]);
  }
  await view.runAsync();
}

function unpacked(element) {
  const spec = JSON.parse(element.textContent);
  for (const [name, table] of Object.entries(spec.datasets)) {
    const columns = Object.entries(table.columns).map(([column, told]) =>
      [column, told.names ? told.at.map((place) => told.names[place]) : told]);
    spec.datasets[name] = Array.from({ length: table.rows }, (_, row) =>
      Object.fromEntries(columns.map(([column, values]) => [column, values[row]])));
  }
  return spec;
}

async function drawOne(element, theme) {
  const place = document.getElementById(element.dataset.for);
  if (place.closest("details:not([open])")) return; // its width tells in some browsers only
  try {
    const spec = unpacked(element);
    const config = configuration(theme, place.clientWidth);
    const result = await embed(place, spec, config);
    drawn.set(element, result);
    await choose(result.view, spec, before.get(element) || {});
    fade(result.view);
    offer(place, element);
  } catch (error) {
    // One chart that fails does not take the others with it.
    place.textContent = `This chart could not be drawn: ${error.message}`;
  }
}

async function draw() {
  const theme = chosen || (system.matches ? "dark" : "light");
  if (chosen) document.documentElement.dataset.theme = chosen;
  button.hidden = false;
  button.setAttribute("aria-pressed", String(theme === "dark"));
  for (const [element, result] of drawn) {
    before.set(element, result.view.getState().signals);
    result.finalize();
  }
  drawn = new Map();
  await drawMissing(document);
  document.documentElement.dataset.drawn = theme;
}

async function drawMissing(within) {
  const theme = chosen || (system.matches ? "dark" : "light");
  for (const element of within.querySelectorAll("script.spec")) {
    if (!drawn.has(element)) await drawOne(element, theme);
  }
}

function then(work) {
  drawing = drawing.then(work);
}

// Buttons to save a chart as a light picture of a paper's width, under its title.
function offer(place, element) {
  if (place.nextElementSibling.className === "save") return;
  const row = document.createElement("div");
  row.className = "save";
  for (const kind of ["SVG", "PNG"]) {
    const one = document.createElement("button");
    one.type = "button";
    one.textContent = kind;
    one.title = `Save as ${kind}`;
    one.setAttribute("aria-label", `Save ${place.dataset.title} as ${kind}`);
    one.addEventListener("click", () => save(place, element, kind));
    row.append(one);
  }
  place.after(row);
}

// A picture has the legends that the page has once for all charts.
function addLegends(spec) {
  const { legends } = spec.usermeta;
  for (const { encoding } of spec.layer || [spec]) {
    for (const name of ["color", "shape", "strokeDash"]) {
      const channel = encoding?.[name];
      if (channel?.field in legends) channel.legend = legends[channel.field];
    }
  }
}

// What is chosen of a list beside a chart; nothing where there is no list.
function listed(spec, signals) {
  const list = spec.params?.find((each) => each.bind?.labels);
  return list ? list.bind.labels[signals[list.name] ?? list.value] : "";
}

async function save(place, element, kind) {
  const spec = unpacked(element);
  const signals = drawn.get(element)?.view.getState().signals || {};
  if (spec.width === "container") spec.width = PAPER;
  addLegends(spec);
  const lines = place.dataset.title.match(/.{1,80}(?:\s|$)|\S+/g);
  spec.title = { text: lines.map((line) => line.trim()), subtitle: listed(spec, signals) };
  if (spec.layer) spec.layer = spec.layer.filter((each) => each.description !== NEAREST);
  if (spec.params) spec.params = spec.params.filter((each) => !each.select?.nearest);
  const config = structuredClone(themes.light);
  const result = await embed(document.createElement("div"), spec, config);
  await choose(result.view, spec, signals);
  const link = document.createElement("a");
  link.href = await result.view.toImageURL(kind.toLowerCase(), 3);
  result.finalize();
  link.download = `${place.dataset.name}.${kind.toLowerCase()}`;
  link.click();
}

button.addEventListener("click", () => {
  chosen = button.getAttribute("aria-pressed") === "true" ? "light" : "dark";
  then(draw);
});
system.addEventListener("change", () => {
  if (!chosen) then(draw);
});
for (const details of document.querySelectorAll("details")) {
  details.addEventListener("toggle", () => then(() => drawMissing(details)));
}
for (const name of document.querySelectorAll(".legend button")) {
  name.disabled = false;
  name.addEventListener("click", () => {
    if (!hidden.delete(name.dataset.name)) hidden.add(name.dataset.name);
    for (const same of document.querySelectorAll(".legend button")) {
      same.setAttribute("aria-pressed", String(!hidden.has(same.dataset.name)));
    }
    for (const result of drawn.values()) fade(result.view);
  });
}
then(draw);
