// Layers × heads of every group shown, distance above entropy; what is not selected fades.

const MOST_MAPS = 12;

/** Cells of a group. Heads of different seeds have nothing in common, so with several seeds a column is a rank. */
function cellsOf(group) {
  const cells = new Map();
  for (const head of heads) {
    if (head.group !== group) continue;
    const column = manySeeds ? head.rank : head.head;
    const key = `${head.layer} ${column}`;
    if (!cells.has(key)) cells.set(key, { layer: head.layer, column, heads: [] });
    cells.get(key).heads.push(head);
  }
  const mean = (list, value) => list.reduce((sum, head) => sum + value(head), 0) / list.length;
  return [...cells.values()].map((cell) => ({
    layer: cell.layer,
    column: cell.column,
    place: cell.heads.length === 1 ? cell.heads[0].place : undefined,
    mad: mean(cell.heads, (head) => head.mad),
    entropy: mean(cell.heads, (head) => head.entropy),
    share: 0.12 + 0.88 * mean(cell.heads, (head) => Number(isSelected(head))),
  }));
}

function heatmapSpec(group, width, reach) {
  const panel = (field, domain, title) => ({
    width: width - 110,
    height: Math.max(60, Math.min(300, 21 * numLayers)),
    mark: { type: "rect", tooltip: null },
    encoding: {
      x: {
        field: "column",
        type: "ordinal",
        title: field === "entropy" ? (manySeeds ? "head, by distance" : "head") : null,
        axis: { labelAngle: 0, ticks: false, domain: false, labelOverlap: true },
      },
      y: { field: "layer", type: "ordinal", title: "layer", axis: { ticks: false, domain: false, labelOverlap: true } },
      color: {
        field,
        type: "quantitative",
        title,
        scale: { scheme: "viridis", domain },
        legend: { gradientLength: 90, tickCount: 4 },
      },
      opacity: { field: "share", type: "quantitative", legend: null, scale: { domain: [0, 1], range: [0, 1] } },
    },
  });
  return {
    data: { name: "cells", values: cellsOf(group) },
    spacing: 12,
    resolve: { scale: { color: "independent" } },
    vconcat: [panel("mad", [0, reach], "distance"), panel("entropy", [0, 1], "entropy")],
  };
}

function drawHeatmaps(body) {
  const reach = largest(heads, "mad");
  const panels = element("div", { class: "panels" });
  const note = element("p", { class: "count" });
  let made = [];
  function fill() {
    forget(made);
    const chosen = [...groups.keys()].filter((group) => shownGroups.has(group)).slice(0, MOST_MAPS);
    note.textContent =
      shownGroups.size > MOST_MAPS
        ? `The first ${MOST_MAPS} of ${shownGroups.size} are drawn; hide some above to see others.`
        : "";
    const boxes = chosen.map((group) =>
      drawingBox(`Distance and entropy of every head of ${groups[group].short}; the table of heads has the numbers`),
    );
    panels.replaceChildren(
      ...chosen.map((group, place) =>
        element(
          "div",
          {},
          element("h3", {}, swatch(groups[group].colour), element("bdi", {}, groups[group].short)),
          boxes[place],
        ),
      ),
    );
    made = chosen.map((group, place) =>
      chart(
        boxes[place],
        (width) => heatmapSpec(group, width, reach),
        (view) => {
          view.addEventListener("pointermove", (event, item) => {
            const known = item?.datum?.place;
            if (known === undefined) hideCard();
            else showCard(heads[known], event.clientX, event.clientY);
          });
          view.addEventListener(
            "click",
            (_, item) => item?.datum?.place !== undefined && explore(heads[item.datum.place]),
          );
        },
      ),
    );
    for (const box of boxes) box.addEventListener("pointerleave", hideCard);
  }
  body.append(...[legend()].filter(Boolean), note, panels);
  fill();
  groupsChanged.listen(fill);
  selectionChanged.listen(() =>
    made.forEach((each, place) => {
      const group = [...groups.keys()].filter((number) => shownGroups.has(number))[place];
      each.view?.data("cells", cellsOf(group)).run();
    }),
  );
}

const heatmapsBody = chartBody("heatmaps");
if (heatmapsBody) drawHeatmaps(heatmapsBody);
