"""The page of the timeline: HTML, style and script, with {{TITLE}} and {{DATA}} to fill in."""

# One file, since the page must open without a network, and a script in Python needs no rules for
# what belongs to the wheel. The script draws on a canvas: a cell each for 500 requests and 5000
# passes would be too much for any document.
PAGE = r"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{TITLE}} - timeline</title>
<style>
:root, [data-theme=light] {
  color-scheme: light;
  --page: #f6f7f9; --panel: #ffffff; --text: #1c2330; --dim: #677084; --line: #dde1e8;
  --grid: #eceff3; --stripe: #fafbfc; --hover: #1c233014; --accent: #0a66c2;
  --prefill: #1f77c9; --again: #8d4bd0; --decode: #12a37a; --held: #bfe3d6; --dropped: #8d95a5;
  --kv: #d9480f; --slots: #e8a100; --budget: #b9a900; --turn: #59b4e9; --prefix: #cf6fa3;
  --behind: #c3c8d1; --mark: #c8102e; --end: #1c2330; --kvfill: #d9480f33; --queue: #7a5c00;
}
[data-theme=dark] {
  color-scheme: dark;
  --page: #12151b; --panel: #191d25; --text: #e4e8ef; --dim: #939db0; --line: #2d3442;
  --grid: #232935; --stripe: #1c212a; --hover: #ffffff18; --accent: #6cb3ff;
  --prefill: #4a9cf0; --again: #b184f0; --decode: #1fbf90; --held: #1d5546; --dropped: #7c8597;
  --kv: #ff7a45; --slots: #f2b52e; --budget: #d8ca36; --turn: #6cc3f5; --prefix: #e08fbb;
  --behind: #4a5262; --mark: #ff5c72; --end: #e4e8ef; --kvfill: #ff7a4540; --queue: #e6c35c;
}
* { box-sizing: border-box; }
body { margin: 0; height: 100vh; display: flex; flex-direction: column; background: var(--page);
  color: var(--text); font: 13px/1.4 system-ui, -apple-system, "Segoe UI", "DejaVu Sans",
  sans-serif; }
header, footer { padding: 8px 14px; background: var(--panel); border-bottom: 1px solid var(--line);
  flex: none; }
footer { border: 0; border-top: 1px solid var(--line); min-height: 54px; }
h1 { font-size: 15px; margin: 0; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.line { display: flex; flex-wrap: wrap; gap: 6px 18px; align-items: center; }
.line + .line { margin-top: 8px; }
.fact b { font-weight: 600; } .fact span, .dim { color: var(--dim); }
button, select, input[type=search] { font: inherit; color: inherit; background: var(--page);
  border: 1px solid var(--line); border-radius: 6px; padding: 3px 9px; }
button { cursor: pointer; } button:hover { border-color: var(--accent); }
button:focus-visible, select:focus-visible, input:focus-visible, #view:focus-visible {
  outline: 2px solid var(--accent); outline-offset: 1px; }
.group { display: flex; gap: 4px; align-items: center; }
.push { margin-left: auto; }
#legend { gap: 4px 4px; }
#legend button { border-color: transparent; background: none; padding: 1px 7px; display: flex;
  gap: 6px; align-items: center; font-variant-numeric: tabular-nums; }
#legend button[aria-pressed=true] { border-color: var(--accent); }
.note { display: flex; gap: 6px; align-items: center; }
#legend .note { padding: 1px 7px; }
.swatch { width: 16px; height: 11px; border-radius: 2px; display: inline-block; }
.swatch.thin { height: 5px; }
#view { flex: 1; overflow: auto; position: relative; min-height: 120px; background: var(--panel); }
#layers { position: sticky; top: 0; left: 0; width: 0; height: 0; }
#layers canvas { position: absolute; top: 0; left: 0; display: block; }
#tip { position: fixed; z-index: 5; pointer-events: none; display: none; max-width: 420px;
  background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 8px 10px;
  box-shadow: 0 4px 18px #0004; font-size: 12px; }
