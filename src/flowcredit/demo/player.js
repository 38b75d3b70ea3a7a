// Plays the stages of a rollout tree. Listens on the document: the page puts trees in and takes them out.
(() => {
  const timers = new WeakMap();
  const stages = (player) => [...player.querySelectorAll(".stage")];
  const stop = (player) => {
    clearInterval(timers.get(player));
    timers.delete(player);
    const button = player.querySelector('[data-does="play"]');
    if (button) button.textContent = "Play";
  };
  const show = (player, wanted) => {
    const all = stages(player);
    const at = Math.max(0, Math.min(wanted, all.length - 1));
    all.forEach((stage, i) => { stage.hidden = i !== at; });
    player.dataset.stage = at;
    const slider = player.querySelector('input[type="range"]');
    slider.value = at;
    slider.setAttribute("aria-valuetext", `stage ${at + 1} of ${all.length}`);
    player.querySelector(".at").textContent = `${at + 1} of ${all.length}`;
    player.querySelector(".said").textContent = all[at].dataset.words;
    return at === all.length - 1;
  };
  const play = (player) => {
    if (timers.has(player)) { stop(player); return; }
    const last = stages(player).length - 1;
    if (+player.dataset.stage === last) show(player, 0);
    player.querySelector('[data-does="play"]').textContent = "Pause";
    timers.set(player, setInterval(() => {
      if (!player.isConnected || show(player, +player.dataset.stage + 1)) stop(player);
    }, 1400));
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.(".player [data-does]");
    if (!button) return;
    const player = button.closest(".player");
    if (button.dataset.does === "play") { play(player); return; }
    stop(player);
    show(player, +player.dataset.stage + (button.dataset.does === "on" ? 1 : -1));
  });
  document.addEventListener("input", (event) => {
    const slider = event.target.closest?.('.player input[type="range"]');
    if (!slider) return;
    stop(slider.closest(".player"));
    show(slider.closest(".player"), +slider.value);
  });
})();
