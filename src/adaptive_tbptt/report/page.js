"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const coarse = matchMedia("(pointer: coarse)").matches; // a finger scrolls, it does not zoom
  const config = { responsive: true, displayModeBar: false, doubleClickDelay: 500 };
  const common = { autosize: true, dragmode: coarse ? false : "zoom", hovermode: "closest",
    paper_bgcolor: "#fff", plot_bgcolor: "#fff",
    font: { family: "system-ui, sans-serif", size: 13, color: "#1a1a1a" } };
  const lines = { gridcolor: "#ddd", linecolor: "#555", showline: true, ticks: "outside", zerolinecolor: "#bbb" };
  const ids = Object.keys(data.figures);

  const onAxis = (figure, name) => figure.data.map((trace) => trace.meta[name]);
  const chosenAxis = () => document.querySelector("input[name=axis]:checked").value;

  function draw(id) {
    const { data: traces, layout } = data.figures[id];
    Object.assign(layout, common, { xaxis: { ...lines, ...layout.xaxis }, yaxis: { ...lines, ...layout.yaxis } });
    if (data.courses.includes(id)) {
      onAxis(data.figures[id], chosenAxis()).forEach((x, i) => { traces[i].x = x; });
      layout.xaxis.title.text = data.axes[chosenAxis()];
    }
    Plotly.newPlot(id, traces, layout, config);
  }

  function changeAxis() {
    for (const id of data.courses) {
      const title = { "xaxis.title.text": data.axes[chosenAxis()], "xaxis.autorange": true };
      Plotly.update(id, { x: onAxis(data.figures[id], chosenAxis()) }, title);
    }
  }

  function changeRuns() {
    const shown = new Set([...document.querySelectorAll("input[name=run]:checked")].map((box) => +box.value));
    for (const id of ids) {
      const visible = data.figures[id].data.map((trace) => shown.has(trace.meta.run));
      Plotly.restyle(id, { visible });
    }
  }

  // At a position of the slider, every run shows its last frame up to that moment.
  function showMoment(slider) {
    const epoch = data.frames.positions[slider.value];
    const says = [];
    const x = [], y = [], changed = [];
    data.figures.decay.data.forEach((trace, i) => {
      if (!trace.meta) return; // the background stays
      const frame = data.frames.runs[trace.meta.run].findLast((f) => f.epoch <= epoch);
      const [lags, norms] = frame ? frame.curves[trace.meta.part] : [[], []];
      x.push(lags); y.push(norms); changed.push(i);
      if (trace.meta.part === 0) says.push(trace.name.replace(/measured$/, "") + (frame ? frame.says : "no estimate yet"));
    });
    if (document.getElementById("decay").data) Plotly.restyle("decay", { x, y }, changed);
    document.getElementById("moment-says").textContent = says.join("; ");
    slider.setAttribute("aria-valuetext", says.join("; "));
  }

  // Paper has another width than the screen, and nothing to unfold.
  const PAPER = 680;
  function print(on) {
    document.querySelectorAll("details").forEach((box) => {
      if (on) { box.dataset.was = box.open; box.open = true; } else box.open = box.dataset.was === "true";
    });
    for (const id of ids) Plotly.relayout(id, on ? { width: PAPER } : { width: null, autosize: true });
  }

  ids.forEach(draw);
  document.querySelectorAll("input[name=axis]").forEach((box) => box.addEventListener("change", changeAxis));
  document.querySelectorAll("input[name=run]").forEach((box) => box.addEventListener("change", changeRuns));
  const slider = document.getElementById("moment");
  if (slider) {
    slider.addEventListener("input", () => showMoment(slider));
    showMoment(slider);
  }
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
})();
