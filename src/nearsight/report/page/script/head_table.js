// The table of heads: too many rows for the page, so those that fit, of what is selected, in the chosen order.
const MOST_HEADS = 200;

function drawHeadTable(body) {
  const titles = {
    group: data.kind === "study" ? "condition" : "model",
    ...(manySeeds && { seed: "seed" }),
    layer: "layer",
    head: "head",
    mad: "distance",
    mad_std: "± over images",
    entropy: "entropy",
    entropy_std: "± over images",
  };
  const values = {
    group: (head) => groups[head.group].short,
    seed: (head) => runs.seed[head.run],
    layer: (head) => head.layer,
    head: (head) => head.head,
    mad: (head) => head.mad,
    mad_std: (head) => head.mad_std,
    entropy: (head) => head.entropy,
    entropy_std: (head) => head.entropy_std,
  };
  const isNumber = (name) => name.startsWith("mad") || name.startsWith("entropy");
  const order = { column: "mad", direction: 1 };
  const count = element("span", { class: "count", "aria-live": "polite" });
  const tbody = element("tbody");
  const found = () =>
    heads
      .filter((head) => isShown(head) && isSelected(head))
      .map((head) => [values[order.column](head), head])
      .sort((a, b) => compareKeys(a[0], b[0], order.direction))
      .map(([, head]) => head);
  const text = (name, head) => (isNumber(name) ? number(values[name](head)) : String(values[name](head)));
  function update() {
    const chosen = found();
    count.textContent =
      `${chosen.length.toLocaleString("en")} of ${heads.length.toLocaleString("en")} heads` +
      (chosen.length > MOST_HEADS ? `, the first ${MOST_HEADS} shown` : "");
    tbody.replaceChildren(
      ...chosen
        .slice(0, MOST_HEADS)
        .map((head) =>
          element(
            "tr",
            {},
            ...Object.keys(titles).map((name) =>
              name === "group"
                ? element(
                    "th",
                    { scope: "row" },
                    swatch(groups[head.group].colour),
                    element("bdi", {}, text(name, head)),
                  )
                : element("td", {}, text(name, head)),
            ),
          ),
        ),
    );
  }
  const headings = Object.entries(titles).map(([name, title]) =>
    element("th", { scope: "col", "data-head": name }, title),
  );
  for (const heading of headings) {
    makeSortable(heading, headings, (direction) => {
      Object.assign(order, { column: heading.dataset.head, direction });
      update();
    });
  }
  headings.find((heading) => heading.dataset.head === "mad").setAttribute("aria-sort", "ascending");
  const copy = copyButton(() => [
    Object.keys(titles),
    ...found().map((head) => Object.keys(titles).map((name) => text(name, head))),
  ]);
  body.append(
    element("h3", {}, "The selected heads"),
    element("div", { class: "tools" }, count, copy),
    element(
      "div",
      { class: "scroll tall", role: "region", tabindex: "0", "aria-label": "The selected heads" },
      element("table", { class: "numbers heads" }, element("thead", {}, element("tr", {}, ...headings)), tbody),
    ),
  );
  selectionChanged.listen(update);
  groupsChanged.listen(update);
  update();
}

if (planeBody) drawHeadTable(planeBody.parentElement);
