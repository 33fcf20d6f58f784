"use strict";
// Draws the page's figures: in the page's colours, fitted to the window, and sending nothing.
(() => {
  // plotly.js writes styles as attributes, which the page's policy refuses from anyone; the same
  // text goes through the element's own style
  const setAttribute = Element.prototype.setAttribute;
  Element.prototype.setAttribute = function (name, value) {
    if (name === "style") this.style.cssText = value;
    else setAttribute.call(this, name, value);
  };

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const CONFIG = {
    responsive: false, // fitted below, labels included
    displaylogo: false, plotlyServerURL: "", showSendToCloud: false,
    modeBarButtonsToRemove: ["sendChartToCloud", "select2d", "lasso2d"],
  };
  const NARROW = 640; // pixels: below, labels of rows stand above their bars
  const LETTER = 7.6; // mean width of a letter of a title, in pixels

  // Text, background and grid follow the page. They go into the figure's template, so
  // whatever the figure itself sets still wins; traces keep their colours.
  function dress(figure) {
    const text = colour("--text"), grid = colour("--rule"), page = colour("--page");
    const soft = colour("--soft");
    const layout = structuredClone(figure.layout || {});
    const swapped = JSON.stringify(layout.template || {})
      .replaceAll('"#2a3f5f"', JSON.stringify(text))
      .replaceAll('"#E5ECF6"', JSON.stringify(page))
      .replaceAll('"#EBF0F8"', JSON.stringify(grid))
      .replaceAll('"#C8D4E3"', JSON.stringify(grid));
    const title = layout.title?.text || (typeof layout.title === "string" && layout.title);
    const template = JSON.parse(swapped);
    const base = template.layout || {};
    const axis = { gridcolor: grid, linecolor: grid, zerolinecolor: grid, automargin: true };
    template.layout = {
      ...base,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      // automargin widens it where labels need room
      margin: base.margin || { l: 56, r: 24, t: title ? 64 : 36, b: 48 },
      font: { ...base.font, color: text, family: colour("--sans") },
      hoverlabel: {
        ...base.hoverlabel, bgcolor: page, bordercolor: soft, font: { color: text },
      },
      modebar: { ...base.modebar, color: soft, activecolor: colour("--accent") },
      xaxis: { ...base.xaxis, ...axis },
      yaxis: { ...base.yaxis, ...axis },
    };
    layout.template = template;
    layout.autosize = true;
    delete layout.width; // the window decides
    return layout;
  }

  const bare = (text) => String(text).replace(/<[^>]*>/g, ""); // without its tags

  // Words of a title on as many lines as it needs.
  function wrapped(text, width, letter) {
    const most = Math.max(12, Math.floor(width / letter));
    return String(text).split("<br>").map((line) => {
      const lines = [""];
      for (const word of line.split(/ (?![^<>]*>)/)) { // not within a tag
        const last = lines[lines.length - 1];
        if (last && bare(last + " " + word).length > most) lines.push(word);
        else lines[lines.length - 1] = last ? last + " " + word : word;
      }
      return lines.join("<br>");
    }).join("<br>");
  }
  const lineCount = (text) => String(text).split("<br>").length;

  // Width of a text in pixels.
  const pen = document.createElement("canvas").getContext("2d");
  function textWidth(text, size) {
    pen.font = `${size}px ${colour("--sans")}`;
    return pen.measureText(bare(text)).width;
  }

  // Height of a legend below its plot: plotly.js sets it in one row, else in columns of the widest.
  function legendHeight(figure, layout, width) {
    const { legend, margin } = layout;
    const names = figure.data.flatMap((trace) =>
      (trace.name && trace.showlegend !== false ? [trace.name] : []));
    if (!layout.showlegend || legend?.orientation !== "h" || !names.length) return 0;
    const size = legend.font?.size ?? layout.font?.size ?? layout.template.layout.font?.size ?? 12;
    const items = names.map((name) => textWidth(name, size) + 45);
    const room = width - margin.l - margin.r - 10; // the axis may widen its margin so far
    const isOneRow = items.reduce((sum, item) => sum + item, 5) < room;
    const columns = isOneRow ? items.length : Math.max(1, Math.floor(room / Math.max(...items)));
    return Math.ceil(items.length / columns) * (Math.max(1.3 * size, 16) + 3) + 10;
  }

  // The layout for a width: long titles on several lines, labels of rows above narrow bars.
  function arranged(figure, width) {
    const layout = dress(figure);
    const margin = layout.margin = { ...layout.template.layout.margin, ...layout.margin };
    layout.height ||= 450;
    if (layout.title?.text) {
      layout.title.text = wrapped(layout.title.text, width - 16, LETTER * 1.16);
      const more = 20 * (lineCount(layout.title.text) - 1);
      if (more) {
        margin.t += more;
        layout.height += more;
        Object.assign(layout.title, { yref: "container", y: 1, yanchor: "top" });
        layout.title.pad = { ...layout.title.pad, t: 16 };
      }
    }
    let titleLines = 1;
    for (const name of Object.keys(layout).filter((key) => /^xaxis\d*$/.test(key))) {
      const axis = layout[name];
      if (!axis?.title?.text) continue;
      axis.title.text = wrapped(axis.title.text, width - 60, LETTER);
      titleLines = Math.max(titleLines, lineCount(axis.title.text));
    }
    layout.height += 17 * (titleLines - 1);
    const names = (layout.yaxis?.ticktext || []).flatMap((name) => String(name).split("<br>"));
    const longest = 0.95 * LETTER * Math.max(0, ...names.map((name) => bare(name).length));
    if (width >= NARROW) {
      if (longest > 0.4 * width) labelsAbove(figure, layout, margin, width);
      return fitted(figure, layout, width, titleLines);
    }
    if (layout.legend?.x > 1) {
      layout.legend = {
        ...layout.legend, orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom",
      };
      Object.assign(margin, { r: 16 });
    }
    if (layout.showlegend) {
      layout.legend = { ...layout.legend, maxheight: 2000 };
      layout.height += legendHeight(figure, layout, width);
    }
    if (figure.data.some((trace) => trace.type === "icicle")) Object.assign(margin, { l: 4, r: 4 });
    labelsAbove(figure, layout, margin, width);
    return fitted(figure, layout, width, titleLines);
  }

  // A plot with labels above its bars has a height of its own; around it lie the margins, in which
  // plotly.js makes room for the axis' title and the legend.
  function fitted(figure, layout, width, titleLines) {
    const { plotHeight } = layout.meta || {};
    if (!plotHeight) return layout;
    const { margin, template } = layout;
    const below = (template.layout.margin.b ?? margin.b) + 17 * (titleLines - 1);
    const bottom = Math.max(margin.b, below + legendHeight(figure, layout, width));
    layout.height = Math.ceil(plotHeight + margin.t + bottom);
    return layout;
  }

  // On a narrow plot lines are named in the legend: labels along them would meet. Hover texts
  // that are wider than the plot would be cut at its edges.
  function tracesFor(figure, layout, width) {
    const data = structuredClone(figure.data);
    // bars that say how high they are, as spans of a timeline: labels above take some of that
    const gap = figure.layout.bargap ?? figure.layout.template?.layout?.bargap ?? 0;
    const scale = (1 - layout.bargap) / (1 - gap);
    for (const trace of layout.meta?.plotHeight ? data : []) {
      if (trace.type !== "bar" || typeof trace.width !== "number") continue;
      trace.width *= scale;
      if (trace.offset) trace.offset *= scale;
    }
    for (const trace of width < NARROW ? data : []) {
      if (!Array.isArray(trace.hovertext)) continue;
      trace.hovertext = trace.hovertext.map((said) => wrapped(said, width - 60, LETTER));
    }
    const isRoof = (note) => note.name === "roof";
    if (width >= NARROW || !layout.annotations?.some(isRoof)) return data;
    layout.annotations = layout.annotations.filter((note) => !isRoof(note));
    for (const trace of data) {
      if (trace.hoverinfo !== "name" || trace.showlegend) continue;
      trace.showlegend = true;
      layout.height += 20;
    }
    layout.height += 20; // the group's name
    return data;
  }

  function labelsAbove(figure, layout, margin, width) {
    const axis = layout.yaxis || {};
    // rows run from the top down; upright axes with texts at their marks stay as they are
    const isRows = axis.ticktext ? axis.range?.[0] > axis.range?.[1]
      : figure.data.some((trace) => trace.orientation === "h");
    const given = axis.ticktext || axis.categoryarray;
    if (!isRows || !given?.length || layout.yaxis2) return;
    const names = given.map((name) => wrapped(name, width - 24, LETTER));
    const lines = Math.max(...names.map((name) => lineCount(name)));
    const rows = axis.ticktext && axis.range
      ? Math.abs(axis.range[0] - axis.range[1]) : names.length;
    const bar = Math.min(26, ((figure.layout.height || 450) / rows) * 0.6);
    // points of a row lie above and below its middle
    const isPoints = figure.data.every((trace) => trace.type === "scatter");
    const isSaidAbove = figure.data.some((trace) => String(trace.textposition).startsWith("top"));
    const room = isPoints ? (isSaidAbove ? 24 : 6) : 0;
    const above = 17 * lines + 8 + (isPoints ? room + 10 : 0);
    layout.bargap = above / (bar + above);
    layout.meta = { ...layout.meta, plotHeight: Math.ceil((bar + above) * rows) };
    layout.yaxis = { ...axis, showticklabels: false, automargin: false };
    margin.l = 12;
    const places = axis.tickvals || given;
    layout.annotations = [...(layout.annotations || []), ...names.map((name, at) => ({
      text: name, name: "row", x: 0, xref: "x domain", xanchor: "left", align: "left",
      y: places[at], yref: "y", yanchor: "bottom", yshift: bar / 2 + room,
      showarrow: false,
    }))];
  }

  // Texts behind bars may need more room than the figure left them: the axis ends later then.
  async function makeRoom(place) {
    for (let round = 0; round < 3; round += 1) {
      const full = place._fullLayout, axis = full.xaxis;
      if (!["linear", "log"].includes(axis?.type) || full.xaxis2) return;
      const frame = place.getBoundingClientRect();
      const left = frame.left + axis._offset, most = frame.right - 3;
      let factor = 1;
      for (const text of place.querySelectorAll(".barlayer .bartext-outside, .annotation-text")) {
        const note = text.closest(".annotation");
        if (note) {
          const own = full.annotations[note.dataset.index];
          if (own.xref !== "x" || own.xanchor !== "left") continue;
        }
        const box = text.getBoundingClientRect();
        if (box.right <= most || box.left <= left) continue;
        const rest = (most - box.width - left) / (most - left);
        // a text that hardly fits must not press all bars flat
        const room = Math.max(rest, 0.25) * (most - left);
        factor = Math.max(factor, (box.left - left) / room);
      }
      if (factor <= 1.001) return;
      const [low, high] = axis.range;
      await Plotly.relayout(place, { "xaxis.range": [low, low + (high - low) * factor * 1.01] });
    }
  }

  // Of labels at points or above bars that meet, the first stays; hover texts have the others. Of a
  // line of code its begin is read.
  function thinOut(place) {
    const frame = place.getBoundingClientRect();
    const taken = [];
    const isValue = (note) => place._fullLayout.annotations[note.dataset.index]?.name === "value";
    const notes = [...place.querySelectorAll(".annotation")].filter(isValue);
    for (const text of [...place.querySelectorAll(".scatterlayer .textpoint text"), ...notes]) {
      text.style.visibility = "";
      const box = text.getBoundingClientRect();
      const meets = taken.some((other) => box.left < other.right && other.left < box.right
        && box.top < other.bottom && other.top < box.bottom);
      const isCode = getComputedStyle(text).fontFamily.includes("monospace");
      const isCut = box.left < frame.left || (box.right > frame.right && !isCode);
      if (meets || isCut) text.style.visibility = "hidden";
      else taken.push(box);
    }
  }

  const figures = new Map(); // place to its figure, null where it cannot be read
  const drawn = new Set(); // places whose figure was drawn or said to be unreadable
  const widths = new Map(); // place to the width it was drawn for

  // Small panels side by side become illegible: they scroll.
  function needsWidth(figure) {
    const panels = Object.keys(figure.layout || {}).filter((key) => /^xaxis\d+$/.test(key));
    return panels.some((key) => (figure.layout[key].domain?.[0] ?? 0) > 0);
  }

  // Keeps the room that a figure will take, folded or not, so that drawing it moves nothing.
  function reserve(place) {
    let figure;
    try {
      figure = JSON.parse(place.parentElement.querySelector("script").textContent);
      figures.set(place, figure);
    } catch (error) {
      figures.set(place, null);
      drawn.add(place);
      return report(place, error);
    }
    const most = place.clientWidth || document.querySelector("main").clientWidth;
    const width = needsWidth(figure) ? Math.max(most, NARROW) : most;
    const layout = arranged(figure, width);
    tracesFor(figure, layout, width); // names in the legend make the figure higher
    place.style.minHeight = `${layout.height}px`;
    const tree = figure.data.find((trace) => trace.type === "icicle");
    if (tree) equipTree(place, tree);
  }

  async function draw(place) {
    const figure = figures.get(place);
    place.style.minWidth = needsWidth(figure) ? `${NARROW}px` : "";
    const width = place.clientWidth;
    widths.set(place, width);
    const layout = arranged(figure, width);
    const data = tracesFor(figure, layout, width);
    // on a narrow plot the buttons would cover its title; a double tap resets its axes
    const buttons = width < NARROW ? false : "hover";
    await Plotly.react(place, data, { ...layout, width }, { ...CONFIG, displayModeBar: buttons });
    const lacking = layout.meta?.plotHeight - place._fullLayout.yaxis?._length;
    // where the estimate of its margins left the plot far too little
    if (lacking > 0.1 * layout.meta?.plotHeight) {
      await Plotly.relayout(place, { height: layout.height + lacking });
    }
    place.style.minHeight = `${place._fullLayout.height}px`;
    await makeRoom(place);
    thinOut(place);
  }

  function report(place, error) {
    place.textContent = `This figure could not be drawn: ${error}`;
    console.error(error);
  }

  function redraw(place) {
    // one figure that cannot be drawn must not take the others with it
    return draw(place).catch((error) => report(place, error));
  }

  function begin(place) {
    drawn.add(place);
    return redraw(place).then(() => place.on?.("plotly_relayout", () => showDetail(place)));
  }

  // Figures in sight first, then the others one by one, so that the page answers meanwhile. What
  // is folded away has no width to be drawn in.
  const waiting = () => [...document.querySelectorAll("figure .plot")]
    .filter((place) => !drawn.has(place) && place.checkVisibility());
  const isInSight = (place) => {
    const box = place.getBoundingClientRect();
    return box.bottom > 0 && box.top < innerHeight;
  };
  let busy = false;
  async function drawVisible() {
    if (busy) return;
    busy = true;
    for (let places = waiting(); places.length; places = waiting()) {
      await begin(places.find(isInSight) ?? places[0]);
      await new Promise((resume) => setTimeout(resume));
    }
    busy = false;
  }

  // A box to search a call tree, and a way back to the whole of it.
  function equipTree(place, tree) {
    const bar = document.createElement("div");
    bar.className = "chart-tools";
    const label = document.createElement("label");
    const field = Object.assign(document.createElement("input"), { type: "search" });
    label.append("Find in the call tree ", field);
    const back = Object.assign(document.createElement("button"), { type: "button", textContent: "Whole tree" });
    const said = document.createElement("span");
    said.setAttribute("role", "status");
    bar.append(label, " ", back, " ", said);
    place.before(bar);
    const at = figures.get(place).data.indexOf(tree);
    const names = tree.labels.map((name, row) => `${tree.customdata?.[row]?.[0] ?? ""} ${name}`
      .replaceAll("<br>", "").replaceAll("&lt;", "<").toLowerCase());
    const ids = tree.ids ?? tree.labels;  // a tree of a reader's own may have no more than these
    const rows = new Map(ids.map((id, row) => [id, row]));
    let matches = [], next = 0;

    const restyle = (changes) => drawn.has(place) && Plotly.restyle(place, changes, [at]);
    function search() {
      if (!place._fullData) return; // not drawn yet
      const lengths = Array.isArray(tree.values) ? tree.values : place._fullData[at].values;
      const wanted = field.value.trim().toLowerCase();
      matches = wanted ? names.flatMap((name, row) => (name.includes(wanted) ? [row] : [])) : [];
      next = 0;
      const found = new Set(matches);
      // a match below another one is in its time already
      const outer = matches.filter((row) => {
        for (let up = rows.get(tree.parents[row]); up !== undefined; up = rows.get(tree.parents[up])) {
          if (found.has(up)) return false;
        }
        return true;
      });
      matches.sort((one, other) => lengths[other] - lengths[one]); // Enter goes to the largest first
      const whole = tree.parents.reduce((sum, parent, row) => sum + (parent ? 0 : lengths[row]), 0);
      const share = outer.reduce((sum, row) => sum + lengths[row], 0) / whole;
      said.textContent = !wanted ? "" : matches.length
        ? `${matches.length} ${matches.length === 1 ? "box" : "boxes"}, ${(100 * share).toFixed(1)}% of the time. Enter zooms to the largest.`
        : "Nothing has this name.";
      const faint = colour("--rule"), ink = colour("--soft");
      const shown = (row) => !wanted || found.has(row);
      const looks = {};
      if (tree.marker?.colors) {
        looks["marker.colors"] = [tree.marker.colors.map((own, row) => (shown(row) ? own : faint))];
      }
      if (Array.isArray(tree.textfont?.color)) {
        looks["textfont.color"] = [tree.textfont.color.map((own, row) => (shown(row) ? own : ink))];
      }
      restyle(looks);
    }
    field.addEventListener("input", search);
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !matches.length) return;
      event.preventDefault();
      restyle({ level: [ids[matches[next % matches.length]]] });
      next += 1;
    });
    back.addEventListener("click", () => {
      field.value = "";
      search();
      restyle({ level: [null] });
    });
  }

  // Operators are drawn once the window on the time is short enough to tell them apart.
  function showDetail(place) {
    const below = figures.get(place).layout?.meta?.detail_below_ms;
    const axis = place._fullLayout?.xaxis;
    if (!below || !axis) return;
    const [low, high] = axis.range;
    const shown = high - low <= below;
    const traces = place.data.flatMap((trace, at) => (trace.legendgroup === "operators" ? [at] : []));
    const now = place.data[traces[0]]?.visible;
    const wanted = shown ? true : "legendonly";
    if (traces.length && now !== wanted) Plotly.restyle(place, { visible: wanted }, traces);
  }

  for (const place of document.querySelectorAll("figure .plot")) {
    try {
      reserve(place);
    } catch (error) {
      console.error(error); // drawing it says on the page what is wrong
    }
  }
  dispatchEvent(new Event("hashchange")); // what the address points to has moved
  drawVisible();
  document.addEventListener("toggle", drawVisible, true);
  dark.addEventListener("change", () => widths.forEach((width, place) => redraw(place)));
  let pending = 0;
  new ResizeObserver(() => {
    cancelAnimationFrame(pending);
    pending = requestAnimationFrame(() => {
      for (const [place, width] of widths) {
        if (place.clientWidth && place.clientWidth !== width) redraw(place);
      }
    });
  }).observe(document.querySelector("main"));
})();
