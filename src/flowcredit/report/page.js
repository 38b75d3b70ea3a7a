// Makes each chart a slider along its x axis: pointer, touch and arrow keys show the values there.
for (const figure of document.querySelectorAll(".chart")) {
  const svg = figure.querySelector("svg");
  const rule = svg.querySelector(".rule");
  const told = figure.querySelector("output");
  const points = JSON.parse(figure.querySelector("script").textContent);
  let at = points.length - 1;
  const show = (index) => {
    at = Math.max(0, Math.min(points.length - 1, index));
    const [x, words] = points[at];
    rule.setAttribute("x1", x);
    rule.setAttribute("x2", x);
    rule.setAttribute("visibility", "visible");
    told.textContent = words;
    svg.setAttribute("aria-valuenow", at);
    svg.setAttribute("aria-valuetext", words);
  };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    let best = 0;
    points.forEach(([place], i) => {
      if (Math.abs(place - x) < Math.abs(points[best][0] - x)) best = i;
    });
    return best;
  };
  const keys = {
    ArrowRight: () => at + 1, ArrowUp: () => at + 1, ArrowLeft: () => at - 1, ArrowDown: () => at - 1,
    PageUp: () => at + 10, PageDown: () => at - 10, Home: () => 0, End: () => points.length - 1,
  };
  svg.setAttribute("role", "slider");
  svg.setAttribute("aria-label", figure.querySelector("figcaption").textContent);
  svg.setAttribute("aria-valuemin", 0);
  svg.setAttribute("aria-valuemax", points.length - 1);
  svg.setAttribute("aria-valuenow", at);
  svg.setAttribute("aria-valuetext", points[at][1]);
  svg.setAttribute("tabindex", 0);
  svg.addEventListener("pointermove", (event) => show(nearest(event)));
  svg.addEventListener("pointerdown", (event) => show(nearest(event)));
  svg.addEventListener("focus", () => show(at));
  svg.addEventListener("keydown", (event) => {
    if (!(event.key in keys)) return;
    event.preventDefault();
    show(keys[event.key]());
  });
}
