// Training curves and, where heads were measured during training, how locality comes about: a slider over epochs.

const history = data?.history ? rowsOf(data.history).map((row) => ({ ...row, group: runs.group[row.run] })) : [];

/** The most local head of every run at every epoch that was measured. */
function lowestHeads() {
  const lowest = new Map();
  for (const head of course) {
    const key = `${head.run} ${head.epoch}`;
    if (!lowest.has(key) || head.mad < lowest.get(key).mad) lowest.set(key, head);
  }
  return lowest;
}

/** Lines over epochs, one per run, and a mark at the epoch that the slider says. */
function curveSpec(rows, field, title, width, colours, { format, epoch }) {
  const shown = rows.filter((row) => isShown(row) && row[field] !== null);
  const opacity = runs.group.length > 60 ? 0.25 : runs.group.length > 16 ? 0.5 : 0.95;
  const at =
    epoch === null
      ? []
      : [
          {
            data: { values: [{}] },
            mark: { type: "rule", color: colours.muted, strokeDash: [3, 3] },
            encoding: { x: { datum: { expr: "epoch" }, type: "quantitative" } },
          },
        ];
  return {
    width,
    height: 190,
    autosize: { type: "fit", contains: "padding" },
    usermeta: { rows: shown.length },
    ...(epoch !== null && { params: [{ name: "epoch", value: epoch }] }),
    layer: [
      ...at,
      {
        data: { values: shown },
        mark: {
          type: "line",
          opacity,
          strokeWidth: runs.group.length > 16 ? 1 : 1.8,
          point: new Set(shown.map((row) => row.epoch)).size === 1,
        },
        encoding: {
          x: {
            field: "epoch",
            type: "quantitative",
            title: "epoch",
            axis: { tickMinStep: 1, tickCount: 6, format: "d", grid: false },
            scale: { zero: false, nice: false },
          },
          y: {
            field,
            type: "quantitative",
            title,
            axis: { tickCount: 5, ...(format && { format }) },
            scale: { zero: field === "mad" },
          },
          color: groupColour(),
          strokeDash: groupDash(),
          detail: { field: "run", type: "nominal" },
        },
      },
    ],
  };
}

function drawTraining(body) {
  const lowest = lowestHeads();
  const epochs = [...new Set(course.map((head) => head.epoch))].sort((a, b) => a - b);
  let epoch = epochs.length ? epochs.at(-1) : null;
  const curves = [
    ["val_acc", "validation accuracy", history, ".0%"],
    ["val_loss", "validation loss", history],
    ["train_loss", "training loss", history],
    ["mad", "distance of the most local head", [...lowest.values()]],
  ].filter(([, , rows]) => rows.length);
  const boxes = curves.map(([, title]) => drawingBox(`The ${title} over epochs`));
  const made = curves.map(([field, title, rows, format], place) =>
    chart(boxes[place], (width, colours) => curveSpec(rows, field, title, width, colours, { format, epoch })),
  );
  const panels = element("div", { class: "panels" }, ...boxes);
  body.append(...[legend()].filter(Boolean), panels);
  groupsChanged.listen(() => redraw(made));
  if (epochs.length > 1) drawCourse(body);

  function drawCourse(body) {
    const at = element("output", {});
    const slider = element("input", {
      type: "range",
      min: "0",
      max: String(epochs.length - 1),
      step: "1",
      "aria-label": "Epoch",
    });
    slider.value = slider.max;
    const plane = drawingBox("The heads at this epoch, by distance and entropy");
    const tbody = element("tbody");
    const now = () => course.filter((head) => head.epoch === epoch);
    const planeMade = chart(plane, (width, colours) =>
      planeSpec(pointRows(now()), width, colours, { height: 330, isBrushed: false }),
    );
    const accuracy = new Map(history.map((row) => [`${row.run} ${row.epoch}`, row.val_acc]));
    const listed = [...new Set(course.map((head) => head.run))];
    function update() {
      epoch = epochs[Number(slider.value)];
      at.textContent = `after epoch ${epoch}`;
      tbody.replaceChildren(
        ...listed
          .filter((run) => shownGroups.has(runs.group[run]))
          .map((run) => {
            const head = lowest.get(`${run} ${epoch}`),
              group = groups[runs.group[run]];
            return element(
              "tr",
              {},
              element("th", { scope: "row" }, swatch(group.colour), element("bdi", {}, group.short)),
              element("td", {}, String(runs.seed[run] ?? "–")),
              element("td", {}, percent(accuracy.get(`${run} ${epoch}`))),
              element("td", {}, number(head?.mad)),
              element("td", {}, head ? headName(head) : "–"),
            );
          }),
      );
      for (const each of made) each.view?.signal("epoch", epoch).run();
      planeMade.view?.data("heads", pointRows(now())).run();
    }
    slider.addEventListener("input", update);
    groupsChanged.listen(update);
    const titles = [
      data.kind === "study" ? "condition" : "model",
      "seed",
      "validation accuracy",
      "most local head",
      "where",
    ];
    body.append(
      element("h3", {}, "How locality comes about"),
      element("div", { class: "tools" }, element("label", { class: "wide" }, "Epoch", slider, at)),
      plane,
      element(
        "div",
        { class: "scroll tall", role: "region", tabindex: "0", "aria-label": "The most local heads at this epoch" },
        element(
          "table",
          { class: "numbers course" },
          element("thead", {}, element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)))),
          tbody,
        ),
      ),
    );
    update();
  }
}

const trainingBody = history.length || course.length ? chartBody("training") : null;
if (trainingBody) drawTraining(trainingBody);
