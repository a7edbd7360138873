// Draws every chart of the page, in the theme of the system, of the address (#dark, #light) or of
// the button. Each script.spec holds a Vega-Lite specification and names the element to draw in.
const themes = JSON.parse(document.getElementById("themes").textContent);
const button = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");
const NARROW = 480;
let chosen = ["dark", "light"].find((name) => location.hash === `#${name}`);
let drawn = [];
let drawing = Promise.resolve();

function configuration(theme, width) {
  const config = structuredClone(themes[theme]);
  config.background = "transparent";
  config.legend.columns = width < NARROW ? 2 : 4;
  if (width < NARROW) {
    config.axis.labelLimit = 110;
    config.legend.labelLimit = 95;
  }
  return config;
}

async function drawOne(element, theme) {
  const place = document.getElementById(element.dataset.for);
  try {
    const spec = JSON.parse(element.textContent);
    const config = { ...(spec.config || {}), ...configuration(theme, place.clientWidth) };
    drawn.push(
      await window.vegaEmbed(place, { ...spec, config }, {
        renderer: "svg", actions: false, ast: true, logLevel: 1,
      }),
    );
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
  for (const view of drawn) view.finalize();
  drawn = [];
  for (const element of document.querySelectorAll("script.spec")) await drawOne(element, theme);
}

function redraw() {
  drawing = drawing.then(draw);
}

button.addEventListener("click", () => {
  chosen = button.getAttribute("aria-pressed") === "true" ? "light" : "dark";
  redraw();
});
system.addEventListener("change", () => {
  if (!chosen) redraw();
});
redraw();