#tip table { border-spacing: 0; }
#tip td { vertical-align: top; }
#tip td:first-child { color: var(--dim); padding-right: 10px; white-space: nowrap; }
#tip b, #detail b { overflow-wrap: anywhere; }
</style>
</head>
<body>
<header>
  <div class="line"><h1 id="title"></h1><div class="line" id="facts"></div></div>
  <div class="line">
    <div class="group"><button id="out" title="Zoom out (-)">&minus;</button>
      <button id="in" title="Zoom in (+)">+</button>
      <button id="fit" title="All passes (0)">Fit</button></div>
    <label class="group">Rows <input id="height" type="range" min="3" max="26" value="18"></label>
    <label class="group">Sort <select id="sort">
      <option value="arrival">by arrival</option>
      <option value="wait">longest wait first</option>
      <option value="marks">most retractions first</option>
      <option value="tokens">most tokens first</option></select></label>
    <input id="filter" type="search" placeholder="rid contains" aria-label="rid contains">
    <label class="group"><input id="retracted" type="checkbox"> retracted only</label>
    <label class="group"><input id="inview" type="checkbox"> only those in view</label>
    <span class="dim" id="count"></span>
    <button class="push" id="theme" title="Switch between dark and light">Theme</button>
  </div>
  <div class="line" id="legend"></div>
</header>
<div id="view" tabindex="0" aria-label="Requests over passes">
  <div id="layers"><canvas id="base"></canvas><canvas id="over"></canvas></div>
  <div id="space"></div>
</div>
<footer id="detail"></footer>
<div id="tip"></div>
<script id="data" type="application/json">{{DATA}}</script>
<script>
"use strict";
const T = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const P = T.passes, N = P.step.length;
const GUTTER = 132, HEAD = 84, TAIL = 14, MAX_SCALE = 48;
const PHASE = {P: "prefill", D: "decode", M: "mixed"};
const COLOR = {"prefill": "prefill", "prefill again": "again", "decode": "decode",
  "not in the pass": "held", "dropped token": "dropped", "waits: kv": "kv",
  "waits: slots": "slots", "waits: prefill_budget": "budget", "waits: decode_turn": "turn",
  "waits: prefix": "prefix", "waits: behind others": "behind"};
const isWait = T.kinds.map(kind => kind.startsWith("waits: "));
const view = $("view"), base = $("base"), over = $("over"), tip = $("tip");
let scale = 1, rowHeight = 18, rows = T.rows, picked = null, only = -1, css = {}, drawAsked = false;
let pointer = null, drag = null, isFit = true, chosenLeft = -1, autoHeight = true;

// --- data ---

T.rows.forEach((row, order) => {
  row.order = order;
  row.by = new Array(T.kinds.length).fill(0);
  for (let i = 0; i < row.spans.length; i += 4) row.by[row.spans[i]] += row.spans[i + 2];
  row.wait = row.by.reduce((sum, n, kind) => sum + (isWait[kind] ? n : 0), 0);
  row.first = row.spans.length ? row.spans[1] : row.marks[0];
  const last = row.spans.length - 4;
  row.last = last < 0 ? row.first : row.spans[last + 1] + row.spans[last + 2] - 1;
});

// Rids that begin alike, as random ones do not, are told apart by their ends.
function label(rid) { return rid.length <= 18 ? rid : rid.slice(0, 8) + "…" + rid.slice(-8); }

function spanAt(row, pass) {  // offset in row.spans, or -1
  let low = 0, high = row.spans.length / 4;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (row.spans[4 * mid + 1] + row.spans[4 * mid + 2] <= pass) low = mid + 1; else high = mid;
  }
  return low * 4 < row.spans.length && row.spans[4 * low + 1] <= pass ? 4 * low : -1;
}

