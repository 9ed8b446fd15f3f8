/** What several sections show. */

import htm from "/page/lib/htm.js";
import { h } from "/page/lib/preact.js";
import { useEffect, useRef } from "/page/lib/preact-hooks.js";
import { useSignal } from "/page/lib/signals.js";

import { Refusal } from "/demo/page/streams.js";

export const html = htm.bind(h);
export const seconds = (s) => (s < 10 ? `${s.toFixed(2)} s` : `${s.toFixed(1)} s`);
export const now = () => performance.now() / 1000;

/** The name of a model, and whether it is one. */
export function Name({ model }) {
  if (!model) return null;
  return html`<span class="name">${model.name}${model.is_simulated && html`<em>simulated</em>`}</span>`;
}

/** A numbered part of the page. */
export function Section({ id, number, title, children }) {
  return html`<section id=${id} aria-labelledby=${`${id}-title`}>
    <h2 id=${`${id}-title`}><span>${number}</span>${title}</h2>
    ${children}
  </section>`;
}

/** A frame with a heading and a line below: `mood` is idle, waiting, running, ended or failed. */
export function Panel({ title, model, mood = "idle", state, children, ...rest }) {
  return html`<article class="panel" data-mood=${mood} ...${rest}>
    <header><h3>${title}</h3><${Name} model=${model} /></header>
    ${children}
    <footer>${state ?? "\u00a0"}</footer>
  </article>`;
}

/** Text that grows. It is scrolled to its end as long as it does. */
export function Text({ children }) {
  const element = useRef(null);
  useEffect(() => {
    element.current.scrollTop = element.current.scrollHeight;
  });
  return html`<div class="text" dir="auto" tabindex="0" ref=${element}>${children}</div>`;
}

/** Seconds since `since`, as long as `until` is not there; nothing without a beginning. */
export function Clock({ since, until }) {
  const tick = useSignal(0);
  useEffect(() => {
    if (since === null || until !== null) return undefined;
    const timer = setInterval(() => (tick.value += 1), 50);
    return () => clearInterval(timer);
  }, [since, until]);
  tick.value; // shown anew with each
  return html`<span class="clock">${since === null ? "" : seconds((until ?? now()) - since)}</span>`;
}

/** A button that starts something; what goes wrong before there is anything to show is said beside it. */
export function Start({ onStart, children, ...rest }) {
  const problem = useSignal("");
  const start = async () => {
    problem.value = "";
    try {
      await onStart();
    } catch (error) {
      if (error.name === "AbortError") return;
      problem.value = error instanceof Refusal ? error.message : "The server cannot be reached just now.";
    }
  };
  return html`<button type="button" class="start" onClick=${start} ...${rest}>${children}</button>
    ${problem.value && html`<p class="problem" role="alert">${problem}</p>`}`;
}
