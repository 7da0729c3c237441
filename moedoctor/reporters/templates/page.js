"use strict";
(() => {
  const SHORT = 8, LONG = 40, WORDS = 8;
  const UNITS = {
    ns: 1e-3, "µs": 1, us: 1, ms: 1e3, s: 1e6, bytes: 1, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30,
    KB: 1e3, MB: 1e6, GB: 1e9,
  };
  const make = (name, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(name), properties);
    element.append(...children);
    return element;
  };
  const words = (cell) => (cell.querySelector(":scope > details > summary") || cell).textContent.trim();
  const number = (text) => {
    const match = /^[≤≥<>~]?\s*(-?[\d,]*\.?\d+(?:e[-+]?\d+)?)\s*([A-Za-zµ]*)/.exec(text);
    return match ? Number(match[1].replaceAll(",", "")) * (UNITS[match[2]] || 1) : NaN;
  };
  const compare = (left, right) => {
    const a = number(left), b = number(right);
    if (!Number.isNaN(a) && !Number.isNaN(b) && a !== b) return a - b;
    return left.localeCompare(right, "en", { numeric: true });
  };

  let count = 0;
  const improve = (table) => {
    const rows = [...table.tBodies[0].rows];
    const heads = [...table.tHead.rows[0].cells];
    let show = () => {};
    heads.forEach((head, column) => {
      const button = make("button", { type: "button" });
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const keys = new Map(rows.map((row) => [row, words(row.cells[column])]));
        const sorted = [...rows].sort((a, b) => (down ? -1 : 1) * compare(keys.get(a), keys.get(b)));
        sorted.sort((a, b) => (keys.get(a) === "") - (keys.get(b) === ""));
        table.tBodies[0].append(...sorted);
        show();
      });
    });
    if (rows.length <= SHORT) return;

    count += 1;
    const tools = make("div", { className: "tools" });
    const label = table.parentElement.getAttribute("aria-label");
    const search = make("input", { type: "search", id: `filter-${count}`, autocomplete: "off" });
    search.setAttribute("aria-label", `Filter. ${label}`);
    tools.append(make("label", {}, "Filter", search));
    const choices = [];
    heads.forEach((head, column) => {
      const values = [...new Set(rows.map((row) => words(row.cells[column])))].sort();
      if (values.length < 2 || values.length > WORDS || values.some((value) => !value || value.length > 40)) return;
      if (values.every((value) => !Number.isNaN(number(value)))) return;
      const name = head.textContent.trim();
      const select = make("select", { id: `choice-${count}-${column}` }, make("option", { value: "" }, "all"));
      select.append(...values.map((value) => make("option", { value }, value)));
      select.setAttribute("aria-label", `Only rows whose ${name} is. ${label}`);
      tools.append(make("label", {}, name, select));
      choices.push([column, select]);
    });
    const more = make("button", { type: "button" });
    const state = make("output");
    tools.append(more, state);
    table.parentElement.before(tools);
    let all = rows.length <= LONG;
    more.hidden = all;

    show = () => {
      const wanted = search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0, fits = 0;
      const limit = all || wanted.length || choices.some(([, select]) => select.value) ? Infinity : LONG / 2;
      for (const row of table.tBodies[0].rows) {
        const text = row.textContent.toLowerCase();
        const right = wanted.every((word) => text.includes(word)) &&
          choices.every(([column, select]) => !select.value || words(row.cells[column]) === select.value);
        fits += right;
        row.hidden = !right || shown >= limit;
        shown += !row.hidden;
      }
      state.textContent = shown === rows.length ? `${rows.length} rows` : `${shown} of ${rows.length} rows`;
      more.textContent = all ? "Show fewer rows" : `Show all ${rows.length} rows`;
    };
    search.addEventListener("input", show);
    choices.forEach(([, select]) => select.addEventListener("change", show));
    more.addEventListener("click", () => { all = !all; show(); });
    addEventListener("beforeprint", () => { all = true; show(); });
    show();
  };

  document.querySelectorAll("main .table > table").forEach((table) => {
    if (!table.closest(".evidence")) improve(table);
  });

  const folds = [...document.querySelectorAll("details.section")];
  if (folds.length > 3) {
    const button = (text, open) => {
      const made = make("button", { type: "button" }, text);
      made.addEventListener("click", () => folds.forEach((fold) => { fold.open = open; }));
      return made;
    };
    folds[0].before(make("div", { className: "tools" }, button("Open all", true), button("Close all", false)));
  }
  const follow = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const fold = target && target.closest("details");
    if (fold) { fold.open = true; target.scrollIntoView(); }
  };
  addEventListener("hashchange", follow);
  follow();
})();