function firstSpanFrom(row, pass) {
  let low = 0, high = row.spans.length / 4;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (row.spans[4 * mid + 1] + row.spans[4 * mid + 2] <= pass) low = mid + 1; else high = mid;
  }
  return 4 * low;
}

// --- geometry ---

const plotWidth = () => Math.max(50, view.clientWidth - GUTTER);
const plotHeight = () => Math.max(30, view.clientHeight - HEAD);
// Room for the mark of an end by the last pass.
const fitScale = () => (plotWidth() - TAIL) / N;
const x = pass => GUTTER + pass * scale - view.scrollLeft;
const passAt = px => Math.floor((px - GUTTER + view.scrollLeft) / scale);
const rowAt = py => Math.floor((py - HEAD + view.scrollTop) / rowHeight);

function layOut() {
  $("space").style.width = Math.floor(GUTTER + N * scale + TAIL) + "px";
  $("space").style.height = HEAD + rows.length * rowHeight + 6 + "px";
  ask();
}

function zoom(factor, px) {
  const at = px === undefined ? GUTTER + plotWidth() / 2 : Math.max(px, GUTTER);
  const pass = (at - GUTTER + view.scrollLeft) / scale;
  scale = Math.min(Math.max(scale * factor, fitScale()), Math.max(MAX_SCALE, fitScale()));
  isFit = scale === fitScale();
  layOut();
  view.scrollLeft = pass * scale - (at - GUTTER);
  choose();
}

function fit() { isFit = true; scale = fitScale(); layOut(); view.scrollLeft = 0; choose(); }

function choose(isScroll = false) {
  // What is under the pointer, or in the middle, stays there if it stays at all.
  const at = pointer && pointer.y >= HEAD ? pointer.y : HEAD + plotHeight() / 2;
  const anchor = rows[rowAt(at)], offset = at - HEAD + view.scrollTop;
  const within = offset - rows.indexOf(anchor) * rowHeight;
  const text = $("filter").value.trim();
  chosenLeft = view.scrollLeft;
  const from = $("inview").checked ? Math.max(0, passAt(GUTTER)) : 0;
  const to = $("inview").checked ? passAt(GUTTER + plotWidth()) : N;
  rows = T.rows.filter(row => row.rid.includes(text) && row.first <= to && row.last >= from
    && (!$("retracted").checked || row.marks.length));
  const key = {wait: row => row.wait, marks: row => row.marks.length, tokens: row => row.tokens};
  const by = key[$("sort").value];
  if (by) rows.sort((a, b) => by(b) - by(a));
  $("count").textContent = rows.length + " of " + T.rows.length + " requests";
  if (autoHeight && !isScroll) {
    // Few requests get tall rows; many get rows that leave room for a hundred.
    rowHeight = Math.floor(plotHeight() / Math.min(100, rows.length || 1));
    rowHeight = Math.max(5, Math.min(22, rowHeight));
    $("height").value = rowHeight;
  }
  layOut();
  if (!anchor) return;
  let kept = rows.indexOf(anchor);
  if (kept < 0 && !by) kept = rows.findIndex(row => row.order > anchor.order);
  if (kept >= 0) view.scrollTop = kept * rowHeight + within - (at - HEAD);
}

// --- drawing ---

function readStyle() {
  const style = getComputedStyle(document.documentElement);
  css = {};
  for (const name of ["panel", "text", "dim", "line", "grid", "stripe", "hover", "accent", "mark",
    "end", "kvfill", "kv", "queue", ...Object.values(COLOR)])
    css[name] = style.getPropertyValue("--" + name).trim();
  css.kinds = T.kinds.map(kind => css[COLOR[kind] || "behind"]);
}

function ask() {
  if (drawAsked) return;
  drawAsked = true;
  requestAnimationFrame(() => { drawAsked = false; draw(); drawOver(); });
}

function context(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = view.clientWidth, height = view.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    canvas.style.width = width + "px"; canvas.style.height = height + "px";
  }
  const c = canvas.getContext("2d");
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.clearRect(0, 0, width, height);
  c.font = "11px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif";
  c.textBaseline = "middle";
  return c;
}

