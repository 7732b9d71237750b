"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (name, text, properties = {}) => Object.assign(document.createElement(name), { textContent: text }, properties);
  const root = document.documentElement;
  root.classList.add("scripted");
  for (const element of all(".needs-script")) element.hidden = false;

  // Light and dark: what the system says until somebody chooses.
  const theme = $("#theme");
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (systemDark.matches ? "dark" : "light")) === "dark";
  const remember = (value) => { try { localStorage.setItem("ptq-theme", value); } catch { /* no storage: it lasts as long as the page */ } };
  const recall = () => { try { return localStorage.getItem("ptq-theme"); } catch { return null; } };
  const label = () => { theme.textContent = isDark() ? "Light" : "Dark"; theme.title = `Switch to ${isDark() ? "light" : "dark"}`; };
  if (["light", "dark"].includes(recall())) root.dataset.theme = recall();
  theme.hidden = false;
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; remember(root.dataset.theme); label(); });
  systemDark.addEventListener("change", label);
  label();

  // Values of what is pointed at or reached by keyboard: the titles, shown at once and in one place.
  const tip = $("#tip");
  for (const title of all(".interactive title, .heat title")) {
    const mark = title.parentElement.closest("g.point") ?? title.parentElement;
    mark.dataset.tip = title.textContent;
    mark.setAttribute("aria-label", title.textContent);
    title.remove(); // the browser would show it a second time
  }
  const showTip = (mark) => {
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    const at = mark.getBoundingClientRect(), size = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(innerWidth - size.width - 4, at.left + Math.min(at.width, 600) / 2 - size.width / 2))}px`;
    tip.style.top = `${at.top - size.height - 8 > 0 ? at.top - size.height - 8 : at.bottom + 8}px`;
  };
  const hideTip = () => { tip.hidden = true; };
  for (const chart of all(".interactive, .heat.chart")) {
    chart.addEventListener("pointerover", (event) => { const mark = event.target.closest("[data-tip]"); mark ? showTip(mark) : hideTip(); });
    chart.addEventListener("pointerleave", hideTip);
    chart.addEventListener("focusin", (event) => { const mark = event.target.closest("[data-tip]"); if (mark) showTip(mark); });
    chart.addEventListener("focusout", hideTip);
  }
  addEventListener("scroll", hideTip, { passive: true });
  // One tab stop for each curve, arrow keys along it.
  for (const curve of all(".interactive .curve-group")) {
    const points = all(".point", curve);
    points.forEach((point, index) => {
      point.setAttribute("role", "img");
      point.tabIndex = index === 0 ? 0 : -1;
      point.addEventListener("keydown", (event) => {
        const next = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: points.length - 1 }[event.key];
        if (next === undefined || !points[next]) return;
        event.preventDefault();
        for (const other of points) other.tabIndex = -1;
        points[next].tabIndex = 0;
        points[next].focus();
      });
    });
  }

  const table = $("#layer-table");
  if (!table) return;
  const layers = all("tbody.layer", table);

  // Drawers: a button on the name, a row that is there only while it is open.
  const drawer = (layer) => $("details.drawer", layer);
  const setOpen = (layer, open) => {
    drawer(layer).open = open;
    $(".drawer-row", layer).hidden = !open;
    $(".row button", layer).setAttribute("aria-expanded", String(open));
  };
  for (const layer of layers) {
    const head = $(".row th", layer), inside = $(".inside", layer);
    inside.id = `${layer.id}-inside`;
    const button = make("button", "", { type: "button" });
    button.append(...head.childNodes);
    button.setAttribute("aria-controls", inside.id);
    button.addEventListener("click", () => setOpen(layer, !drawer(layer).open));
    head.replaceChildren(button);
    setOpen(layer, false);
    drawer(layer).addEventListener("toggle", () => setOpen(layer, drawer(layer).open)); // also by find in page
  }
  const openTarget = () => {
    const layer = layers.find((one) => `#${one.id}` === location.hash);
    if (!layer) return;
    setOpen(layer, true);
    layer.hidden = false;
    layer.scrollIntoView();
    $(".row button", layer).focus({ preventScroll: true });
  };
  addEventListener("hashchange", openTarget);

  // Sorting: down first for numbers, then up, then as they run.
  const heads = all("thead th[data-sort]", table);
  const value = (layer, column) => {
    const cell = $(".row", layer).children[column];
    return "value" in cell.dataset ? (heads[column].dataset.sort === "number" ? Number(cell.dataset.value) : cell.dataset.value) : null;
  };
  const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
  heads.forEach((head, column) => {
    const button = make("button", head.textContent, { type: "button", title: head.title });
    head.replaceChildren(button);
    const directions = head.dataset.sort === "number" ? ["descending", "ascending", null] : ["ascending", "descending", null];
    button.addEventListener("click", () => {
      const next = directions[(directions.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
      for (const other of heads) other.removeAttribute("aria-sort");
      if (next) head.setAttribute("aria-sort", next);
      const sign = next === "descending" ? -1 : 1;
      const sorted = next === null ? layers : [...layers].sort((a, b) => {
        const [x, y] = [value(a, column), value(b, column)];
        if (x === null || y === null) return (x === null) - (y === null); // what isn't known comes last
        return sign * compare(x, y);
      });
      table.append(...sorted);
    });
  });

  // Search: every word has to occur in the row.
  const search = $("#search"), found = $("#found");
  const haystacks = new Map(layers.map((layer) => [layer, $(".row", layer).textContent.toLowerCase()]));
  search.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const layer of layers) {
      layer.hidden = !words.every((word) => haystacks.get(layer).includes(word));
      count += !layer.hidden;
    }
    found.textContent = words.length ? `${count} of ${layers.length} layers` : "";
  });
  openTarget();
})();
