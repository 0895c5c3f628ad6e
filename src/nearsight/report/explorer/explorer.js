/* The attention explorer: click a patch, and every head shows where that patch looks.
 *
 * First what is only computed (unpacking, rows of attention, geometry), then what is drawn, then the elements.
 * Data: the JSON that explorer.py describes. Layers and heads count from 0.
 * Places are fractions of the picture, so that models with different grids are asked about the same place. */
"use strict";

(() => {
  const PLACE = "nearsight-explorer";
  const LEVELS = 255;
  const RINGS = [0.25, 0.5, 0.75]; // in diagonals
  const SMALL = 128; // pixels of a small map, at least: about twice as many as it has on the page
  const LARGE = 672;
  const PIXELATED = 64; // pictures up to so many pixels wide show them as squares
  const FAINT = 2.5; // uniform attention is drawn at one part in so many of the full colour

  const ALIGNED = "All patches, aligned";
  const HINT = "Click a patch, or move with the arrow keys. Each small map is a head: bright is where that patch " +
    "looks, and the number is the head’s mean attention distance (MAD), over all patches and images. Enlarged, the " +
    "white ring is at that distance, the dotted ones at a quarter, half and three quarters of the diagonal.";

  // ---- Only computed -------------------------------------------------------------------------------------------

  function bytesOf(base64) {
    const text = atob(base64);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i += 1) bytes[i] = text.charCodeAt(i);
    return bytes;
  }

  /** What explorer.py packed: largest, others and distances (floats), then levels (bytes), all deflated. */
  async function unpackMaps(base64, layer) {
    const stream = new Blob([bytesOf(base64)]).stream().pipeThrough(new DecompressionStream("deflate"));
    const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
    const rows = layer.mad.length * numQueries(layer);
    const view = new DataView(bytes.buffer);
    const floats = new Float32Array(rows * (2 + layer.others.length)).map((_, i) => view.getFloat32(4 * i, true));
    const split = rows * (1 + layer.others.length);
    return {
      largest: floats.subarray(0, rows),
      others: floats.subarray(rows, split),
      distances: floats.subarray(split),
      levels: bytes.subarray(4 * floats.length),
    };
  }

  function numQueries(layer) {
    return layer.queries[0] * layer.queries[1] + layer.otherQueries.length;
  }

  /** The number of the cell of a grid at a place. */
  function cellAt([rows, cols], place) {
    const row = Math.min(rows - 1, Math.floor(place.y * rows));
    const col = Math.min(cols - 1, Math.floor(place.x * cols));
    return row * cols + col;
  }

  function centreOf([rows, cols], cell) {
    return { y: (Math.floor(cell / cols) + 0.5) / rows, x: ((cell % cols) + 0.5) / cols };
  }

  /** Which row of a layer's maps a query is: a place, or a token by name; null if the layer has no such token. */
  function queryNumber(layer, query) {
    if (query.token === undefined) return cellAt(layer.queries, query);
    const position = layer.otherQueries.indexOf(query.token);
    return position < 0 ? null : layer.queries[0] * layer.queries[1] + position;
  }

  /** Where one head looks: weights on the key grid, weights on the other tokens, distance (NaN if it has none). */
  function rowOf(layer, maps, head, query) {
    if (query.aligned) return alignedRow(layer, maps, head);
    const number = queryNumber(layer, query);
    if (number === null) return null;
    const row = head * numQueries(layer) + number;
    const size = layer.keys[0] * layer.keys[1];
    const levels = maps.levels.subarray(row * size, (row + 1) * size);
    const width = layer.others.length;
    return {
      grid: layer.keys,
      weights: Float64Array.from(levels, (level) => (level * maps.largest[row]) / LEVELS),
      largest: maps.largest[row],
      others: Array.from(maps.others.subarray(row * width, (row + 1) * width)),
      distance: maps.distances[row],
      reach: layer.seen && ((key) => isSet(layer.seen, number * size + key)),
    };
  }

  function isSet(bits, position) {
    return Boolean((bits[position >> 3] >> (position & 7)) & 1);
  }

  /**
   * The mean over all patches, each moved to the middle: a cell is the mean weight of the pairs with that offset, of
   * which there are fewer the longer it is, so that uniform attention is flat. Null where grids differ.
   */
  function alignedRow(layer, maps, head) {
    const [rows, cols] = layer.queries;
    if (rows !== layer.keys[0] || cols !== layer.keys[1]) return null;
    const size = rows * cols;
    const width = 2 * cols - 1;
    const weights = new Float64Array((2 * rows - 1) * width);
    const pairs = new Uint32Array(weights.length);
    const others = layer.others.map(() => 0);
    let distance = 0;
    for (let query = 0; query < size; query += 1) {
      const row = head * numQueries(layer) + query;
      const levels = maps.levels.subarray(row * size, (row + 1) * size);
      const total = levels.reduce((sum, level) => sum + level, 0) || 1;
      for (let key = 0; key < size; key += 1) {
        if (layer.seen && !isSet(layer.seen, query * size + key)) continue;
        const down = Math.floor(key / cols) - Math.floor(query / cols) + rows - 1;
        const right = (key % cols) - (query % cols) + cols - 1;
        weights[down * width + right] += levels[key] / total;
        pairs[down * width + right] += 1;
      }
      for (let i = 0; i < others.length; i += 1) others[i] += maps.others[row * others.length + i] / size;
      distance += maps.distances[row] / size;
    }
    weights.forEach((sum, offset) => { weights[offset] = sum / (pairs[offset] || 1); });
    const reach = layer.seen && ((offset) => pairs[offset] > 0);
    return { grid: [2 * rows - 1, width], weights, largest: Math.max(...weights), others, distance, reach };
  }

  /** An ellipse on a map, in fractions of it: all that is as far as `diagonals` of the layer's grid. */
  function ringOf(layer, query, diagonals) {
    const [rows, cols] = layer.grid;
    const cells = diagonals * (Math.hypot(rows - 1, cols - 1) || 1);
    if (!query.aligned) {
      const centre = centreOf(layer.queries, cellAt(layer.queries, query));
      return { cx: centre.x, cy: centre.y, rx: cells / cols, ry: cells / rows };
    }
    const [down, right] = layer.queries.map((lines) => lines / (2 * lines - 1)); // what the picture is of such a map
    return { cx: 0.5, cy: 0.5, rx: (cells / cols) * right, ry: (cells / rows) * down };
  }

  /** The weight that has the full colour: the largest, but more where attention is spread out evenly. */
  function topOf(row) {
    const seen = row.reach ? row.weights.filter((_, key) => row.reach(key)) : row.weights;
    const mean = seen.reduce((sum, weight) => sum + weight, 0) / seen.length;
    return Math.min(1, Math.max(row.largest, FAINT * mean)) || 1;
  }

  /** The border of what a query can see, as a path over 1000 × 1000. */
  function borderOf(row) {
    const [rows, cols] = row.grid;
    const inside = (down, right) => down >= 0 && right >= 0 && down < rows && right < cols;
    const sees = (down, right) => inside(down, right) && row.reach(down * cols + right);
    const parts = [];
    for (let down = 0; down <= rows; down += 1) {
      for (let right = 0; right <= cols; right += 1) {
        const start = `M${(1000 * right) / cols} ${(1000 * down) / rows}`;
        if (sees(down, right) !== sees(down - 1, right)) parts.push(`${start}h${1000 / cols}`);
        if (sees(down, right) !== sees(down, right - 1)) parts.push(`${start}v${1000 / rows}`);
      }
    }
    return parts.join("");
  }

  function mostLocal(model) {
    const heads = model.layers.flatMap((layer, position) => layer.mad.map((mad, head) => ({ position, head, mad })));
    return heads.filter(({ mad }) => mad !== null).sort((one, other) => one.mad - other.mad)[0] || heads[0];
  }

  const number = (value) => (value === null || Number.isNaN(value) ? "–" : value.toFixed(3));
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const nameOf = (layer, head) => `Layer ${layer.number}, head ${layer.heads[head]}`;
  const headInWords = (layer, head) =>
    `${nameOf(layer, head)}: MAD ${number(layer.mad[head])}, entropy ${number(layer.entropy[head])}`;

  /** A label within a sentence: short, and isolated, so that its writing direction does not turn the rest. */
  const within = (label) => `\u2068${label.length > 60 ? `${label.slice(0, 40)}…${label.slice(-19)}` : label}\u2069`;

  /** What goes to tokens that are not patches, with the registers together: [name, share], … */
  function toOthers(layer, row) {
    const cls = layer.others.indexOf("CLS");
    const registers = row.others.filter((_, i) => i !== cls);
    const parts = cls < 0 ? [] : [["To CLS", row.others[cls]]];
    if (!registers.length) return parts;
    const name = registers.length > 1 ? `To ${registers.length} registers` : "To the register";
    return [...parts, [name, registers.reduce((sum, share) => sum + share, 0)]];
  }

  // ---- Drawn ---------------------------------------------------------------------------------------------------

  let colours = null;

  /** A picture in dim grey, which colours stand out from. */
  function dimmed(image) {
    const canvas = make("canvas", { width: image.naturalWidth, height: image.naturalHeight });
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    const pixels = context.getImageData(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < pixels.data.length; i += 4) {
      const [red, green, blue] = pixels.data.subarray(i, i + 3);
      pixels.data.fill(0.5 * (0.3 * red + 0.59 * green + 0.11 * blue), i, i + 3);
    }
    context.putImageData(pixels, 0, 0);
    return canvas;
  }

  /** A row of attention as a tiny image, one pixel per cell: the colour of its weight, the fainter the smaller. */
  function cellsOf(row) {
    const canvas = make("canvas", { width: row.grid[1], height: row.grid[0] });
    const context = canvas.getContext("2d");
    const pixels = context.createImageData(canvas.width, canvas.height);
    const top = topOf(row);
    row.weights.forEach((weight, key) => {
      const share = weight / top;
      const colour = 3 * Math.round(share * LEVELS);
      const hidden = row.reach && !row.reach(key);
      pixels.data.set(colours.subarray(colour, colour + 3), 4 * key);
      pixels.data[4 * key + 3] = hidden ? 170 : LEVELS * Math.min(1, 0.3 + share);
    });
    context.putImageData(pixels, 0, 0);
    return canvas;
  }

  /** A map over its picture, or the picture alone for a query that a layer does not have. */
  function drawMap(canvas, row, picture, atLeast) {
    const [rows, cols] = row ? row.grid : [1, 1];
    const scale = Math.ceil(atLeast / Math.max(rows, cols)); // whole pixels per cell, so that edges are crisp
    Object.assign(canvas, { width: cols * scale, height: rows * scale });
    const context = canvas.getContext("2d");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.imageSmoothingEnabled = Boolean(picture) && picture.width > PIXELATED;
    if (picture) context.drawImage(picture, 0, 0, canvas.width, canvas.height);
    if (!row) return canvas;
    context.imageSmoothingEnabled = false;
    context.drawImage(cellsOf(row), 0, 0, canvas.width, canvas.height);
    return canvas;
  }

  function drawScale(canvas) {
    const context = canvas.getContext("2d");
    for (let level = 0; level <= LEVELS; level += 1) {
      context.fillStyle = `rgb(${colours.subarray(3 * level, 3 * level + 3).join(",")})`;
      context.fillRect(level, 0, 1, 1);
    }
    return canvas;
  }

  // ---- Elements ------------------------------------------------------------------------------------------------

  /** An element; of its properties, `attributes` and `data` are objects of their own. */
  function make(tag, { attributes = {}, data = {}, ...properties } = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    Object.assign(element.dataset, data);
    element.append(...children);
    return element;
  }

  function makeSvg(tag, attributes) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }

  const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

  /** Clicks, arrow keys, Home and End on a grid of elements with data-row and data-col; `choose` is given both. */
  function choosing(grid, choose) {
    const placeOf = ({ target }) => {
      const cell = target.closest("[data-row]");
      return cell && [Number(cell.dataset.row), Number(cell.dataset.col), cell];
    };
    grid.addEventListener("click", (event) => {
      const place = placeOf(event);
      if (place) choose(place[0], place[1]);
    });
    grid.addEventListener("keydown", (event) => {
      const place = placeOf(event);
      if (!place || event.altKey || event.ctrlKey || event.metaKey) return;
      let [row, col] = place;
      if (STEPS[event.key]) [row, col] = [row + STEPS[event.key][0], col + STEPS[event.key][1]];
      else if (event.key === "Home") col = 0;
      else if (event.key === "End") col = Number(place[2].parentElement.lastElementChild.dataset.col);
      else return;
      event.preventDefault();
      if (grid.querySelector(`[data-row="${row}"][data-col="${col}"]`)) choose(row, col);
    });
  }

  /** Mark one cell of a grid, the one that Tab reaches; without a place none is marked. */
  function mark(grid, row, col, focus) {
    for (const cell of grid.querySelectorAll("[data-row]")) {
      const chosen = Number(cell.dataset.row) === row && Number(cell.dataset.col) === col;
      cell.tabIndex = chosen ? 0 : -1;
      cell.setAttribute("aria-selected", String(chosen));
      if (chosen && focus) cell.focus();
    }
    if (!grid.querySelector('[tabindex="0"]')) grid.querySelector("[data-row]").tabIndex = 0;
  }

  /** One model: its enlarged head, the numbers of that, and all its heads. */
  class Side {
    constructor(explorer, name) {
      this.explorer = explorer;
      this.name = name;
      this.title = make("h3", { className: "nsx-label", dir: "auto" });
      this.canvas = make("canvas", { className: "nsx-smooth", attributes: { role: "img" } });
      this.overlay = makeSvg("svg", { viewBox: "0 0 1000 1000", preserveAspectRatio: "none", "aria-hidden": "true" });
      this.map = make("div", { className: "nsx-map" }, this.canvas, this.overlay);
      this.map.addEventListener("click", (event) => {
        const box = this.map.getBoundingClientRect();
        const place = { y: (event.clientY - box.top) / box.height, x: (event.clientX - box.left) / box.width };
        if (!explorer.query.aligned) explorer.ask(place);
      });
      this.numbers = make("dl", { className: "nsx-numbers" });
      this.top = make("span");
      const scale = drawScale(make("canvas", { width: LEVELS + 1, height: 1 }));
      this.heads = make("div", { className: "nsx-heads", attributes: { role: "grid" } });
      choosing(this.heads, (row, head) => this.choose(row, head, true));
      this.element = make("section", { className: "nsx-side" }, this.title,
        make("div", { className: "nsx-body" },
          make("div", { className: "nsx-one" }, this.map, make("div", {}, this.numbers,
            make("div", { className: "nsx-scale" }, scale, make("span", { textContent: "0" }), this.top))),
          make("div", { className: "nsx-scroll" }, this.heads)));
    }

    show(model) {
      this.model = model;
      ({ position: this.row, head: this.head } = mostLocal(model));
      this.title.textContent = this.title.title = model.label;
      this.heads.setAttribute("aria-label", `Heads of ${model.label}: a row per layer`);
      const most = Math.max(...model.layers.map((layer) => layer.mad.length));
      this.heads.style.setProperty("--nsx-heads", most);
      const names = ["head", ...[...Array(most).keys()].map((head) => model.layers[0].heads[head] ?? head)];
      const top = make("div", { className: "nsx-row nsx-top", attributes: { "aria-hidden": "true" } },
        ...names.map((textContent) => make("span", { textContent })));
      this.small = model.layers.map((layer) => layer.mad.map(() => make("canvas", { className: "nsx-smooth" })));
      this.heads.replaceChildren(top, ...model.layers.map((layer, row) => make("div",
        { className: "nsx-row", attributes: { role: "row" } },
        make("span", { title: layer.name, attributes: { role: "rowheader" } }, `L${layer.number}`),
        ...layer.mad.map((mad, head) => make("div",
          { className: "nsx-head", attributes: { role: "gridcell" }, data: { row, col: head } },
          this.small[row][head], make("span", { textContent: number(mad), attributes: { "aria-hidden": "true" } }))))));
    }

    get layer() {
      return this.model.layers[this.row];
    }

    choose(row, head, focus) {
      [this.row, this.head] = [row, head];
      mark(this.heads, row, head, focus);
      this.drawLarge();
      this.explorer.say();
    }

    draw() {
      const picture = this.explorer.pictureOf(this.model);
      this.small.forEach((canvases, position) => canvases.forEach((canvas, head) => {
        const row = this.explorer.row(this.model, position, head);
        drawMap(canvas, row, picture, SMALL);
        const own = row && !Number.isNaN(row.distance) ? `; asked now: ${number(row.distance)}` : "";
        canvas.parentElement.setAttribute("aria-label", headInWords(this.model.layers[position], head) + own);
      }));
      mark(this.heads, this.row, this.head, false);
      this.drawLarge();
    }

    drawLarge() {
      const row = this.explorer.row(this.model, this.row, this.head);
      drawMap(this.canvas, row, this.explorer.pictureOf(this.model), LARGE);
      this.map.style.setProperty("--nsx-shape", `${this.canvas.width} / ${this.canvas.height}`);
      const query = this.explorer.queryInWords(this.layer.queries);
      this.canvas.setAttribute("aria-label", `Where ${query} looks, ${headInWords(this.layer, this.head)}`);
      this.overlay.replaceChildren(...(row ? this.overlays(row) : []));
      this.writeNumbers(row);
    }

    /** The border of a window, the rings, and the query. */
    overlays(row) {
      const { query } = this.explorer;
      const add = (tag, name, shape) => makeSvg(tag, { class: name, "vector-effect": "non-scaling-stroke", ...shape });
      const around = row.reach ? [add("path", "nsx-window", { d: borderOf(row) })] : [];
      if (query.token !== undefined) return around;
      const ring = (name, diagonals) => {
        const shape = Object.entries(ringOf(this.layer, query, diagonals)).map(([key, part]) => [key, 1000 * part]);
        return add("ellipse", name, Object.fromEntries(shape));
      };
      const mad = this.layer.mad[this.head];
      const [rows, cols] = query.aligned ? row.grid : this.layer.queries;
      const { cx, cy } = ringOf(this.layer, query, 0);
      const [x, y] = [1000 * (cx - 0.5 / cols), 1000 * (cy - 0.5 / rows)];
      return [
        ...around,
        ...RINGS.map((diagonals) => ring("nsx-ring", diagonals)),
        ...(mad === null ? [] : [ring("nsx-mad-under", mad), ring("nsx-mad", mad)]),
        add("rect", "nsx-query", { x, y, width: 1000 / cols, height: 1000 / rows }),
      ];
    }

    writeNumbers(row) {
      const { layer, head } = this;
      const own = this.explorer.query.aligned ? "MAD, this picture" : "This patch";
      const lines = [
        [nameOf(layer, head), ""],
        ["MAD", number(layer.mad[head])],
        ["Entropy", number(layer.entropy[head])],
        ...(row && this.explorer.query.token === undefined ? [[own, number(row.distance)]] : []),
        ...(row ? toOthers(layer, row).map(([name, share]) => [name, percent(share)]) : [["No such query here", ""]]),
      ];
      this.numbers.replaceChildren(...lines.map(([name, value]) => make("div", { className: value ? "" : "nsx-name" },
        make("dt", { textContent: name }), make("dd", { textContent: value }))));
      this.top.textContent = row ? percent(topOf(row)) : "";
    }
  }

  /** Everything together: which picture, which query, which models. */
  class Explorer {
    constructor(root, data) {
      this.data = data;
      this.picture = 0;
      this.query = { y: 0.5, x: 0.5 }; // with a token's name it is that token; aligned, it is all patches
      this.unpacked = []; // by picture: the maps of every layer
      this.images = data.pictures.map(() => null);
      colours = bytesOf(data.colours);
      for (const model of data.models) {
        for (const layer of model.layers) layer.seen = layer.reach && bytesOf(layer.reach);
      }
      const group = (className, label, role = "group") =>
        make("div", { className, attributes: { role, "aria-label": label } });
      this.canvas = make("canvas", { attributes: { "aria-hidden": "true" } });
      this.grid = group("nsx-patches", "Patches of the picture: choose the one that looks", "grid");
      choosing(this.grid, (row, col) => this.ask(centreOf(this.patches, row * this.patches[1] + col), true));
      this.choices = group("nsx-pictures", "Picture");
      this.tokens = group("nsx-tokens", "What looks");
      this.said = make("p", { className: "nsx-said", dir: "auto", attributes: { role: "status" } });
      this.sides = data.models.slice(0, 2).map((_, i) => new Side(this, `Model ${i + 1}`));
      root.replaceChildren(make("div", { className: "nsx" },
        make("div", { className: "nsx-ask" },
          make("div", { className: "nsx-picker" }, this.canvas, this.grid),
          make("div", { className: "nsx-words" }, make("p", { className: "nsx-hint", textContent: HINT }),
            this.choices, this.tokens, this.said)),
        make("div", { className: "nsx-sides" }, ...this.sides.map((side) => side.element)),
        ...data.notes.map((note) => make("p", { className: "nsx-note", textContent: note }))));
      this.sides.forEach((side, i) => side.show(data.models[i]));
      this.showChoices();
      this.ready = Promise.all([this.loadImages(), this.loadMaps(0)]).then(() => {
        this.showChoices();
        this.draw();
      });
    }

    /** The pictures come a moment later: a browser decodes them in its own time. */
    async loadImages() {
      this.images = await Promise.all(this.data.pictures.map(async (source) => {
        const image = Object.assign(new Image(), { src: source });
        await image.decode();
        return { whole: image, dim: dimmed(image) };
      }));
    }

    /** All maps of a picture, once. */
    async loadMaps(picture) {
      this.unpacked[picture] ??= new Map(await Promise.all(this.data.models.flatMap((model) => model.layers).map(
        async (layer) => [layer, await unpackMaps(layer.maps[picture], layer)])));
    }

    async choosePicture(picture) {
      this.wanted = picture; // another may be chosen while this one is unpacked
      await this.loadMaps(picture);
      if (this.wanted !== picture) return;
      this.picture = picture;
      this.draw();
    }

    /** What there is to choose from depends on the models that are shown. */
    showChoices() {
      const models = this.sides.map((side) => side.model);
      const layers = models.flatMap((model) => model.layers);
      if (this.data.models.length > 2) this.sides.forEach((side) => side.title.replaceChildren(this.chooser(side)));
      this.choices.replaceChildren(...models[0].pictures.map((picture, i) => this.button(
        () => this.choosePicture(i), () => this.picture === i,
        { attributes: { "aria-label": `Picture ${i + 1}` } }, this.painted(make("canvas"), picture))));
      const tokens = new Set(layers.flatMap((layer) => layer.otherQueries));
      const kinds = [["A patch", {}], ...[...tokens].map((token) => [token, { token }]), [ALIGNED, { aligned: true }]];
      this.tokens.replaceChildren(...kinds.map(([textContent, kind]) => this.button(
        () => this.ask({ y: this.query.y, x: this.query.x, ...kind }),
        () => kind.token === this.query.token && kind.aligned === this.query.aligned, { textContent })));
      const sizes = models[0].layers.map((layer) => layer.queries);
      const [rows, cols] = sizes.reduce((one, other) => (other[0] * other[1] > one[0] * one[1] ? other : one));
      this.patches = [rows, cols];
      this.grid.style.setProperty("--nsx-columns", cols);
      this.grid.replaceChildren(...[...Array(rows).keys()].map((row) => make("div", { attributes: { role: "row" } },
        ...[...Array(cols).keys()].map((col) => {
          const label = `patch in row ${row + 1}, column ${col + 1}`;
          return make("div", { attributes: { role: "gridcell", "aria-label": label }, data: { row, col } });
        }))));
    }

    button(choose, isChosen, properties, ...children) {
      const button = make("button", { type: "button", ...properties }, ...children);
      button.addEventListener("click", choose);
      return Object.assign(button, { isChosen });
    }

    chooser(side) {
      const options = this.data.models.map((model, i) => make("option", { value: i, textContent: model.label }));
      const select = make("select", { attributes: { "aria-label": side.name } }, ...options);
      select.value = this.data.models.indexOf(side.model);
      select.addEventListener("change", () => this.put(side, this.data.models[Number(select.value)]));
      return select;
    }

    put(side, model) {
      side.show(model);
      this.showChoices();
      this.draw();
    }

    painted(canvas, picture) {
      const image = this.images[picture] && this.images[picture].whole;
      [canvas.width, canvas.height] = image ? [image.naturalWidth, image.naturalHeight] : [8, 8];
      if (image) canvas.getContext("2d").drawImage(image, 0, 0);
      canvas.classList.toggle("nsx-smooth", canvas.width > PIXELATED);
      return canvas;
    }

    /** What lies under the maps of a model: nothing under those of no one place. */
    pictureOf(model) {
      const image = this.images[model.pictures[this.picture]];
      return image && !this.query.aligned ? image.dim : null;
    }

    row(model, position, head) {
      const layer = model.layers[position];
      const maps = this.unpacked[this.picture];
      return maps && rowOf(layer, maps.get(layer), head, this.query);
    }

    ask(query, focus = false) {
      this.query = query;
      this.draw(focus);
    }

    draw(focus = false) {
      if (!this.unpacked[this.picture]) return; // it will be drawn when it is there
      this.painted(this.canvas, this.sides[0].model.pictures[this.picture]);
      for (const button of [...this.choices.children, ...this.tokens.children]) {
        button.setAttribute("aria-pressed", String(button.isChosen()));
      }
      const cell = cellAt(this.patches, this.query);
      const isPlace = this.query.token === undefined && !this.query.aligned;
      mark(this.grid, isPlace ? Math.floor(cell / this.patches[1]) : null, cell % this.patches[1], focus);
      this.sides.forEach((side) => side.draw());
      this.say();
    }

    queryInWords(grid) {
      if (this.query.token !== undefined) return this.query.token;
      if (this.query.aligned) return "the mean patch";
      const [rows, cols] = grid;
      const cell = cellAt(grid, this.query);
      return `the patch in row ${Math.floor(cell / cols) + 1}, column ${(cell % cols) + 1} of ${rows} × ${cols}`;
    }

    say() {
      const labelOf = (side) => (this.sides.length > 1 ? `${within(side.model.label)} · ` : "");
      const heads = this.sides.map((side) => labelOf(side) + headInWords(side.layer, side.head));
      this.said.textContent = `Picture ${this.picture + 1}, ${this.queryInWords(this.patches)}. ${heads.join(". ")}.`;
    }

    find(label, layerNumber, head) {
      const model = this.data.models.find((one) => one.label === label);
      const position = model ? model.layers.findIndex((layer) => layer.number === layerNumber) : -1;
      const place = position < 0 ? -1 : model.layers[position].heads.indexOf(head);
      return place < 0 ? null : { model, position, place };
    }

    /** What a head shows now: for other parts of the page, and for tests. */
    shown(label, layerNumber, head) {
      const found = this.find(label, layerNumber, head);
      return found && this.row(found.model, found.position, found.place);
    }

    miniature(label, layerNumber, head) {
      const found = this.find(label, layerNumber, head);
      const row = found && this.row(found.model, found.position, found.place);
      return row && drawMap(make("canvas", { className: "nsx-miniature" }), row, this.pictureOf(found.model), SMALL);
    }

    select(label, layerNumber, head) {
      const found = this.find(label, layerNumber, head);
      if (!found) return;
      const side = this.sides.find((one) => one.model === found.model) || this.sides[0];
      if (side.model !== found.model) this.put(side, found.model);
      side.choose(found.position, found.place, false);
      side.element.scrollIntoView({ block: "nearest" });
    }
  }

  /** Draw `data` into an element; what other parts of a page may ask of it, and when everything is drawn. */
  function mount(element, data) {
    if (!("DecompressionStream" in globalThis)) {
      element.textContent = "Looking into the heads needs a browser of 2023 or later.";
      return null;
    }
    const explorer = new Explorer(element, data);
    const offered = ["miniature", "select", "shown"].map((name) => [name, explorer[name].bind(explorer)]);
    return { ...Object.fromEntries(offered), ready: explorer.ready };
  }

  const parts = { bytesOf, unpackMaps, rowOf, alignedRow, cellAt, centreOf, ringOf, topOf, borderOf };
  globalThis.nearsightExplorer = { mount, parts };

  /** In a page: at its place, with the data beside it. */
  function start() {
    const root = document.getElementById(PLACE);
    if (!root) return;
    const data = JSON.parse(document.getElementById(`${PLACE}-data`).textContent);
    Object.assign(globalThis.nearsightExplorer, mount(root, data));
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