function draw() {
  const c = context(base), width = view.clientWidth, height = view.clientHeight;
  const first = Math.max(0, passAt(GUTTER)), last = Math.min(N - 1, passAt(width));
  c.save();
  c.beginPath(); c.rect(0, HEAD, width, height - HEAD); c.clip();
  const top = Math.max(0, rowAt(HEAD)), bottom = Math.min(rows.length - 1, rowAt(height));
  if (rowHeight >= 8) {
    c.fillStyle = css.stripe;
    for (let r = top; r <= bottom; r++)
      if (r % 2) c.fillRect(0, HEAD + r * rowHeight - view.scrollTop, width, rowHeight);
  }
  drawTicks(c, first, last, height);
  c.save();
  c.beginPath(); c.rect(GUTTER, HEAD, width - GUTTER, height - HEAD); c.clip();
  for (let r = top; r <= bottom; r++)
    drawRow(c, rows[r], HEAD + r * rowHeight - view.scrollTop, first, last);
  c.restore();
  if (rowHeight >= 11) {
    c.textAlign = "right";
    for (let r = top; r <= bottom; r++) {
      c.fillStyle = rows[r] === picked ? css.accent : css.dim;
      const y = HEAD + (r + 0.5) * rowHeight - view.scrollTop;
      c.fillText(label(rows[r].rid), GUTTER - 8, y, GUTTER - 12);
    }
  }
  c.restore();
  drawHead(c, first, last);
  c.strokeStyle = css.line; c.beginPath();
  c.moveTo(GUTTER - 0.5, 0); c.lineTo(GUTTER - 0.5, height);
  c.moveTo(0, HEAD - 0.5); c.lineTo(width, HEAD - 0.5); c.stroke();
  if (!rows.length) {
    c.fillStyle = css.dim; c.textAlign = "left";
    c.fillText("No request matches.", GUTTER + 16, HEAD + 24);
  }
}

function tickEvery() {
  const least = 70 / scale;
  let every = Math.pow(10, Math.floor(Math.log10(least)));
  for (const factor of [1, 2, 5, 10]) if (every * factor >= least) { every *= factor; break; }
  return Math.max(1, every);
}

function drawTicks(c, first, last, height) {
  const every = tickEvery();
  c.strokeStyle = css.grid; c.beginPath();
  for (let p = Math.ceil(first / every) * every; p <= last; p += every) {
    const at = Math.round(x(p)) + 0.5;
    if (at >= GUTTER) c.moveTo(at, HEAD), c.lineTo(at, height);
  }
  c.stroke();
}

function drawRow(c, row, y, first, last) {
  const pad = rowHeight >= 8 ? Math.round(rowHeight * 0.14) : rowHeight > 4 ? 0.5 : 0;
  const full = rowHeight - 2 * pad, thin = Math.max(1.5, Math.round(full * 0.42));
  const gap = scale >= 7 ? 1 : 0;
  const spans = row.spans;
  for (let i = firstSpanFrom(row, first); i < spans.length && spans[i + 1] <= last; i += 4) {
    const kind = spans[i], isThin = isWait[kind] || T.kinds[kind] === "not in the pass";
    const tall = isThin ? thin : full;
    c.fillStyle = css.kinds[kind];
    c.globalAlpha = only < 0 || only === kind ? 1 : 0.13;
    const offset = y + pad + (full - tall) / 2;
    if (gap && !isThin) {
      // Passes apart from each other, once there is room.
      const from = Math.max(spans[i + 1], first);
      const to = Math.min(spans[i + 1] + spans[i + 2] - 1, last);
      for (let p = from; p <= to; p++) c.fillRect(x(p), offset, scale - gap, tall);
    } else {
      const from = x(Math.max(spans[i + 1], first - 1));
      const to = x(Math.min(spans[i + 1] + spans[i + 2], last + 2));
      c.fillRect(from, offset, Math.max(to - from - gap, 0.5), tall);
    }
  }
  c.globalAlpha = 1;
  drawLetters(c, row, y, first, last);
  const middle = y + rowHeight / 2, size = Math.min(5, Math.max(2, rowHeight * 0.3));
  for (const pass of row.marks) {
    if (pass < first - 1 || pass > last + 1) continue;
    const at = x(pass);
    c.fillStyle = css.mark; c.strokeStyle = css.panel; c.lineWidth = 1;
    c.beginPath(); c.moveTo(at - size, middle - size); c.lineTo(at + size, middle - size);
    c.lineTo(at, middle + size); c.closePath(); c.fill(); c.stroke();
  }
  if (row.end >= first - 2 && row.end <= last + 1 && row.outcome)
    drawEnd(c, row.outcome, x(row.end + 1) + size + 1, middle, size * 0.8);
}

