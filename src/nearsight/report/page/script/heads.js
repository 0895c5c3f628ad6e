// The heads, which of them are selected, and the card that describes one.

const runs = data?.runs ?? { group: [], seed: [] };
const heads = data ? rowsOf(data.heads).map((row, place) => ({ ...row, place, group: runs.group[row.run] })) : [];
const manySeeds = runs.group.length > groups.length;

// The selection: ranges of distance and entropy, or null for all heads.
const selection = { mad: null, entropy: null };
const selectionChanged = signal();
const within = (value, range) => range === null || (value >= range[0] && value <= range[1]);
const isSelected = (head) => within(head.mad, selection.mad) && within(head.entropy, selection.entropy);
const hasSelection = () => selection.mad !== null || selection.entropy !== null;

const headName = (head) => `layer ${head.layer}, head ${head.head}`;
const seedName = (head) =>
  runs.seed[head.run] === null || runs.seed[head.run] === undefined ? "" : `seed ${runs.seed[head.run]}, `;

// The card next to the pointer, and its words for those who do not see it.
const card = element("div", { class: "card", hidden: "" });
const spoken = element("p", { class: "unseen", "aria-live": "polite" });
document.body.append(card, spoken);

function showCard(head, x, y) {
  const numbers = [
    ["distance", `${number(head.mad)} ± ${number(head.mad_std)}`],
    ["entropy", `${number(head.entropy)} ± ${number(head.entropy_std)}`],
  ];
  const map = window.nearsightExplorer?.miniature?.(groups[head.group].label, head.layer, head.head) ?? null;
  card.replaceChildren(
    element("b", {}, swatch(groups[head.group].colour), element("bdi", {}, groups[head.group].short)),
    element("span", {}, seedName(head) + headName(head)),
    element("dl", {}, ...numbers.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)])),
  );
  if (map) card.append(map);
  card.hidden = false;
  const { width, height } = card.getBoundingClientRect();
  card.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
  card.style.top = `${y + 14 + height > innerHeight ? Math.max(8, y - height - 14) : y + 14}px`;
}

const hideCard = () => (card.hidden = true);
addEventListener("scroll", hideCard, { passive: true });
addEventListener("keydown", (event) => event.key === "Escape" && hideCard());

function select(mad, entropy) {
  selection.mad = mad;
  selection.entropy = entropy;
  selectionChanged.notify();
}

/** Show a head in the attention explorer, where the page has one. */
function explore(head) {
  if (!window.nearsightExplorer?.select) return;
  window.nearsightExplorer.select(groups[head.group].label, head.layer, head.head);
  document.getElementById("explorer")?.scrollIntoView();
}
