// What everything else uses: elements, numbers in words, the theme, and the data that Python packed.

const DIGITS = 4; // as many as the packed numbers have

/** An element with attributes and children; texts become text, never HTML. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const number = (value) => (value === null || value === undefined ? "–" : value.toFixed(DIGITS));
const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(DIGITS - 2)} %`);

const packedData = document.getElementById("page-data");
const data = packedData ? JSON.parse(packedData.textContent) : null;

/** Columns to rows. */
function rowsOf(columns) {
  const names = Object.keys(columns);
  return columns[names[0]].map((_, place) => Object.fromEntries(names.map((name) => [name, columns[name][place]])));
}

/** Functions to call when something changes; what is called often is called once per frame. */
function signal() {
  const listeners = [];
  let isWaiting = false;
  return {
    listen: (listener) => listeners.push(listener),
    notify: () => {
      if (isWaiting) return;
      isWaiting = true;
      requestAnimationFrame(() => {
        isWaiting = false;
        for (const listener of listeners) listener();
      });
    },
  };
}

// The theme: the system's until the button is pressed.
const themeChanged = signal();
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (systemIsDark.matches ? "dark" : "light")) === "dark";
const themeButton = element("button", { class: "theme", type: "button" });

function nameThemeButton() {
  themeButton.textContent = isDark() ? "Light" : "Dark";
  themeButton.setAttribute("aria-label", `Show the page ${isDark() ? "light" : "dark"}`);
}

themeButton.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  themeChanged.notify();
});
systemIsDark.addEventListener("change", themeChanged.notify);
themeChanged.listen(nameThemeButton);
nameThemeButton();
document.querySelector("header").append(themeButton);

/** Copy text; where the browser forbids its clipboard to files, by way of a hidden field. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = element("textarea", { class: "unseen" });
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
}

const csvCell = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
const csvText = (rows) => rows.map((row) => row.map((cell) => csvCell(String(cell ?? ""))).join(",")).join("\n") + "\n";

function copyButton(rows) {
  const button = element("button", { type: "button", class: "copy" }, "Copy as CSV");
  button.addEventListener("click", async () => {
    await copyText(csvText(rows()));
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy as CSV"), 1500);
  });
  return button;
}
