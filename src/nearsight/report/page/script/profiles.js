// The heads of each layer from the most local to the least, a small panel per layer.

/** Per group, layer and rank: the mean over runs, and a band of one deviation over images or of the seeds' range. */
function profileRows() {
  const byRun = new Map();
  for (const head of heads) {
    const key = `${head.run} ${head.layer}`;
    if (!byRun.has(key)) byRun.set(key, []);
    byRun.get(key).push(head);
  }
  const cells = new Map();
  for (const layer of byRun.values()) {
    layer
      .sort((a, b) => a.mad - b.mad)
      .forEach((head, rank) => {
        head.rank = rank + 1;
        const key = `${head.group} ${head.layer} ${rank}`;
        if (!cells.has(key)) cells.set(key, []);
        cells.get(key).push(head);
      });
  }
  return [...cells.values()].map((cell) => {
    const mads = cell.map((head) => head.mad);
    const mean = mads.reduce((sum, mad) => sum + mad, 0) / mads.length;
    const [low, high] = manySeeds
      ? [Math.min(...mads), Math.max(...mads)]
      : [mean - cell[0].mad_std, mean + cell[0].mad_std];
    return { group: cell[0].group, layer: cell[0].layer, rank: cell[0].rank, mean, low: Math.max(0, low), high };
  });
}

/** As many columns as fit, or somewhat fewer where the rows are whole then. */
function columnsOf(most) {
  for (let columns = most; columns > most / 2; columns -= 1) if (numLayers % columns === 0) return columns;
  return most;
}

function drawProfiles(body) {
  const rows = profileRows();
  const reach = 1.03 * largest(rows, "high");
  const box = drawingBox("The heads of each layer, sorted by distance; the table of heads has the numbers");
  const dots = () =>
    (hasSelection() ? heads.filter((head) => isShown(head) && isSelected(head)) : []).slice(0, 2000).map((head) => ({
      group: head.group,
      layer: head.layer,
      rank: head.rank,
      mean: head.mad,
      low: null,
      high: null,
      dot: true,
    }));
  const values = () => [...rows.filter(isShown), ...dots()];
  const made = chart(box, (width, colours) => {
    const columns = columnsOf(Math.max(2, Math.min(6, numLayers, Math.floor(width / 165))));
    const shown = values();
    const x = {
      field: "rank",
      type: "quantitative",
      title: "head, by distance",
      axis: { tickMinStep: 1, tickCount: 4, format: "d", grid: false },
      scale: { zero: false, nice: false, padding: 6 },
    };
    const few = shownGroups.size <= 12;
    return {
      data: { name: "profiles", values: shown },
      usermeta: { rows: shown.length },
      facet: {
        field: "layer",
        type: "ordinal",
        header: { title: null, labelExpr: "'layer ' + datum.value", labelAnchor: "start" },
      },
      columns,
      bounds: "flush",
      spacing: { row: 44, column: 14 },
      spec: {
        width: Math.floor((width - 56) / columns) - 15,
        height: 118,
        encoding: { x, color: groupColour() },
        layer: [
          {
            transform: [{ filter: "!datum.dot" }],
            mark: { type: "area", opacity: few ? 0.16 : 0.04 },
            encoding: {
              y: {
                field: "low",
                type: "quantitative",
                title: "distance",
                axis: { tickCount: 4 },
                scale: { domain: [0, reach], nice: false },
              },
              y2: { field: "high" },
            },
          },
          {
            transform: [{ filter: "!datum.dot" }],
            mark: { type: "line", opacity: few ? 1 : 0.5, point: numHeadsOfLayer === 1 },
            encoding: { y: { field: "mean", type: "quantitative" }, strokeDash: groupDash() },
          },
          {
            transform: [{ filter: "datum.dot" }],
            mark: { type: "point", filled: true, size: 34, opacity: 1, stroke: colours.paper, strokeWidth: 0.8 },
            encoding: { y: { field: "mean", type: "quantitative" } },
          },
        ],
      },
    };
  });
  body.append(...[legend()].filter(Boolean), box);
  groupsChanged.listen(() => redraw([made]));
  selectionChanged.listen(() => made.view?.data("profiles", values()).run());
}

const numHeadsOfLayer = 1 + Math.max(0, ...new Set(heads.map((head) => head.head)));
const profilesBody = chartBody("profiles");
if (profilesBody) drawProfiles(profilesBody);
