"use strict";
// Tables that a reader sorts, filters and copies. Cells carry their exact values as data-value,
// and heads the names of the frame's columns as data-column (several: separated by commas).
(() => {
  const FILTER_ABOVE = 8, FIRST = 20;

  const exact = (cell) => cell.dataset.value
    ?? cell.textContent.trim().replace(/^–$/, "").replace(/^■\s*/, ""); // a part's colour
  function number(cell) {
    const text = cell.dataset.value?.split(",")[0] ?? cell.textContent;
    const plain = text.trim().replaceAll(/(?<=\d),(?=\d{3})/g, "").replace("−", "-").replace(/^</, "");
    return /^[+-]?\d/.test(plain) || /^[+-]?\.\d/.test(plain) ? parseFloat(plain) : NaN;
  }

  function csv(table) {
    const heads = [...table.tHead.rows].at(-1).cells;
    // a spreadsheet would calculate a name that begins like a formula
    // (or stands behind a tab or line break, where text that is pasted becomes cells)
    const harmless = (text) => {
      const line = text.replaceAll(/\s+/g, " ").trim();
      return /^[=+@\uff1d\uff0b\uff20\uff0d-]/.test(line) && isNaN(line) ? `'${line}` : line;
    };
    const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const several = [...heads].map((head) => (head.dataset.column || "").includes(","));
    const titles = [...heads].map((head) => head.dataset.column || quoted(head.dataset.title));
    const line = (row) => [...row.cells]
      .map((cell, at) => (several[at] ? exact(cell) : quoted(harmless(exact(cell)))))
      .join(",");
    return [titles.join(","), ...[...table.tBodies[0].rows].map(line), ""].join("\n");
  }

  async function copy(table, button) {
    const text = csv(table);
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      // some browsers give a page from a file no clipboard: select it, for the reader to copy
      const area = document.createElement("textarea");
      area.value = text;
      area.className = "csv";
      area.setAttribute("aria-label", "The table as CSV, to copy");
      button.parentElement.append(area);
      area.select();
      button.textContent = "Press Ctrl+C";
      area.addEventListener("blur", () => area.remove());
    }
    setTimeout(() => (button.textContent = "Copy as CSV"), 3000);
  }

  function arm(table) {
    const head = table.tHead?.rows[table.tHead.rows.length - 1];
    const body = table.tBodies[0];
    if (!head || !body || body.rows.length < 2) return;
    const original = [...body.rows];
    const first = original.filter((row) => !row.hidden).length;
    let limit = first < original.length ? first : original.length > FIRST + 5 ? FIRST : Infinity;
    let wanted = "";

    const tools = document.createElement("div");
    tools.className = "tools";
    const copier = document.createElement("button");
    copier.type = "button";
    copier.textContent = "Copy as CSV";
    copier.addEventListener("click", () => copy(table, copier));
    tools.append(copier);
    const more = document.createElement("button");
    more.type = "button";
    more.className = "more";
    more.addEventListener("click", () => {
      limit = limit === Infinity ? (first < original.length ? first : FIRST) : Infinity;
      update();
    });
    const elsewhere = table.tFoot?.textContent.match(/The whole table is .*/)?.[0] ?? "";
    const total = table.tFoot?.textContent.match(/([\d,]+) rows/)?.[1] ?? `${original.length}`;
    const all = total.replaceAll(",", "") === `${original.length}`
      ? `all ${total}` : `the first ${original.length} of ${total}`;
    if (limit !== Infinity) {
      table.tFoot?.remove();
      const place = document.createElement("small");
      place.textContent = ` ${elsewhere}`;
      table.after(more, place);
    }
    if (original.length > FILTER_ABOVE) {
      const filter = document.createElement("input");
      filter.type = "search";
      filter.placeholder = `Filter ${original.length} rows`;
      filter.setAttribute("aria-label", "Show only rows with this text");
      filter.addEventListener("input", () => {
        wanted = filter.value.trim().toLowerCase();
        update();
      });
      tools.prepend(filter);
    }
    if (table.caption) table.caption.append(tools);
    else table.before(tools);

    function update() {
      let shown = 0;
      for (const row of body.rows) {
        const fits = row.textContent.toLowerCase().includes(wanted);
        row.hidden = !fits || (!wanted && shown >= limit);
        shown += !row.hidden;
      }
      more.hidden = Boolean(wanted);
      more.textContent = limit === Infinity ? "Show fewer" : `Show ${all} rows`;
    }

    // numbers, and at most dashes between them
    function isNumeric(at) {
      const cells = original.map((row) => row.cells[at]);
      const words = cells.filter((cell) => isNaN(number(cell)));
      return words.length < cells.length && !words.some((cell) => /\p{L}/u.test(exact(cell)));
    }

    function sort(at, order) {
      for (const cell of head.cells) cell.removeAttribute("aria-sort");
      let rows = original;
      if (order) {
        head.cells[at].setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        const key = (row) => number(row.cells[at]);
        const text = (row) => row.cells[at].textContent.trim();
        // what has no value stands last in both directions
        rows = isNumeric(at)
          ? [...original.filter((row) => !isNaN(key(row))).sort((a, b) => sign * (key(a) - key(b))),
             ...original.filter((row) => isNaN(key(row)))]
          : [...original].sort((a, b) => sign * text(a).localeCompare(text(b)));
      }
      body.append(...rows);
      update();
    }

    [...head.cells].forEach((cell, at) => {
      cell.dataset.title = cell.textContent.trim();
      if (!cell.dataset.title) return;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...cell.childNodes);
      button.addEventListener("click", () => {
        const now = cell.getAttribute("aria-sort");
        // numbers are asked for the largest first, words from A
        const [one, two] = isNumeric(at) ? ["descending", "ascending"] : ["ascending", "descending"];
        sort(at, now === null ? one : now === one ? two : null);
      });
      cell.append(button);
    });
    update();
  }

  for (const table of document.querySelectorAll("table.dataframe")) arm(table);
})();
