"use strict";
// The page of one plan. All data is in the element #plan-data; nothing is fetched.
(() => {
  const data = JSON.parse(document.getElementById("plan-data").textContent);
  const byId = (id) => document.getElementById(id);
  const colour = (name) => getComputedStyle(document.body).getPropertyValue("--" + name).trim();
  const seconds = (s) => { if (!s) return "0 s"; const a = Math.abs(s); return a >= 1 ? +s.toPrecision(3) + " s" : a >= 1e-3 ? +(s * 1e3).toPrecision(3) + " ms" : +(s * 1e6).toPrecision(3) + " µs"; };
  const size = (n) => { for (const u of ["B", "kB", "MB", "GB"]) { if (n < 1000) return +n.toPrecision(3) + " " + u; n /= 1000; } return +n.toPrecision(3) + " TB"; };
  const redraw = [];
  const add = (parent, tag, text) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = text; parent.append(e); return e; };
  function legend(parent, entries) {
    parent.replaceChildren();
    for (const [name, swatch] of entries) { const s = add(parent, "span"); add(s, "i").style.background = `var(--${swatch})`; s.append(name); }
  }
  function context(canvas, height) {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    const c = canvas.getContext("2d");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, width, height);
    c.font = "12px system-ui, sans-serif"; c.textBaseline = "middle";
    return [c, width];
  }
  const LEFT = 150;
  // Ticks at 1, 2 or 5 times a power of ten, about every 110 pixels.
  function ticks(from, to, width) {
    const rough = (to - from) / Math.max(2, width / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= rough), found = [];
    for (let k = Math.ceil(from / step); k * step <= to; k++) found.push(k * step);
    return found;
  }
  function axis(c, from, to, width, y) {
    c.fillStyle = colour("soft"); c.strokeStyle = colour("line"); c.textAlign = "center";
    for (const t of ticks(from, to, width - LEFT)) {
      const x = LEFT + (t - from) / (to - from) * (width - LEFT);
      c.beginPath(); c.moveTo(x, 0); c.lineTo(x, y - 8); c.stroke();
      if (x > LEFT + 20 && x < width - 25) c.fillText(t === 0 ? "0" : seconds(t), x, y + 2);
    }
  }
  const view = { from: 0, to: 1 };

  const KINDS = ["forward", "backward", "update", "reshard", "sum partial results", "collective inside an operator", "transfer"];
  function timeline() {
    const t = data.timeline;
    if (!t) return;
    byId("timeline").hidden = false;
    byId("timeline-note").textContent = t.note;
    const canvas = byId("timeline-canvas"), whole = t.makespan_s, unit = t.unit_s, row = 24;
    view.to = whole;
    const rows = t.tracks.map(() => []);
    for (const s of t.spans) rows[s[0]].push(s);
    const used = [...new Set(t.spans.map((s) => s[4]))].sort();
    legend(byId("timeline-legend"), used.map((k) => [KINDS[k], "k" + k]));
    canvas.setAttribute("aria-label", `${t.spans.length} tasks on ${t.tracks.length} tracks in ${seconds(whole)}`);
    const height = t.tracks.length * row + 24;
    function draw() {
      const [c, width] = context(canvas, height);
      const scale = (width - LEFT) / (view.to - view.from), colours = KINDS.map((_, k) => colour("k" + k));
      axis(c, view.from, view.to, width, height - 12);
      const ink = colour("ink"), on = colour("on-colour");
      rows.forEach((spans, r) => {
        const y = r * row + 3;
        let filled = -1;
        c.save(); c.beginPath(); c.rect(LEFT, 0, width - LEFT, height); c.clip();
        for (const [, start, took, name, kind, critical] of spans) {
          const x = LEFT + (start * unit - view.from) * scale, w = took * unit * scale;
          if (x + w < LEFT || x > width) continue;
          if (w < 0.6 && x < filled) continue; // what the last one has drawn over already
          filled = x + 0.6;
          c.fillStyle = colours[kind];
          c.fillRect(x, y, Math.max(w - (w > 3 ? 0.6 : 0), 0.6), row - 6);
          if (critical && w > 9) { c.strokeStyle = ink; c.lineWidth = 1.5; c.strokeRect(x + 0.7, y + 0.7, w - 2, row - 7.4); c.lineWidth = 1; }
          if (w > 46) {
            const x0 = Math.max(x, LEFT) + 4, room = Math.floor((Math.min(x + w, width) - x0 - 4) / 6.4);
            if (room > 4) { c.fillStyle = on; c.textAlign = "left"; const n = t.names[name]; c.fillText(n.length > room ? n.slice(0, room - 1) + "…" : n, x0, y + (row - 6) / 2 + 1); }
          }
        }
        c.restore();
        c.fillStyle = ink; c.textAlign = "left"; c.fillText(t.tracks[r], 4, y + (row - 6) / 2 + 1, LEFT - 10);
      });
    }
    redraw.push(draw);
    const move = (from, to) => {
      const length = Math.min(Math.max(to - from, whole * 1e-5), whole);
      view.from = Math.min(Math.max(from, 0), whole - length); view.to = view.from + length;
      for (const f of redraw) f();
    };
    const zoom = (by, at) => { const length = (view.to - view.from) / by; move(at - (at - view.from) / by, at - (at - view.from) / by + length); };
    const timeAt = (e) => view.from + (e.offsetX - LEFT) / (canvas.clientWidth - LEFT) * (view.to - view.from);
    document.querySelectorAll("[data-zoom]").forEach((b) => b.addEventListener("click", () => {
      const by = +b.dataset.zoom; by ? zoom(by, (view.from + view.to) / 2) : move(0, whole);
    }));
    canvas.addEventListener("wheel", (e) => { if (e.ctrlKey || e.metaKey) { e.preventDefault(); zoom(e.deltaY < 0 ? 1.25 : 0.8, timeAt(e)); } }, { passive: false });
    canvas.addEventListener("keydown", (e) => {
      const length = view.to - view.from, middle = (view.from + view.to) / 2;
      const acts = { "+": () => zoom(1.5, middle), "=": () => zoom(1.5, middle), "-": () => zoom(1 / 1.5, middle), ArrowLeft: () => move(view.from - length / 5, view.to - length / 5), ArrowRight: () => move(view.from + length / 5, view.to + length / 5), Home: () => move(0, whole) };
      if (acts[e.key]) { e.preventDefault(); acts[e.key](); }
    });
    let held = null;
    canvas.addEventListener("pointerdown", (e) => { held = [e.offsetX, view.from, view.to]; canvas.setPointerCapture(e.pointerId); });
    canvas.addEventListener("pointerup", () => { held = null; });
    canvas.addEventListener("pointermove", (e) => {
      if (held) { const by = (held[0] - e.offsetX) / (canvas.clientWidth - LEFT) * (held[2] - held[1]); move(held[1] + by, held[2] + by); return; }
      const r = Math.floor(e.offsetY / row), now = timeAt(e), slack = (view.to - view.from) / canvas.clientWidth * 2;
      const hit = (rows[r] || []).filter((s) => s[1] * unit - slack <= now && now <= (s[1] + s[2]) * unit + slack).pop();
      byId("timeline-now").textContent = hit ? `${t.names[hit[3]]}: ${KINDS[hit[4]]}, ${seconds(hit[2] * unit)} from ${seconds(hit[1] * unit)} on ${t.tracks[r]}${hit[5] ? ", on the critical path" : ""}` : "";
    });
  }

  function memory() {
    const m = data.memory;
    if (!m) return;
    byId("memory").hidden = false;
    const canvas = byId("memory-canvas"), n = m.times_s.length, total = m.times_s.map((_, k) => m.persistent + m.alive[k] + m.transient[k]);
    const most = Math.max(...total), peak = total.indexOf(most), height = 180, top = most * 1.08;
    const limit = m.usable_bytes < 3 * most ? "the line is the limit" : "the limit is far above";
    byId("memory-note").textContent = `${m.title}: at most ${size(most)} of ${size(m.usable_bytes)} usable (${limit}), during ${m.names[m.name[peak]]}. From below: parameters and optimizer state, then gradients, activations and copies, then what is there while something is made.`;
    canvas.setAttribute("aria-label", `memory over the step, at most ${size(most)}`);
    const end = data.timeline.makespan_s;
    redraw.push(() => {
      const [c, width] = context(canvas, height);
      const from = view.from, to = view.to, highest = Math.max(top, m.usable_bytes < 3 * most ? m.usable_bytes * 1.05 : 0);
      const X = (t) => LEFT + (t - from) / (to - from) * (width - LEFT), Y = (b) => (height - 24) * (1 - b / highest);
      axis(c, from, to, width, height - 12);
      c.save(); c.beginPath(); c.rect(LEFT, 0, width - LEFT, height - 20); c.clip();
      const area = (low, high, fill) => {
        c.fillStyle = fill; c.beginPath(); c.moveTo(X(0), Y(low(0)));
        for (let k = 0; k < n; k++) { const t0 = m.times_s[k], t1 = k + 1 < n ? m.times_s[k + 1] : end; c.lineTo(X(t0), Y(high(k))); c.lineTo(X(t1), Y(high(k))); }
        for (let k = n - 1; k >= 0; k--) { const t0 = m.times_s[k], t1 = k + 1 < n ? m.times_s[k + 1] : end; c.lineTo(X(t1), Y(low(k))); c.lineTo(X(t0), Y(low(k))); }
        c.fill();
      };
      area(() => 0, () => m.persistent, colour("s0"));
      area(() => m.persistent, (k) => m.persistent + m.alive[k], colour("s2"));
      area((k) => m.persistent + m.alive[k], (k) => total[k], colour("s4"));
      if (m.usable_bytes < 3 * most) { c.strokeStyle = colour("warn"); c.beginPath(); c.moveTo(LEFT, Y(m.usable_bytes)); c.lineTo(width, Y(m.usable_bytes)); c.stroke(); }
      c.restore();
      c.fillStyle = colour("ink"); c.textAlign = "left";
      for (const share of [0.5, 1]) c.fillText(size(most * share), 4, Math.max(Y(most * share), 8));
    });
    canvas.addEventListener("pointermove", (e) => {
      const now = view.from + (e.offsetX - LEFT) / (canvas.clientWidth - LEFT) * (view.to - view.from);
      let k = n - 1;
      while (k > 0 && m.times_s[k] > now) k--;
      byId("memory-now").textContent = `${seconds(Math.max(now, 0))}: ${size(total[k])} during ${m.names[m.name[k]]}: ${size(m.persistent)} state, ${size(m.alive[k])} alive, ${size(m.transient[k])} transient`;
    });
  }

  // The operators as a tree by their names' parts; what is folded is one node.
  const MOST_AT_FIRST = 60, CHUNK = 40;
  function tree(operators) {
    const root = { name: "", path: "", children: new Map(), leaf: -1, first: 0 };
    operators.forEach((op, i) => {
      let at = root;
      const parts = op.name.split("/");
      parts.forEach((part, d) => {
        const last = d === parts.length - 1, key = last ? part + "\u0000" : part;
        if (!at.children.has(key)) at.children.set(key, { name: part, path: parts.slice(0, d + 1).join("/"), children: new Map(), leaf: last ? i : -1, first: i });
        at = at.children.get(key);
      });
    });
    const chunked = (node) => { // many children: runs of them in program order become nodes of their own
      const own = [...node.children.values()].sort((a, b) => a.first - b.first);
      own.forEach(chunked);
      if (own.length <= 2 * CHUNK) return;
      node.children = new Map();
      for (let k = 0; k < own.length; k += CHUNK) {
        const some = own.slice(k, k + CHUNK);
        node.children.set(k, { name: `${some[0].name} … ${some[some.length - 1].name}`, path: `${node.path}/${k}`, children: new Map(some.map((x, i) => [i, x])), leaf: -1, first: some[0].first });
      }
    };
    chunked(root);
    const fill = (node) => { node.members = node.leaf >= 0 ? [node.leaf] : [...node.children.values()].flatMap(fill); return node.members; };
    fill(root);
    return root;
  }

  function graph() {
    const ops = data.operators;
    if (!ops.length) return;
    byId("graph").hidden = false;
    legend(byId("graph-legend"), data.splits.map((name, k) => [name, "s" + k]));
    const root = tree(ops), open = new Set([root]), svg = byId("graph-svg"), NS = "http://www.w3.org/2000/svg";
    let chosen = null;
    const shown = (node) => node.leaf < 0 && open.has(node) ? [...node.children.values()].flatMap(shown) : [node];
    for (;;) { // unfolds level by level while there is room
      const groups = shown(root).filter((x) => x.leaf < 0);
      groups.forEach((x) => open.add(x));
      if (!groups.length) break;
      if (shown(root).length > MOST_AT_FIRST) { groups.forEach((x) => open.delete(x)); break; }
    }
    const took = (i) => ops[i].compute_s + ops[i].communication_s || 1e-12;
    function draw() {
      const nodes = shown(root).sort((a, b) => a.first - b.first), of = new Map();
      nodes.forEach((node, k) => node.members.forEach((i) => of.set(i, k)));
      const edges = new Map();
      for (const [a, b] of data.edges) { const p = of.get(a), q = of.get(b); if (p < q) edges.set(p * nodes.length + q, [p, q]); }
      const layer = nodes.map(() => 0), before = nodes.map(() => []);
      for (const [p, q] of edges.values()) before[q].push(p);
      nodes.forEach((_, q) => { for (const p of before[q]) layer[q] = Math.max(layer[q], layer[p] + 1); });
      if (!edges.size) nodes.forEach((_, q) => { layer[q] = Math.floor(q / 6); });
      const layers = [];
      nodes.forEach((_, k) => (layers[layer[k]] ||= []).push(k));
      const W = 178, H = 32, GX = 22, GY = 24, place = [];
      let widest = 1;
      layers.forEach((members, y) => {
        const want = (k) => before[k].length ? before[k].reduce((s, p) => s + place[p][0], 0) / before[k].length : 0;
        members.sort((a, b) => want(a) - want(b));
        members.forEach((k, x) => { place[k] = [x * (W + GX) + 8, y * (H + GY) + 8]; });
        widest = Math.max(widest, members.length);
      });
      const width = Math.max(widest * (W + GX) + 8, 300), height = layers.length * (H + GY) + 8;
      svg.setAttribute("width", width); svg.setAttribute("height", height);
      svg.replaceChildren();
      const make = (parent, tag, attributes) => { const e = document.createElementNS(NS, tag); for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v); parent.append(e); return e; };
      for (const [p, q] of edges.values()) {
        const [x0, y0] = [place[p][0] + W / 2, place[p][1] + H], [x1, y1] = [place[q][0] + W / 2, place[q][1]], bend = Math.min(40, (y1 - y0) / 2);
        // An edge past other layers goes around them, on the right of the wider of its ends.
        const around = layer[q] - layer[p] > 1, side = Math.max(x0, x1) + W / 2 + GX / 2 + 3 * (layer[q] - layer[p] > 3);
        const path = make(svg, "path", { d: around
          ? `M${x0 + W / 4} ${y0}C${x0 + W / 4} ${y0 + GY} ${side} ${y0} ${side} ${y0 + GY + H / 2}L${side} ${y1 - GY - H / 2}C${side} ${y1} ${x1 + W / 4} ${y1 - GY} ${x1 + W / 4} ${y1}`
          : `M${x0} ${y0}C${x0} ${y0 + bend} ${x1} ${y1 - bend} ${x1} ${y1}` });
        if (chosen !== null && (nodes[p] === chosen || nodes[q] === chosen)) path.setAttribute("class", "of");
      }
      nodes.forEach((node, k) => {
        const [x, y] = place[k], many = node.leaf < 0;
        const g = make(svg, "g", { transform: `translate(${x},${y})`, tabindex: 0, role: "button", "aria-label": many ? `unfold ${node.name}, ${node.members.length} operators` : `${node.name}: ${data.splits[ops[node.leaf].split]}` });
        if (node === chosen) g.setAttribute("class", "chosen");
        make(g, "rect", { class: "box", width: W, height: H, rx: 4 });
        const parts = new Map();
        for (const i of node.members) parts.set(ops[i].split, (parts.get(ops[i].split) || 0) + took(i));
        const sum = [...parts.values()].reduce((a, b) => a + b, 0);
        let at = 0;
        for (const [split, s] of [...parts].sort((a, b) => b[1] - a[1])) {
          make(g, "rect", { x: at, y: H - 7, width: s / sum * W, height: 7, fill: `var(--s${split})` });
          at += s / sum * W;
        }
        const name = many ? `▸ ${node.path.includes("/") && !/\/\d+$/.test(node.path) ? node.path : node.name} (${node.members.length})` : ops[node.leaf].name, most = 25;
        make(g, "text", { x: 6, y: 16 }).textContent = name.length > most ? "…" + name.slice(1 - most) : name;
        make(g, "title", {}).textContent = many ? `${node.name}: ${node.members.length} operators` : ops[node.leaf].name;
        const act = () => { chosen = node; if (many) open.add(node); draw(); detail(node); };
        g.addEventListener("click", act);
        g.addEventListener("keydown", (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); act(); } });
      });
      byId("graph-note").textContent = `${ops.length} operators in ${nodes.length} nodes; ▸ marks folded ones. The strip shows how a node's time is split.${edges.size ? "" : " The plan file alone does not say who reads whom."}`;
    }
    function detail(node) {
      const panel = byId("graph-detail");
      panel.replaceChildren();
      const sum = (f) => node.members.reduce((s, i) => s + ops[i][f], 0), one = node.leaf >= 0 ? ops[node.leaf] : null;
      add(panel, "h3", one ? one.name : `${node.path.replace(/\/\d+$/, "") || node.name} (${node.members.length} operators)`);
      const list = add(panel, "dl"), line = (k, v) => { add(list, "dt", k); add(list, "dd", v); };
      if (one) { line("kind", one.kind); line("dims", one.dims); line("split", one.how); line("parameters", one.storage); }
      line("computes", seconds(sum("compute_s"))); line("communicates", seconds(sum("communication_s")));
      line("sends", size(sum("sent_bytes"))); line("memory", size(sum("memory_bytes")));
      if (one) line("FLOPs", `${one.flops.toPrecision(3)}, ${Math.floor(one.split_flops_share * 1000) / 10} % split`);
    }
    byId("fold-all").addEventListener("click", () => { open.clear(); open.add(root); draw(); });
    byId("unfold-all").addEventListener("click", () => { const every = (n) => { open.add(n); n.children.forEach(every); }; every(root); draw(); });
    draw();
    let longest = 0;
    ops.forEach((_, i) => { if (took(i) > took(longest)) longest = i; });
    detail(shown(root).find((n) => n.members.includes(longest)));
  }

  // The table is there without a script; with one it sorts, filters and unfolds.
  function costs() {
    const table = document.querySelector("#costs table"), body = table && table.tBodies[0];
    if (!body) return;
    byId("costs-search").hidden = false;
    const rows = [...body.rows], more = byId("more");
    let unfolded = false;
    const show = () => {
      const wanted = byId("costs-filter").value.toLowerCase();
      for (const r of rows) r.hidden = wanted ? !r.dataset.names.includes(wanted) : !unfolded && r.hasAttribute("data-small");
    };
    byId("costs-filter").addEventListener("input", show);
    if (more) more.addEventListener("click", () => { unfolded = !unfolded; more.setAttribute("aria-expanded", unfolded); show(); });
    table.querySelectorAll("th").forEach((th, column) => {
      const button = document.createElement("button");
      button.type = "button"; button.textContent = th.textContent; th.replaceChildren(button);
      let up = th.classList.contains("n");
      button.addEventListener("click", () => {
        const value = (r) => r.cells[column].dataset.v === undefined ? r.cells[column].textContent : +r.cells[column].dataset.v;
        rows.sort((a, b) => { const x = value(a), y = value(b); return (x > y ? 1 : x < y ? -1 : 0) * (up ? -1 : 1); });
        table.querySelectorAll("th").forEach((o) => o.removeAttribute("aria-sort"));
        th.setAttribute("aria-sort", up ? "descending" : "ascending");
        up = !up;
        body.append(...rows);
      });
    });
    show();
  }

  timeline(); memory(); graph(); costs();
  const all = () => { for (const f of redraw) f(); };
  all();
  let waiting = 0;
  window.addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(all); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
})();
