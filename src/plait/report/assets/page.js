"use strict";
(() => {
  const f = JSON.parse(document.getElementById("figures").textContent);
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const plots = [];
  const number = v => v == null ? "–" : Math.abs(v) >= 1e5 || (v && Math.abs(v) < 1e-3) ? v.toExponential(1).replace("e+", "e") : String(+v.toPrecision(5));
  const width = el => Math.max(200, el.clientWidth);
  const axis = (more = {}) => ({stroke: () => css("--soft"), grid: {stroke: () => css("--grid"), width: 1}, ticks: {stroke: () => css("--line"), width: 1}, font: "12px system-ui,sans-serif", ...more});
  const keyed = (el, u, range) => el.addEventListener("keydown", e => {
    const {min, max} = u.scales.x, span = max - min;
    const to = {ArrowLeft: [min - span / 10, max - span / 10], ArrowRight: [min + span / 10, max + span / 10], "+": [min + span / 5, max - span / 5],
      "=": [min + span / 5, max - span / 5], "-": [min - span / 4, max + span / 4], "0": range}[e.key];
    if (!to || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    u.setScale("x", {min: Math.max(range[0], to[0]), max: Math.min(range[1], to[1])});
  });
  const keep = (el, u) => { plots.push([el, u]); return u; };

  const SYMBOLS = {evaluation: "◆", checkpoint: "▲", restart: "↻", skipped: "✕"};
  const marks = u => {
    const ctx = u.ctx, {left, top, width: w} = u.bbox;
    ctx.save();
    ctx.textAlign = "center"; ctx.font = `${11 * devicePixelRatio}px system-ui,sans-serif`;
    let last = {};
    for (const m of f.marks) {
      const x = u.valToPos(m.step, "x", true);
      if (x < left || x > left + w || Math.abs(x - (last[m.kind] ?? -99)) < 9 * devicePixelRatio) continue;
      last[m.kind] = x;
      ctx.fillStyle = css(`--c${m.run % 6}`);
      ctx.fillText(SYMBOLS[m.kind], x, top + 11 * devicePixelRatio);
    }
    ctx.restore();
  };
  const joined = curves => uPlot.join(curves.map(c => [c.steps, c.values]));
  const lines = (el, curves, title) => {
    curves = curves.filter(c => c.steps.length);
    if (!el || !curves.length) { if (el) el.textContent = "nothing recorded"; return; }
    const data = joined(curves), xs = data[0];
    const range = xs.length > 1 ? [xs[0], xs[xs.length - 1]] : [xs[0] - 1, xs[0] + 1];
    const u = keep(el, new uPlot({
      width: width(el), height: el.closest(".wide") ? 280 : 200, cursor: {sync: {key: "steps"}, focus: {prox: 24}}, scales: {x: {time: false, range: (u, a, b) => a === b ? [a - 1, b + 1] : [a, b]}},
      series: [{label: "step", value: (u, v) => v == null ? "–" : String(v)}, ...curves.map((c, i) => ({
        label: c.run, stroke: () => css(`--c${i % 6}`), width: 1.75, dash: [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 5], [1, 4]][i % 6],
        value: (u, v) => number(v), spanGaps: true, points: {show: xs.length === 1}}))],
      axes: [axis({values: (u, vs) => vs.map(v => Number.isInteger(v) ? v : "")}), axis({size: 66, values: (u, vs) => vs.map(number)})],
      hooks: {draw: [marks]},
    }, data, el));
    keyed(el, u, range);
  };
  for (const name of Object.keys(f.curves)) lines(document.getElementById(`plot-${name}`), f.curves[name]);
  for (const el of document.querySelectorAll("[data-metric]")) lines(el, f.evaluations.filter(e => e.metric === el.dataset.metric));

  const COLORS = {forward: "--forward", backward: "--backward", weights: "--weights", communication: "--communication", data: "--data",
    optimizer: "--optimizer", checkpoint: "--checkpoint", evaluate: "--evaluation"};
  const stripes = (ctx, color) => {
    const size = 7 * devicePixelRatio, tile = Object.assign(document.createElement("canvas"), {width: size, height: size}), t = tile.getContext("2d");
    t.fillStyle = color; t.fillRect(0, 0, size, size);
    t.strokeStyle = css("--stripe"); t.lineWidth = 1.6 * devicePixelRatio;
    for (const by of [-size, 0, size]) { t.beginPath(); t.moveTo(by, size); t.lineTo(by + size, 0); t.stroke(); }
    return ctx.createPattern(tile, "repeat");
  };
  const timelines = [], readout = document.getElementById("readout");
  for (const el of document.querySelectorAll("[data-block]")) {
    const name = el.dataset.block, rows = f.timeline.blocks[name];
    const all = Object.values(f.timeline.blocks).flat().flatMap(r => r.boxes);
    const low = Math.min(...all.map(b => b[1])) / 1e3, high = Math.max(...all.map(b => b[1] + b[2])) / 1e3, range = [low, high];
    const draw = u => {
      const ctx = u.ctx, {left, top, width: w, height: h} = u.bbox, row = h / rows.length;
      ctx.save();
      ctx.beginPath(); ctx.rect(left, top, w, h); ctx.clip();
      const fill = {};
      for (const k in COLORS) fill[k] = ["communication", "data", "checkpoint"].includes(k) ? stripes(ctx, css(COLORS[k])) : css(COLORS[k]);
      ctx.font = `${11 * devicePixelRatio}px system-ui,sans-serif`; ctx.textAlign = "center"; ctx.textBaseline = "middle";
      rows.forEach((r, i) => {
        const y = top + row * i + row * .12, tall = row * .76;
        ctx.fillStyle = css("--bubble"); ctx.fillRect(left, y, w, tall);
        for (const [kind, start, took, box] of r.boxes) {
          const x = u.valToPos(start / 1e3, "x", true), wide = Math.max(.6, u.valToPos((start + took) / 1e3, "x", true) - x);
          if (x > left + w || x + wide < left) continue;
          ctx.fillStyle = fill[kind] ?? css("--Python"); ctx.fillRect(x, y, wide, tall);
          if (wide > 4) { ctx.fillStyle = css("--card"); ctx.fillRect(x + wide - .8, y, .8, tall); }
          const micro = /^[FBIW]\d+\.(\d+)$/.exec(box);
          if (micro && wide > 16 * devicePixelRatio) { ctx.fillStyle = css("--card"); ctx.fillText(micro[1], x + wide / 2, y + tall / 2); }
        }
      });
      ctx.restore();
    };
    const point = u => {
      const {left, top} = u.cursor, i = Math.floor(top / (u.over.clientHeight / rows.length)), at = u.posToVal(left, "x") * 1e3, row = rows[i];
      const box = left >= 0 && row && row.boxes.find(b => b[1] <= at && at < b[1] + b[2]);
      if (row && left >= 0) readout.textContent = `${name} · ${row.label} · ${box ? `${box[3]} (${box[0]}) · ${number(box[2] / 1e3)} ms` : "idle"} · at ${number(at / 1e3)} ms`;
    };
    const wide = width(el) > 560;
    const u = keep(el, new uPlot({
      width: width(el), height: 48 + rows.length * 40, legend: {show: false}, cursor: {y: false, points: {show: false}},
      scales: {x: {time: false}, y: {range: [0, rows.length]}},
      series: [{}, {paths: () => null, points: {show: false}}],
      axes: [axis({values: (u, vs) => vs.map(v => `${+v.toPrecision(6)}${wide ? " ms" : ""}`)}), axis({size: wide ? 112 : 30, grid: {show: false}, ticks: {show: false}, splits: () => rows.map((r, i) => i + .5),
        values: () => rows.map((r, i) => rows[rows.length - 1 - i]).map(r => wide ? r.label : String(r.rank))})],
      hooks: {draw: [draw], setCursor: [point], setScale: [(u, key) => {
        if (key === "x") for (const other of timelines) if (other !== u && (other.scales.x.min !== u.scales.x.min || other.scales.x.max !== u.scales.x.max)) other.setScale("x", {min: u.scales.x.min, max: u.scales.x.max});
      }]},
    }, [range, [0, 0]], el));
    timelines.push(u);
    keyed(el, u, range);
  }

  const scaling = document.getElementById("plot-scaling");
  if (scaling) {
    const s = f.scaling, points = (color, more) => ({stroke: () => css(color), width: 2, points: {show: true, size: 7}, value: (u, v) => number(v), ...more});
    const u = keep(scaling, new uPlot({
      width: width(scaling), height: 260, scales: {x: {time: false, distr: 3, log: 2}, y: {range: (u, a, b) => [0, b * 1.05]}},
      series: [{label: "devices"}, points("--c0", {label: "measured"}), points("--soft", {label: "ideal", dash: [4, 4]}), points("--c1", {label: "predicted", dash: [10, 4], spanGaps: true})],
      axes: [axis({splits: () => s.map(p => p.devices), values: (u, vs) => vs}), axis({size: 70, values: (u, vs) => vs.map(number)})],
    }, [s.map(p => p.devices), s.map(p => p.speed), s.map(p => p.ideal), s.map(p => p.predicted)], scaling));
    keyed(scaling, u, [s[0].devices, s[s.length - 1].devices]);
  }

  let waiting = 0;
  const resized = () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(() => { for (const [el, u] of plots) u.setSize({width: width(el), height: u.height}); }); };
  addEventListener("resize", resized);
  matchMedia("(prefers-color-scheme:dark)").addEventListener("change", () => { for (const [, u] of plots) u.redraw(); });
  document.addEventListener("click", async e => {
    const text = e.target.dataset && e.target.dataset.copy;
    if (!text) return;
    try { await navigator.clipboard.writeText(text); e.target.textContent = "Copied"; }
    catch { getSelection().selectAllChildren(e.target.previousElementSibling); e.target.textContent = "Selected"; }
  });
  document.documentElement.dataset.ready = String(plots.length);

  const version = document.body.dataset.follow;
  const ask = async () => {
    try {
      const now = await (await fetch("/version")).text();
      if (now !== version) { location.reload(); return; }
    } catch { return; }
    setTimeout(ask, 2000);
  };
  if (version) setTimeout(ask, 2000);
})();
