/** Keeps the newest text in sight, unless the reader has scrolled up. */

import { signal } from "./lib/signals.js";

export const isAtBottom = signal(true);

let box = null;
let last_y = 0;

export function toBottom() {
  isAtBottom.value = true;
  box?.scrollTo(0, box.scrollHeight);
}

/** `element` scrolls, `content` grows in it. Returns what ends this. */
export function keepAtBottom(element, content) {
  box = element;
  const onScroll = () => {
    const below = element.scrollHeight - element.scrollTop - element.clientHeight;
    isAtBottom.value = below < (element.scrollTop < last_y ? 2 : 32);
    last_y = element.scrollTop;
  };
  // A smooth scroll begins with small steps, or none: it must not be fought.
  const onWheel = ({ deltaY }) => {
    if (deltaY < 0 && element.scrollTop) isAtBottom.value = false;
  };
  element.addEventListener("scroll", onScroll);
  element.addEventListener("wheel", onWheel, { passive: true });
  const observer = new ResizeObserver(() => isAtBottom.value && toBottom());
  observer.observe(content);
  observer.observe(element);
  return () => {
    observer.disconnect();
    element.removeEventListener("scroll", onScroll);
    element.removeEventListener("wheel", onWheel);
  };
}
