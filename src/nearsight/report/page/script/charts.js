// Vega-Lite in this page: no eval (expressions are interpreted), our colours, drawn again when theme or width change.

const SVG_ROWS = 4000; // charts of more rows are drawn on canvas
const LABELS = {
  mad: "mean attention distance (fraction of the grid's diagonal)",
  entropy: "attention entropy (1 = uniform)",
};

/** The theme's colours as the browser resolves them: Vega does not know CSS variables. */
function themeColours() {
  const probe = element("span");
  document.body.append(probe);
  const found = {};
  for (const name of ["paper", "ink", "muted", "grid", "accent"]) {
    probe.style.color = `var(--${name})`;
    found[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return found;
}

function vegaConfig(colours) {
  const font = getComputedStyle(document.body).fontFamily;
  const text = { labelFont: font, titleFont: font, labelColor: colours.ink, titleColor: colours.ink };
  return {
    background: null,
    aria: false, // words for every mark would take longer than all else; the chart's box and the tables speak
    font,
    axis: {
      ...text,
      labelFontSize: 11,
      titleFontSize: 12,
      titleFontWeight: "normal",
      titlePadding: 8,
      gridColor: colours.grid,
      domainColor: colours.muted,
      tickColor: colours.muted,
      tickSize: 4,
      labelFlush: false,
    },
    header: { ...text, labelFontSize: 11.5, labelFontWeight: "bold", titleFontSize: 12 },
    legend: { ...text, titleFontWeight: "normal", gradientLength: 110, gradientThickness: 10 },
    view: { stroke: null },
    line: { strokeWidth: 1.8 },
    range: { heatmap: { scheme: "viridis" } },
  };
}

const drawn = []; // every chart of the page, to draw again

/**
 * A chart in `box`. `spec(width, colours)` gives its Vega-Lite spec; `ready(view)` is called after each drawing. Until it
 * is drawn about as much room is kept, so that what stands below does not jump.
 */
function chart(box, spec, ready = () => {}) {
  box.style.minHeight = "12rem";
  const made = { box, view: null, width: 0, draw: null };
  made.draw = () => {
    const width = Math.floor(box.clientWidth);
    if (width === 0) return;
    made.width = width;
    made.view?.finalize();
    const colours = themeColours();
    const lite = { config: vegaConfig(colours), ...spec(width, colours) };
    const runtime = vega.parse(vegaLite.compile(lite, { logger: vega.logger(vega.Error) }).spec, null, { ast: true });
    box.replaceChildren();
    box.style.minHeight = "";
    made.view = new vega.View(runtime, {
      expr: vegaInterpreter.expressionInterpreter,
      renderer: (lite.usermeta?.rows ?? 0) > SVG_ROWS ? "canvas" : "svg",
      container: box,
      logLevel: vega.Error,
    });
    made.view.run();
    ready(made.view);
  };
  drawn.push(made);
  whenVisible(box, made.draw);
  return made;
}

// Near charts are drawn at once, so that the page opens quickly; the others one by one when the browser has time, so that
// none is blank in a picture of the whole page.
const waiting = new Map();
const whenIdle = window.requestIdleCallback ?? ((draw) => setTimeout(draw, 50));
const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting || !waiting.has(entry.target)) continue;
      const draw = waiting.get(entry.target);
      waiting.delete(entry.target);
      watcher.unobserve(entry.target);
      draw();
    }
  },
  { rootMargin: "600px" },
);

function whenVisible(box, draw) {
  if (!waiting.size) whenIdle(drawNext, { timeout: 100 });
  waiting.set(box, draw);
  watcher.observe(box);
}

function drawNext() {
  const [[box, draw] = []] = waiting;
  if (!box) return;
  waiting.delete(box);
  watcher.unobserve(box);
  if (box.isConnected) draw();
  whenIdle(drawNext, { timeout: 100 });
}

