// Tables that can be sorted, filtered and copied. Python writes them whole; this adds the controls.

const ROWS_FOR_FILTER = 8;
const cellText = (cell) => cell.textContent.replace(/\s+/g, " ").trim();

/** What a cell is sorted by: its number if it begins with one, else its text. */
function sortKey(text) {
  const found = text
    .replaceAll("−", "-")
    .replaceAll(",", "")
    .match(/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?/i);
  return found ? Number(found[0]) : text;
}

/** Numbers before texts, and what is missing last, whichever way. */
function compareKeys(a, b, direction) {
  const rank = (key) => (key === "–" || key === "" ? 2 : typeof key === "number" ? 0 : 1);
  if (rank(a) !== rank(b)) return rank(a) - rank(b);
  if (rank(a) === 2) return 0;
  return direction * (typeof a === "number" ? a - b : a.localeCompare(b));
}

/** Makes a heading a button that sorts; `sort(direction)` does the work. */
function makeSortable(heading, headings, sort) {
  const button = element("button", { type: "button" });
  button.append(...heading.childNodes);
  heading.append(button);
  button.addEventListener("click", () => {
    const direction = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of headings) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    sort(direction);
  });
}

function equipTable(box) {
  const table = box.querySelector("table");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const headings = [...table.tHead.querySelectorAll("[data-column]")];
  for (const heading of headings) {
    const column = Number(heading.dataset.column);
    makeSortable(heading, headings, (direction) => {
      const keyed = rows.map((row) => [sortKey(cellText(row.cells[column])), row]);
      keyed.sort((a, b) => compareKeys(a[0], b[0], direction));
      body.append(...keyed.map(([, row]) => row));
    });
  }
  const shown = () => [...body.rows].filter((row) => !row.hidden);
  const headRow = [...headings]
    .sort((a, b) => a.dataset.column - b.dataset.column)
    .map((each) => each.dataset.name ?? cellText(each));
  const tools = element("div", { class: "tools" });
  if (rows.length > ROWS_FOR_FILTER) {
    const count = element("span", { class: "count", "aria-live": "polite" });
    const filter = element("input", {
      type: "search",
      placeholder: "Filter rows",
      "aria-label": "Filter the rows of this table",
    });
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
      count.textContent = words.length ? `${shown().length} of ${rows.length} rows` : "";
    });
    tools.append(filter, count);
  }
  tools.append(copyButton(() => [headRow, ...shown().map((row) => [...row.cells].map(cellText))]));
  box.before(tools);
}

for (const box of document.querySelectorAll(".scroll[data-table]")) equipTable(box);
