/** Shortcuts of the whole page; `dialogs.js` lists them. */

import { batch } from "./lib/signals.js";
import { focusComposer } from "./composer.js";
import { dialog } from "./dialogs.js";
import { focusSearch, isSidebarOpen, show, toggleSidebar } from "./sidebar.js";
import { conversations, isBusy, isSignedOut, openId, stop } from "./store.js";

const press = (selector) => Array.from(document.querySelectorAll(selector)).at(-1)?.click();

function step(by) {
  const place = conversations.value.findIndex(({ id }) => id === openId.value);
  const next = conversations.value[Math.max(0, place + by)];
  if (next) show(next.id);
}

const WITH_CONTROL = { k: focusSearch, b: toggleSidebar };
const PLAIN = {
  "/": focusComposer,
  "?": () => (dialog.value = "shortcuts"),
  s: () => (dialog.value = "settings"),
  r: () => press("#turns .again"),
  c: () => press(".answer .copy"),
  "[": () => press('.answer [aria-label="Previous version"]'),
  "]": () => press('.answer [aria-label="Next version"]'),
};

export function listenToKeys() {
  addEventListener("keydown", (event) => {
    if (isSignedOut.value || event.isComposing || event.defaultPrevented) return;
    const act = actOf(event);
    if (!act) return;
    event.preventDefault();
    batch(act);
  });
}

function actOf(event) {
  const { key, target } = event;
  const hasControl = event.ctrlKey || event.metaKey;
  if (key === "Escape") return escape();
  if (hasControl && event.shiftKey && key.toLowerCase() === "o") return () => (show(""), focusComposer());
  if (hasControl && !event.shiftKey && !event.altKey) return WITH_CONTROL[key.toLowerCase()];
  if (event.altKey && !hasControl && (key === "ArrowUp" || key === "ArrowDown")) return () => step(key === "ArrowUp" ? -1 : 1);
  if (dialog.value || hasControl || event.altKey) return null;
  if (key === "ArrowUp" && target.id === "question" && !target.value) return () => press(".question .edit");
  return target.closest("input, textarea, select") ? null : PLAIN[key.toLowerCase()];
}

function escape() {
  if (dialog.value) return () => (dialog.value = "");
  if (isBusy.value) return stop;
  if (isSidebarOpen.value && matchMedia("(width < 60rem)").matches) return toggleSidebar;
  return null;
}