function drawLetters(c, row, y, first, last) {
  if (scale < 26 || rowHeight < 14) return;
  c.textAlign = "center"; c.fillStyle = "#fff";
  for (let p = first; p <= last; p++) {
    const i = spanAt(row, p);
    if (i < 0 || isWait[row.spans[i]]) continue;
    const kind = T.kinds[row.spans[i]];
    const letter = kind.startsWith("prefill") ? "P" : kind === "decode" ? "D" : "";
    if (letter) c.fillText(letter, x(p) + (scale - 1) / 2, y + rowHeight / 2 + 0.5);
  }
}

function drawEnd(c, outcome, at, y, size) {
  c.fillStyle = c.strokeStyle = css.end; c.lineWidth = 1.3; c.beginPath();
  if (outcome === "stop") { c.arc(at, y, size, 0, 7); c.fill(); }
  else if (outcome === "length") c.fillRect(at - size, y - size, 2 * size, 2 * size);
  else if (outcome === "left") { c.arc(at, y, size, 0, 7); c.stroke(); }
  else { c.moveTo(at - size, y - size); c.lineTo(at + size, y + size);
    c.moveTo(at + size, y - size); c.lineTo(at - size, y + size); c.stroke(); }
}

function drawHead(c, first, last) {
  const width = view.clientWidth, top = 20, low = HEAD - 14, tall = low - top;
  const mostQueued = P.queued.reduce((most, n) => Math.max(most, n), 1);
  c.fillStyle = css.panel; c.fillRect(0, 0, width, HEAD);
  c.save(); c.beginPath(); c.rect(GUTTER, 0, width - GUTTER, HEAD); c.clip();
  const every = tickEvery();
  c.textAlign = "left"; c.fillStyle = css.dim;
  for (let p = Math.ceil(first / every) * every; p <= last; p += every) {
    c.fillRect(Math.round(x(p)), 4, 1, 12);
    c.fillText(P.step[p].toLocaleString("en"), x(p) + 4, 10);
  }
  // One column a pixel at most: the highest value of the passes that share it.
  const wide = Math.max(1, scale), many = Math.max(1, Math.round(1 / scale));
  const start = first - first % many, queueLine = [], kvLine = [];
  for (let p = start; p <= last; p += many) {
    let used = 0, queued = 0, prefills = 0, decodes = 0;
    for (let i = p; i < Math.min(p + many, N); i++) {
      used = Math.max(used, P.used[i]); queued = Math.max(queued, P.queued[i]);
      if (P.phase[i] !== "D") prefills++;
      if (P.phase[i] !== "P") decodes++;
    }
    const high = tall * used / T.kv_size, at = x(p), step = Math.max(wide, many * scale);
    c.fillStyle = css.kvfill; c.fillRect(at, low - high, step, high);
    kvLine.push([at, low - high], [at + step, low - high]);
    queueLine.push([at, low - tall * queued / mostQueued]);
    c.fillStyle = css.prefill; c.globalAlpha = prefills / (prefills + decodes);
    c.fillRect(at, low + 3, step, 7);
    c.fillStyle = css.decode; c.globalAlpha = decodes / (prefills + decodes);
    c.fillRect(at, low + 3, step, 7); c.globalAlpha = 1;
  }
  for (const [line, color] of [[kvLine, css.kv], [queueLine, css.queue]]) {
    c.strokeStyle = color; c.lineWidth = 1.2; c.beginPath();
    line.forEach(([px, py], i) => i ? c.lineTo(px, py) : c.moveTo(px, py)); c.stroke();
  }
  c.lineWidth = 1;
  for (const pass of T.restarts) {
    c.fillStyle = css.mark; c.fillRect(x(pass) - 1, 0, 2, HEAD);
    c.fillText("restart", x(pass) + 4, 26);
  }
  c.restore();
  c.textAlign = "right"; c.fillStyle = css.dim;
  c.fillText("step", GUTTER - 8, 10);
  c.fillStyle = css.kv; c.fillText("KV of " + T.kv_size.toLocaleString("en"), GUTTER - 8, 31);
  c.fillStyle = css.queue; c.fillText("queue, max " + mostQueued, GUTTER - 8, 48);
  c.fillStyle = css.dim; c.fillText("P / D", GUTTER - 8, low + 6);
}

