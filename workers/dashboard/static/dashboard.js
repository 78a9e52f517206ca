// Draws the charts, says what is recorded of the token that is chosen, and scrolls to the current page's link where the links do not fit. Everything else on the pages is HTML from the server, put in place by htmx.
"use strict";
(() => {
  document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  readTokens();
  const charts = document.getElementById("charts");
  if (!charts) return;
  const plots = new Map();
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = (value) => (value == null ? "–" : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4)));

  // A token is chosen by a click, or with the arrow keys in the tokens.
  function readTokens() {
    const choose = (token) => {
      const tokens = token.parentElement;
      tokens.querySelector(".chosen")?.classList.remove("chosen");
      token.classList.add("chosen");
      token.scrollIntoView({ block: "nearest", inline: "nearest" });
      document.getElementById(tokens.getAttribute("aria-describedby")).textContent = token.title;
    };
    const described = ".tokens[aria-describedby]";
    document.addEventListener("click", (event) => {
      const token = event.target.closest(`${described} > span`);
      if (token) choose(token);
    });
    document.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step || !event.target.matches(described)) return;
      const chosen = event.target.querySelector(".chosen");
      const next = chosen ? (step > 0 ? chosen.nextElementSibling : chosen.previousElementSibling) : event.target.firstElementChild;
      if (next) choose(next);
      event.preventDefault();
    });
  }

  function options(chart, width) {
    const axis = { stroke: () => color("--quiet"), grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const few = chart.lines.every((line) => line.values.length <= 40);
    return {
      width,
      height: 164,
      scales: {
        x: { time: false },
        y: { range: (_, low, high) => range(chart.low, low, high) },
      },
      legend: { show: false },
      hooks: { setCursor: [(plot) => showValues(chart, plot.cursor.idx)] },
      cursor: { drag: { x: false, y: false }, points: { size: 6 } },
      axes: [{ ...axis, grid: { show: false }, size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 1e5, 1e6] }, { ...axis, size: 58, values: (_, ticks) => ticks.map(short) }],
      series: [
        { label: "step", value: (_, value) => (value == null ? "–" : String(value)) },
        ...chart.lines.map((line, at) => ({
          label: line.label,
          stroke: () => color(`--line-${(at % 6) + 1}`),
          width: at ? 1.25 : 2,
          dash: [undefined, [6, 4], [2, 3]][at % 3 || (at ? 1 : 0)],
          spanGaps: true,
          points: { show: few && line.values.filter((value) => value != null).length <= 40, size: 4 },
          value: (_, value) => short(value),
        })),
      ],
    };
  }

  // The values at the cursor, else the last ones.
  function showValues(chart, at) {
    const places = charts.querySelectorAll(`[data-chart="${chart.name}"] output`);
    chart.lines.forEach((line, number) => {
      if (places[number]) places[number].textContent = short(at == null ? line.values.findLast((value) => value != null) : line.values[at]);
    });
  }

  function range(least, low, high) {
    if (low == null) return [0, 1];
    const margin = (high - low || Math.abs(high) || 1) * 0.08;
    return [least != null && low >= least ? least : low - margin, high + margin];
  }

  function draw(data) {
    for (const chart of data.charts) {
      const figure = charts.querySelector(`[data-chart="${chart.name}"]`);
      if (figure?.dataset.lines !== String(chart.lines.length)) return location.reload(); // a line appeared: the legend is the server's
      const place = figure.querySelector(".plot");
      const values = [data.steps, ...chart.lines.map((line) => line.values)];
      const labels = chart.lines.map((line) => line.label).join("\n");
      const known = plots.get(chart.name);
      if (known && known.labels === labels) {
        known.chart.lines = chart.lines;
        known.plot.setData(values);
        showValues(chart, null);
        continue;
      }
      known?.plot.destroy();
      place.textContent = "";
      plots.set(chart.name, { chart, labels, place, plot: new uPlot(options(chart, place.clientWidth), values, place) });
    }
    const points = document.getElementById("points");
    const mean = data.steps_per_point > 1 ? `, each the mean of ${data.steps_per_point} steps` : "";
    points.firstChild.textContent = `${data.steps.length.toLocaleString("en")} points${mean}, from `;
  }

  async function load() {
    const answer = await fetch(charts.dataset.url, { headers: { Accept: "application/json" } });
    if (answer.ok) draw(await answer.json());
  }

  document.body.addEventListener("htmx:sseMessage", (event) => {
    if (event.detail.type === "steps") load();
  });
  new ResizeObserver(() => {
    for (const { plot, place } of plots.values()) {
      if (plot.width !== place.clientWidth) plot.setSize({ width: place.clientWidth, height: plot.height });
    }
  }).observe(charts);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach(({ plot }) => plot.redraw()));
  load();
})();
