// What each factor of a study does, with intervals.

function effectSpec(rows, width, colours, { title, format }) {
  const y = {
    field: "term",
    type: "ordinal",
    sort: null,
    title: null,
    axis: { grid: false, ticks: false, domain: false, labelLimit: Math.floor(0.48 * width) },
  };
  const color = {
    field: "excludesZero",
    type: "nominal",
    legend: null,
    scale: { domain: [true, false], range: [themed(data.palette[0]), colours.muted] },
  };
  return {
    width,
    height: 40 + 24 * rows.length,
    autosize: { type: "fit", contains: "padding" },
    data: { values: rows },
    layer: [
      {
        data: { values: [{}] },
        mark: { type: "rule", color: colours.muted },
        encoding: { x: { datum: 0, type: "quantitative" } },
      },
      {
        mark: { type: "rule", strokeWidth: 3, opacity: 0.55 },
        encoding: {
          y,
          color,
          x: { field: "low", type: "quantitative", title, axis: { format, tickCount: 5 } },
          x2: { field: "high" },
        },
      },
      {
        mark: { type: "point", filled: true, size: 60, opacity: 1 },
        encoding: { y, color, x: { field: "effect", type: "quantitative" } },
      },
    ],
  };
}

const effectsBody = data?.effects ? chartBody("effects") : null;
if (effectsBody) {
  const rows = rowsOf(data.effects).map((row) => ({ ...row, excludesZero: row.low !== null && row.low * row.high > 0 }));
  const panels = element("div", { class: "panels" });
  for (const [response, title, format] of [
    ["min_mad", "effect on the most local head's distance", ""],
    ["min_entropy", "effect on the smallest entropy", ""],
    ["test_acc", "effect on test accuracy", "+.1%"],
  ]) {
    const here = rows.filter((row) => row.response === response);
    if (!here.length) continue;
    const box = drawingBox(`The ${title}, with intervals; the table below has the numbers`);
    panels.append(box);
    chart(box, (width, colours) => effectSpec(here, width, colours, { title, format }));
  }
  panels.style.setProperty("--panel", "27rem");
  effectsBody.append(panels);
}