function drawOver() {
  const c = context(over), width = view.clientWidth, height = view.clientHeight;
  const highlight = row => {
    const r = rows.indexOf(row);
    if (r < 0) return;
    const y = HEAD + r * rowHeight - view.scrollTop;
    if (y < HEAD - rowHeight) return;
    c.fillStyle = css.hover; c.fillRect(0, Math.max(y, HEAD), width, rowHeight);
  };
  if (picked) highlight(picked);
  if (!pointer || drag) return;
  const pass = passAt(pointer.x), r = rowAt(pointer.y);
  if (pointer.y >= HEAD && r < rows.length) highlight(rows[r]);
  if (pointer.x >= GUTTER && pass < N) {
    c.fillStyle = css.hover;
    c.fillRect(x(pass), 0, Math.max(1, scale), height);
  }
}

// --- words ---

function table(pairs) {
  const body = document.createElement("table");
  for (const [name, value] of pairs) {
    const line = body.insertRow();
    line.insertCell().textContent = name; line.insertCell().textContent = value;
  }
  return body;
}

function aboutPass(p) {
  return [["step", P.step[p].toLocaleString("en") + ", " + PHASE[P.phase[p]]],
    ["at", P.seconds[p].toFixed(3) + " s, took " + P.ms[p].toFixed(1) + " ms"],
    ["batch", P.rows[p] + " of " + T.row_limit + " rows, "
      + counted(P.tokens[p], "token")],
    ["KV used", P.used[p] + " of " + T.kv_size + ", "
      + (100 * P.used[p] / T.kv_size).toFixed(0) + "%"],
    ["queue", counted(P.queued[p], "request")]];
}

function aboutSpan(row, pass) {
  const i = spanAt(row, pass);
  if (i < 0) return [];
  const [kind, first, length, tokens] = row.spans.slice(i, i + 4);
  const steps = length === 1 ? "in this pass" : "steps " + P.step[first] + " to "
    + P.step[first + length - 1] + " (" + length + " passes)";
  return [[T.kinds[kind], steps + (tokens ? ", " + counted(tokens, "token") : "")]];
}

