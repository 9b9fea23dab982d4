"""The looks of the page. Text on every colour has a contrast of at least 4.5, in light and in dark."""

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--text:#1a1a1a;--soft:#5c5c5c;--line:#d0d0d0;--F:#a9ccff;--B:#9fdcb4;--W:#f4cf86;
--comm:#c9b3f0;--other:#d9d9d9;--data:#ecc5cf;--idle:#eee;--edge:#0003;--box:#111}
@media(prefers-color-scheme:dark){:root{--bg:#16181c;--text:#e8e8e8;--soft:#a8a8a8;--line:#3c4048;--F:#2d5fa6;--B:#22703f;
--W:#85570c;--comm:#6a4fa3;--other:#54585f;--data:#7d3e50;--idle:#24272e;--edge:#0006;--box:#fff}}
body{margin:0 auto;max-width:1400px;padding:16px;background:var(--bg);color:var(--text);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:22px;margin:0 0 4px}h2{font-size:15px;margin:14px 0 4px;position:sticky;left:0;width:max-content}
p{margin:0 0 6px}.note,footer,caption{color:var(--soft);font-size:13px}footer{margin-top:20px;overflow-wrap:anywhere}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;margin:10px 0;padding:0;font-size:13px}
.key{display:inline-block;width:16px;height:12px;margin-right:6px;border:1px solid var(--line);vertical-align:-1px}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:6px;padding:0 12px 8px}
.rows{display:flex}.names{position:sticky;left:-12px;flex:none;background:var(--bg);padding-left:12px;margin-left:-12px;z-index:1}
.time{flex:none;display:block}svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--text)}
.time g text{text-anchor:middle;fill:var(--box);pointer-events:none;font-size:11px}
.time .axis text{fill:var(--soft)}.time .axis text.start{text-anchor:start}.axis line{stroke:var(--line);stroke-width:.5}
.time rect{stroke:var(--edge);stroke-width:.5}.time rect.idle{fill:var(--idle);stroke:none}
.k-F rect{fill:var(--F)}.k-B rect{fill:var(--B)}.k-W rect{fill:var(--W)}.k-send rect{fill:var(--comm)}
.k-data rect{fill:var(--data)}.k-reduce rect,.k-optimizer rect,.k-loss rect,.k-replicate rect,.k-collect rect{fill:var(--other)}
.key.k-F{background:var(--F)}.key.k-B{background:var(--B)}.key.k-W{background:var(--W)}.key.k-send{background:var(--comm)}
.key.k-data{background:var(--data)}.key.k-reduce,.key.k-optimizer{background:var(--other)}.key.k-idle{background:var(--idle)}
.further rect{fill-opacity:.6}
table{display:inline-table;border-collapse:collapse;margin:16px 32px 0 0;font-size:13px;font-variant-numeric:tabular-nums}
caption{text-align:left;white-space:nowrap;padding-bottom:4px}th,td{padding:2px 14px 2px 0;text-align:right;font-weight:normal}
"""