/** Draw again what has been drawn; what has not will be in time. */
function redraw(which = drawn) {
  for (const made of which) if (made.view && made.box.isConnected) made.draw();
}

/** Forget charts whose boxes were removed. */
function forget(which) {
  for (const made of which) {
    made.view?.finalize();
    waiting.delete(made.box);
    watcher.unobserve(made.box);
    drawn.splice(drawn.indexOf(made), 1);
  }
}

/** A box that a chart is drawn in; the label says what it shows and where its numbers are. */
const drawingBox = (label) => element("div", { class: "drawing", role: "img", "aria-label": label });

// Paper is white: on the way to it everything is drawn, in light colours.
let themeOnScreen;
addEventListener("beforeprint", () => {
  themeOnScreen = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  redraw();
  for (const [box, draw] of [...waiting]) {
    waiting.delete(box);
    draw();
  }
});
addEventListener("afterprint", () => {
  if (themeOnScreen) document.documentElement.dataset.theme = themeOnScreen;
  else delete document.documentElement.dataset.theme;
  redraw();
});

const widthChanged = signal();
addEventListener("resize", widthChanged.notify);
widthChanged.listen(() => redraw(drawn.filter((made) => Math.floor(made.box.clientWidth) !== made.width)));
themeChanged.listen(() => redraw());

// Groups: models, or a study's conditions; each can be taken out of all charts.
const groups = data?.groups ?? [];
const shownGroups = new Set(groups.keys());
const groupsChanged = signal();
const isShown = (row) => shownGroups.has(row.group);

/** A colour of the palette for this theme: on a dark page a quarter closer to white. */
function themed(colour) {
  if (!isDark()) return colour;
  const lighter = (part) => Math.round(parseInt(part, 16) * 0.75 + 255 * 0.25);
  return `rgb(${colour.slice(1).match(/../g).map(lighter).join(", ")})`;
}

/** Colours by group, for any mark. */
const groupColour = (field = "group") => ({
  field,
  type: "nominal",
  legend: null,
  scale: { domain: [...groups.keys()], range: groups.map((group) => themed(group.colour)) },
});
const groupDash = () => ({
  field: "group",
  type: "nominal",
  legend: null,
  scale: { domain: [...groups.keys()], range: groups.map((group) => (group.dash.length ? group.dash : [1, 0])) },
});

const swatch = (colour) => {
  const made = element("span", { class: "swatch", "aria-hidden": "true" });
  made.style.setProperty("--colour", colour);
  return made;
};

/** Buttons that show and hide groups; one row in every section that has them, all in step. */
function legend() {
  const row = element("div", { class: "legend", role: "group", "aria-label": "Show or hide" });
  if (groups.length < 2) return null;
  const buttons = groups.map((group, place) =>
    element(
      "button",
      {
        type: "button",
        onclick: () => {
          if (!shownGroups.delete(place)) shownGroups.add(place);
          groupsChanged.notify();
        },
      },
      swatch(group.colour),
      element("bdi", {}, group.short),
    ),
  );
  const all = element("button", {
    type: "button",
    onclick: () => {
      const isFull = shownGroups.size === groups.length;
      for (const place of groups.keys()) isFull ? shownGroups.delete(place) : shownGroups.add(place);
      groupsChanged.notify();
    },
  });
  const update = () => {
    buttons.forEach((button, place) => button.setAttribute("aria-pressed", shownGroups.has(place)));
    all.textContent = shownGroups.size === groups.length ? "none" : "all";
  };
  groupsChanged.listen(update);
  update();
  row.append(...buttons, ...(groups.length > 2 ? [all] : []));
  return row;
}

/** The body of a section's chart, shown in place of its still figure; null where the page has no such section. */
function chartBody(name) {
  const place = document.getElementById(`chart-${name}`);
  if (!place || !data) return null;
  place.hidden = false;
  place.closest("section").classList.add("live");
  return place.querySelector(".chart-body");
}