function showTip() {
  tip.style.display = "none";
  if (!pointer || drag) return;
  const pass = passAt(pointer.x), row = pointer.y >= HEAD ? rows[rowAt(pointer.y)] : undefined;
  const hasPass = pointer.x >= GUTTER && pass >= 0 && pass < N;
  if (!hasPass && !row) return;
  tip.replaceChildren();
  const pairs = hasPass ? aboutPass(pass) : [];
  if (row) {
    const name = document.createElement("b");
    name.textContent = row.rid; tip.append(name);
    pairs.unshift(...(hasPass ? aboutSpan(row, pass) : []), ["in all", inAll(row)]);
  }
  tip.append(table(pairs));
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  const left = pointer.clientX + 16, top = pointer.clientY + 16;
  tip.style.left = Math.max(4, left + box.width > innerWidth
    ? pointer.clientX - box.width - 12 : left) + "px";
  tip.style.top = Math.max(4, top + box.height > innerHeight
    ? pointer.clientY - box.height - 12 : top) + "px";
}

const counted = (number, what) => number.toLocaleString("en") + " " + what
  + (number === 1 ? "" : "s");

function inAll(row) {
  return (row.prompt ? row.prompt + " in, " : "") + row.tokens + " out, "
    + (row.marks.length ? counted(row.marks.length, "retraction") + ", " : "")
    + (row.outcome ? "end: " + row.outcome : "no end in this file");
}

function showDetail() {
  const detail = $("detail");
  detail.replaceChildren();
  if (!picked) {
    const text = document.createElement("span");
    text.className = "dim";
    text.textContent = "Ctrl+wheel or + and - zoom, 0 fits, drag pans. "
      + "A click on a request shows where its passes went.";
    detail.append(text);
    return;
  }
  const head = document.createElement("div"), name = document.createElement("b");
  name.textContent = picked.rid;
  head.className = "line";
  head.append(name, inAll(picked));
  const go = document.createElement("button");
  go.textContent = "Zoom to it"; go.onclick = () => zoomTo(picked);
  const close = document.createElement("button");
  close.textContent = "Close"; close.onclick = () => pick(null);
  head.append(go, close);
  const parts = document.createElement("div");
  parts.className = "line";
  picked.by.forEach((passes, kind) => {
    if (!passes) return;
    const part = document.createElement("span");
    part.className = "note"; part.append(swatch(kind), T.kinds[kind] + ": " + passes);
    parts.append(part);
  });
  for (const pass of picked.marks) {
    const jump = document.createElement("button");
    jump.textContent = "retracted at step " + P.step[pass];
    jump.onclick = () => center(pass);
    parts.append(jump);
  }
  detail.append(head, parts);
}

function swatch(kind) {
  const box = document.createElement("span");
  box.className = "swatch" + (isWait[kind] || T.kinds[kind] === "not in the pass" ? " thin" : "");
  box.style.background = "var(--" + (COLOR[T.kinds[kind]] || "behind") + ")";
  return box;
}

function center(pass) {
  view.scrollLeft = (pass + 0.5) * scale - plotWidth() / 2;
  const r = rows.indexOf(picked);
  if (r >= 0) view.scrollTop = (r + 0.5) * rowHeight - plotHeight() / 2;
  ask();
}

function zoomTo(row) {
  scale = Math.min(MAX_SCALE, Math.max(fitScale(), plotWidth() / (row.last - row.first + 6)));
  isFit = false;
  choose();
  center((row.first + row.last) / 2);
}

function pick(row) { picked = row; showDetail(); ask(); }

function buildLegend() {
  const total = T.kinds.map((_, kind) => T.rows.reduce((sum, row) => sum + row.by[kind], 0));
  T.kinds.forEach((kind, number) => {
    if (!total[number]) return;
    const item = document.createElement("button");
    item.setAttribute("aria-pressed", "false");
    item.title = "Show only this; the number counts requests x passes";
    const count = document.createElement("span");
    count.className = "dim"; count.textContent = total[number].toLocaleString("en");
    item.append(swatch(number), kind, count);
    item.onclick = () => {
      only = only === number ? -1 : number;
      for (const other of $("legend").querySelectorAll("button"))
        other.setAttribute("aria-pressed", String(other === item && only >= 0));
      ask();
    };
    $("legend").append(item);
  });
  const marks = [["▼", "retracted", "mark"], ["●", "stop", "end"], ["■", "length", "end"],
    ["✕", "abort", "end"], ["○", "left, no reason in the journal", "end"]];
  const seen = new Set(T.rows.map(row => row.outcome));
  if (T.rows.some(row => row.marks.length)) seen.add("retracted");
  for (const [sign, text, color] of marks) {
    if (!seen.has(text.split(",")[0])) continue;
    const note = document.createElement("span"), mark = document.createElement("span");
    note.className = "note"; mark.textContent = sign; mark.style.color = "var(--" + color + ")";
    note.append(mark, text);
    $("legend").append(note);
  }
}

