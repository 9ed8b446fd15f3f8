/** Components of several sections. */

import { Refusal } from "../../page/api.js";
import { html } from "../../page/html.js";
import { useEffect, useRef } from "../../page/lib/preact-hooks.js";
import { useSignal } from "../../page/lib/signals.js";

export const seconds = (s) => (s < 10 ? `${s.toFixed(2)} s` : `${s.toFixed(1)} s`);
export const now = () => performance.now() / 1000;

/** The name of a model; marks the simulated engine. */
export function Name({ model }) {
  if (!model) return null;
  return html`<span class="name">${model.name}${model.is_simulated && html`<em>simulated</em>`}</span>`;
}

/** A numbered section of the page. */
export function Section({ id, number, title, children }) {
  return html`<section id=${id} aria-labelledby=${`${id}-title`}>
    <h2 id=${`${id}-title`}><span>${number}</span>${title}</h2>
    ${children}
  </section>`;
}

/** A panel with a heading and a status line. `mood` is idle, waiting, running, ended or failed. */
export function Panel({ title, model, mood = "idle", state, children, ...rest }) {
  return html`<article class="panel" data-mood=${mood} ...${rest}>
    <header><h3>${title}</h3><${Name} model=${model} /></header>
    ${children}
    <footer>${state ?? "\u00a0"}</footer>
  </article>`;
}

/** Growing text, scrolled to its end. */
export function Text({ children }) {
  const element = useRef(null);
  useEffect(() => {
    element.current.scrollTop = element.current.scrollHeight;
  });
  return html`<div class="text" dir="auto" tabindex="0" ref=${element}>${children}</div>`;
}

/** The seconds from `since` until `until`, or until now. Empty without `since`. */
export function Clock({ since, until }) {
  const tick = useSignal(0);
  useEffect(() => {
    if (since === null || until !== null) return undefined;
    const timer = setInterval(() => (tick.value += 1), 50);
    return () => clearInterval(timer);
  }, [since, until]);
  tick.value; // renders again at each tick
  return html`<span class="clock">${since === null ? "" : seconds((until ?? now()) - since)}</span>`;
}

/** A button that starts something. Shows an error of `onStart` below it. */
export function Start({ onStart, children, ...rest }) {
  const problem = useSignal("");
  const start = async () => {
    problem.value = "";
    try {
      await onStart();
    } catch (error) {
      if (error.name === "AbortError") return;
      problem.value = error instanceof Refusal ? error.message : "The server does not answer. Try again.";
    }
  };
  return html`<button type="button" class="start" onClick=${start} ...${rest}>${children}</button>
    ${problem.value && html`<p class="problem" role="alert">${problem}</p>`}`;
}
