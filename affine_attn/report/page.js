// Draws what figures.py describes: unpacks plotly.js and the figures, follows the theme, the pickers and the chips.
"use strict";

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

const page = document.documentElement, hidden = new Set();

// Colours live in page.css; `place` is an element that has them: the page, or what stands for white paper.
function colours(place) {
  const style = getComputedStyle(place);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

function mix(from, to, part) {
  const parts = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const [a, b] = [parts(from), parts(to)];
  return `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * part)).join(",")})`;
}

function scaled(trace, colour) {
  const up = (part) => part < 0.5 ? mix(colour("zero"), colour("middle"), 2 * part)
    : mix(colour("middle"), colour("more"), 2 * part - 1);
  const style = { colorbar: { thickness: 10, outlinewidth: 0, tickfont: { size: 10 } } };
  const { zmid, ...rest } = trace, { zmin, zmax } = trace;
  if (zmid !== 0) return { ...rest, ...style, colorscale: [[0, up(0)], [0.5, up(0.5)], [1, up(1)]] };
  // 0 has the colour of the card. Colours follow the root of a value, so that small ones are seen, and equal sizes on
  // both sides are equally far from 0.
  const size = Math.max(-zmin, zmax), at = (value) => (value - zmin) / (zmax - zmin), parts = [0.25, 0.5, 0.75, 1];
  const down = (part) => mix(colour("zero"), colour("less"), part);
  const positive = [0, ...parts].map((t) => [at(t * t * zmax), up(t * Math.sqrt(zmax / size))]);
  const below = zmin < 0 ? [...parts].reverse() : [];
  const negative = below.map((t) => [at(t * t * zmin), down(t * Math.sqrt(-zmin / size))]);
  return { ...rest, ...style, colorscale: [...negative, ...positive] };
}

function themed(layout, heatmap, colour) {
  const axis = { gridcolor: colour("rule"), linecolor: colour("rule"), zeroline: false, automargin: true,
    showgrid: !heatmap, ticks: heatmap ? "" : "outside", tickcolor: colour("rule"), ticklen: 4 };
  return {
    hovermode: heatmap ? "closest" : "x unified",
    ...layout,
    xaxis: { ...axis, ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: heatmap ? colour("none") : "rgba(0,0,0,0)",
    font: { color: colour("ink"), size: 12, family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("rule"), font: { color: colour("ink") }, namelength: 40 },
    margin: { l: 46, r: 10, t: 10, b: 40 },
    // A finger that scrolls the page must not zoom.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    showlegend: false,
  };
}

function drawing(figure, n, place) {
  const key = figure.pickers.map((_, i) => document.getElementById(`${figure.id}-picker-${i}`).value).join("/");
  const panel = figure.panels[n], traces = panel.traces[key] ?? [], colour = colours(place);
  const heatmap = traces.some((trace) => trace.type === "heatmap");
  const data = traces.map((trace) =>
    heatmap ? scaled(trace, colour) : { ...trace, visible: !hidden.has(trace.meta) });
  return { data, layout: themed(panel.layout, heatmap, colour) };
}

function draw(figure) {
  return Promise.all(figure.panels.map((_, n) => {
    const { data, layout } = drawing(figure, n, page);
    const config = { responsive: true, displayModeBar: false };
    return Plotly.react(`${figure.id}-${n}`, data, layout, config);
  }));
}

// For papers: on white, with a legend, whatever the theme of the page.
function save(figure, n, format) {
  const { data, layout } = drawing(figure, n, document.getElementById("paper"));
  const named = { ...layout, paper_bgcolor: "#ffffff", showlegend: data.some((trace) => trace.showlegend !== false) };
  const size = { width: 720, height: 480, scale: 3 };
  return Plotly.downloadImage({ data, layout: named }, { format, filename: `${figure.id}-${n}`, ...size });
}

async function start() {
  const source = document.createElement("script");
  source.textContent = await unpacked("plotly");
  document.head.append(source);
  const figures = JSON.parse(await unpacked("figures"));
  const drawAll = () => Promise.all(figures.map(draw));

  for (const figure of figures) {
    figure.pickers.forEach((_, i) =>
      document.getElementById(`${figure.id}-picker-${i}`).addEventListener("change", () => draw(figure)));
  }
  for (const button of document.querySelectorAll("[data-save]")) {
    const figure = figures.find((one) => one.id === button.dataset.figure);
    button.addEventListener("click", () => save(figure, Number(button.dataset.panel), button.dataset.save));
  }
  for (const chip of document.querySelectorAll(".chip")) {
    chip.addEventListener("click", () => {
      const run = Number(chip.dataset.run), shown = hidden.delete(run);
      if (!shown) hidden.add(run);
      chip.setAttribute("aria-pressed", String(shown));
      drawAll();
    });
  }
  document.querySelector(".theme").addEventListener("click", () => {
    page.dataset.theme = page.dataset.theme === "dark" ? "light" : "dark";
    drawAll();
  });
  preference.addEventListener("change", () => { follow(); drawAll(); });
  await drawAll();
  page.dataset.drawn = String(figures.length);
}

const preference = matchMedia("(prefers-color-scheme: dark)");
function follow() { page.dataset.theme = preference.matches ? "dark" : "light"; }
follow();
start();