// --- events ---

view.addEventListener("scroll", () => {
  if ($("inview").checked && !drag && view.scrollLeft !== chosenLeft)
    choose(true);
  ask(); showTip();
});
view.addEventListener("wheel", event => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  zoom(Math.exp(-event.deltaY * 0.0025), event.clientX - view.getBoundingClientRect().left);
}, {passive: false});
view.addEventListener("pointerdown", event => {
  const box = view.getBoundingClientRect();
  // Not on the scroll bars.
  if (event.clientX - box.left > view.clientWidth || event.clientY - box.top > view.clientHeight)
    return;
  drag = {x: event.clientX, y: event.clientY, left: view.scrollLeft, top: view.scrollTop,
    moved: false};
});
window.addEventListener("pointermove", event => {
  const box = view.getBoundingClientRect();
  const inside = event.target === view || view.contains(event.target);
  pointer = !inside ? null : {x: event.clientX - box.left, y: event.clientY - box.top,
    clientX: event.clientX, clientY: event.clientY};
  if (pointer && (pointer.x > view.clientWidth || pointer.y > view.clientHeight)) pointer = null;
  if (drag) {
    const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
    drag.moved = drag.moved || Math.abs(dx) + Math.abs(dy) > 4;
    view.scrollLeft = drag.left - dx; view.scrollTop = drag.top - dy;
    view.style.cursor = drag.moved ? "grabbing" : "";
  }
  showTip(); requestAnimationFrame(drawOver);
});
window.addEventListener("pointerup", () => {
  const click = drag && !drag.moved;
  if (drag && drag.moved && $("inview").checked) choose(true);
  drag = null; view.style.cursor = "";
  if (click && pointer && pointer.y >= HEAD) {
    const row = rows[rowAt(pointer.y)] || null;
    pick(row === picked ? null : row);
  }
});
view.addEventListener("pointerleave", () => { pointer = null; showTip(); drawOver(); });
view.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "+" || event.key === "=") zoom(1.5);
  else if (event.key === "-") zoom(1 / 1.5);
  else if (event.key === "0") fit();
  else if (event.key === "Escape") pick(null);
});
$("in").onclick = () => zoom(1.6);
$("out").onclick = () => zoom(1 / 1.6);
$("fit").onclick = fit;
$("height").oninput = event => {
  autoHeight = false; rowHeight = Number(event.target.value); layOut();
};
$("inview").oninput = () => choose();
for (const id of ["sort", "retracted", "filter"])
  $(id).oninput = () => { choose(); view.scrollTop = 0; };
$("theme").onclick = () => {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  readStyle(); ask();
};
// Also when a scroll bar comes or goes.
new ResizeObserver(() => {
  if (isFit || scale < fitScale()) scale = fitScale();
  layOut();
}).observe(view);

document.documentElement.dataset.theme =
  matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
$("title").textContent = T.title;
for (const [name, value] of T.facts) {
  const fact = document.createElement("span"), strong = document.createElement("b");
  const word = document.createElement("span");
  fact.className = "fact"; word.textContent = name + " "; strong.textContent = value;
  fact.append(word, strong); $("facts").append(fact);
}
// With many, most of the rows would be empty wherever one zooms in.
$("inview").checked = T.rows.length > 40;
readStyle(); buildLegend(); showDetail(); fit();
</script>
</body>
</html>
"""
