// The plane of distance and entropy, with a brush.

// What points are coloured by: the group, the layer, or a factor of the study.
const numLayers = 1 + Math.max(0, ...new Set(heads.map((head) => head.layer)));
const factors = Object.keys(runs.factors ?? {});
let colourBy = groups.length > 1 ? "group" : "layer";

function pointColour() {
  if (colourBy === "group") return groupColour();
  if (colourBy === "layer") {
    return {
      field: "layer",
      type: "quantitative",
      title: "layer",
      scale: { scheme: "viridis", domain: [0, Math.max(1, numLayers - 1)] },
      legend: { format: "d", tickMinStep: 1 },
    };
  }
  const levels = [...new Set(runs.factors[colourBy])];
  return {
    field: "level",
    type: "nominal",
    title: colourBy,
    scale: { domain: levels, range: data.palette.map(themed) },
  };
}

const MOST_FADING = 2500;

/** Points in the plane; the same axes wherever it is drawn. */
function planeSpec(rows, width, colours, { height, isBrushed }) {
  const title = (text) => (width < 480 ? text.replace(/ \(.*/, "") : text);
  const byGroup = groups.length > 1 && groups.length <= 9;
  const size = rows.length > 3000 ? 14 : rows.length > 600 ? 34 : 62;
  const edge = rows.length > 3000 ? { strokeWidth: 0 } : { stroke: colours.paper, strokeWidth: 0.7 };
  const points = {
    mark: { type: "point", filled: true, size, ...edge },
    encoding: {
      x: {
        field: "mad",
        type: "quantitative",
        title: title(LABELS.mad),
        axis: { tickCount: 8 },
        scale: { domain: [0, planeReach], nice: false, zero: true },
      },
      y: {
        field: "entropy",
        type: "quantitative",
        title: title(LABELS.entropy),
        axis: { tickCount: 7 },
        scale: { domain: [entropyFloor, 1.02], nice: false, zero: false },
      },
      color: pointColour(),
      ...(byGroup && {
        shape: {
          field: "group",
          type: "nominal",
          legend: null,
          scale: { domain: [...groups.keys()], range: groups.map((group) => group.marker) },
        },
      }),
      // Asking of every point whether it is selected, on every move, is only for some hundreds of them.
      opacity:
        isBrushed && rows.length <= MOST_FADING
          ? { condition: { param: "brush", value: 0.88 }, value: 0.1 }
          : { value: 0.88 },
    },
    ...(isBrushed && {
      params: [
        {
          name: "brush",
          select: { type: "interval", mark: { fill: colours.accent, fillOpacity: 0.1, stroke: colours.accent } },
        },
      ],
    }),
  };
  const anchor =
    data.uniform === null
      ? []
      : [
          {
            data: { values: [{ x: data.uniform, y: 1 }] },
            layer: [
              {
                mark: {
                  type: "point",
                  shape: "cross",
                  angle: 0,
                  size: 70,
                  color: colours.muted,
                  filled: true,
                  opacity: 0.9,
                },
              },
              {
                mark: {
                  type: "text",
                  text: "uniform attention",
                  dy: 1,
                  color: colours.muted,
                  fontSize: 11,
                  align: "right",
                  dx: -9,
                },
              },
            ],
            encoding: { x: { field: "x", type: "quantitative" }, y: { field: "y", type: "quantitative" } },
          },
        ];
  return {
    width,
    height,
    autosize: { type: "fit", contains: "padding" },
    usermeta: { rows: rows.length },
    data: { name: "heads", values: rows },
    layer: [...anchor, points],
  };
}

const course = data?.course ? rowsOf(data.course).map((row) => ({ ...row, group: runs.group[row.run] })) : [];
const largest = (rows, field) => rows.reduce((most, row) => Math.max(most, row[field]), 0);
const smallest = (rows, field) => rows.reduce((least, row) => Math.min(least, row[field]), 1);
const planeReach = 1.04 * Math.max(largest(heads, "mad"), largest(course, "mad"), data?.uniform ?? 0);
const entropyFloor = Math.max(0, Math.min(smallest(heads, "entropy"), smallest(course, "entropy")) - 0.05);

const pointRows = (rows) =>
  rows.filter(isShown).map((head) => ({
    ...head,
    level: colourBy in (runs.factors ?? {}) ? runs.factors[colourBy][head.run] : null,
  }));

function drawPlane(body) {
  const drawing = element("div", {
    class: "drawing",
    tabindex: "0",
    role: "group",
    "aria-label": "Every head by distance and entropy; arrow keys step through the heads",
  });
  let view = null,
    isSetting = false;
  const made = chart(
    drawing,
    (width, colours) =>
      planeSpec(pointRows(heads), width, colours, {
        height: Math.round(Math.min(470, Math.max(320, 0.62 * width))),
        isBrushed: true,
      }),
    (fresh) => {
      view = fresh;
      view.addEventListener("pointermove", (event, item) => {
        if (item?.datum?.place !== undefined && event.buttons === 0) showCard(item.datum, event.clientX, event.clientY);
        else hideCard();
      });
      view.addEventListener("click", (_, item) => item?.datum?.place !== undefined && explore(item.datum));
      view.addSignalListener("brush", (_, ranges) => {
        if (isSetting) return;
        select(ranges.mad ?? null, ranges.entropy ?? null);
      });
      if (hasSelection()) showBrush();
    },
  );
  drawing.addEventListener("pointerleave", hideCard);

  /** Put the brush where the selection is. */
  function showBrush() {
    if (!view) return;
    isSetting = true;
    const pixels = (axis, range, whole) =>
      hasSelection() ? (range ?? whole).map((value) => view.scale(axis)(value)).sort((a, b) => a - b) : [];
    view.signal("brush_x", pixels("x", selection.mad, [0, planeReach]));
    view.signal("brush_y", pixels("y", selection.entropy, [entropyFloor, 1.02]));
    view.run();
    isSetting = false;
  }

  // By keyboard and by numbers: what a pointer does by dragging.
  let current = -1;
  drawing.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const candidates = heads.filter((head) => isShown(head) && isSelected(head));
    if (event.key === "Enter" && candidates[current]) explore(candidates[current]);
    if (!step || !candidates.length) return;
    event.preventDefault();
    current = (current + step + candidates.length) % candidates.length;
    const head = candidates[current],
      box = (drawing.querySelector("canvas, svg") ?? drawing).getBoundingClientRect();
    const [left, top] = view.origin();
    showCard(head, box.left + left + view.scale("x")(head.mad), box.top + top + view.scale("y")(head.entropy));
    const numbers = `distance ${number(head.mad)}, entropy ${number(head.entropy)}`;
    spoken.textContent = `${groups[head.group].short}, ${headName(head)}: ${numbers}`;
  });
  const field = (name, end, label) => {
    const input = element("input", { type: "number", min: "0", max: "1", step: "0.01", "aria-label": label });
    input.addEventListener("change", () => {
      const range = [...(selection[name] ?? [0, 1])];
      range[end] = input.value === "" ? end : Number(input.value);
      const ranges = { ...selection, [name]: range[0] <= 0 && range[1] >= 1 ? null : range };
      select(ranges.mad, ranges.entropy);
      showBrush();
    });
    selectionChanged.listen(() => {
      if (document.activeElement !== input)
        input.value = selection[name] === null ? "" : selection[name][end].toFixed(3);
    });
    return input;
  };
  const clear = element(
    "button",
    {
      type: "button",
      onclick: () => {
        select(null, null);
        showBrush();
      },
    },
    "Clear selection",
  );
  const choice = element(
    "select",
    {
      onchange: () => {
        colourBy = choice.value;
        redraw([made]);
      },
    },
    ...[
      ["group", data.kind === "study" ? "condition" : "model"],
      ["layer", "layer"],
      ...factors.map((name) => [name, name]),
    ]
      .filter(([name]) => name !== "group" || groups.length > 1)
      .map(([name, title]) => element("option", { value: name }, title)),
  );
  choice.value = colourBy;
  body.append(
    ...[legend()].filter(Boolean),
    element(
      "div",
      { class: "tools" },
      element("label", {}, "Colour by", choice),
      element("label", {}, "Distance", field("mad", 0, "least distance"), "to", field("mad", 1, "largest distance")),
      element(
        "label",
        {},
        "Entropy",
        field("entropy", 0, "least entropy"),
        "to",
        field("entropy", 1, "largest entropy"),
      ),
      clear,
    ),
    drawing,
  );
  groupsChanged.listen(() => redraw([made]));
}

const planeBody = chartBody("plane");
if (planeBody) drawPlane(planeBody);
