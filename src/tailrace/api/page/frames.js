/** Work that is done once a frame. Tabs that nobody looks at have no frames, and do none of it. */

const FRAME_MS = 8; // of a frame, for all work together
const due = [];

/** Have this called in a frame, with the time until which it may work. */
export function nextFrame(work) {
  if (due.push(work) === 1) requestAnimationFrame(run);
}

function run() {
  const until_ms = performance.now() + FRAME_MS;
  for (let left = due.length; left && performance.now() < until_ms; left -= 1) due.shift()(until_ms);
  if (due.length) requestAnimationFrame(run);
}

const inSight = new WeakMap(); // elements and what is called when they come into sight or leave it

const observer = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) inSight.get(target)?.(isIntersecting);
  },
  { rootMargin: "800px 0px" },
);

/** Have this called with whether an element is in sight, or nearly. */
export function watchSight(element, call) {
  inSight.set(element, call);
  observer.observe(element);
}

export function unwatchSight(element) {
  inSight.delete(element);
  observer.unobserve(element);
}
