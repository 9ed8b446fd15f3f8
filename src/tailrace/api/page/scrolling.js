/** Keeps the newest text in sight, unless the reader has scrolled up. */

let isAtBottom = true;
let last_y = 0;

export function toBottom() {
  isAtBottom = true;
  scrollTo(0, document.documentElement.scrollHeight);
}

/** `latest` is the button that leads back to the bottom. */
export function watchScrolling(latest) {
  addEventListener("scroll", () => {
    const below = document.documentElement.scrollHeight - scrollY - innerHeight;
    isAtBottom = below < (scrollY < last_y ? 2 : 24);
    last_y = scrollY;
    latest.hidden = isAtBottom;
  });
  // A smooth scroll begins with small steps, or none: it must not be fought.
  addEventListener("wheel", ({ deltaY }) => (isAtBottom &&= deltaY >= 0 || !scrollY));
  new ResizeObserver(() => isAtBottom && toBottom()).observe(document.body);
  latest.addEventListener("click", toBottom);
}
