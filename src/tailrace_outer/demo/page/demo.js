/** The page of the demo: a line that says which engine answers, and six sections. */

import { at } from "../../page/api.js";
import { html } from "../../page/html.js";
import { render } from "../../page/lib/preact.js";

import { Batch } from "./batch.js";
import { Models } from "./models.js";
import { Plug } from "./plug.js";
import { chosen, demo, isAway, prompt, real, simulated, speaker, watch } from "./state.js";
import { Timeline } from "./timeline.js";
import { Waiting } from "./waiting.js";
import { Wires } from "./wires.js";

const SECTIONS = [
  ["waiting", "Waiting"],
  ["timeline", "Timeline"],
  ["plug", "Pull the plug"],
  ["wires", "Wires"],
  ["batch", "Batch"],
  ["models", "Models"],
];

function Demo() {
  if (!demo.value) return html`<p class="soft">${isAway.value ? "The server does not answer." : ""}</p>`;
  return html`
    <header id="top">
      <h1><img src=${at("/page/icon.svg")} alt="" width="28" height="28" />tailrace</h1>
      <nav aria-label="Sections">${SECTIONS.map(([id, name]) => html`<a href=${`#${id}`}>${name}</a>`)}</nav>
    </header>
    <${Speaker} />
    <main>
      <div id="lead">
        <h2>Stream a language model. Pull the plug. The stream goes on.</h2>
        <p>The server of this page does all this on this machine while you watch: real sockets, real processes, real
          kills.</p>
        <label for="prompt">The question</label>
        <input id="prompt" maxlength="500" value=${prompt} onInput=${(event) => (prompt.value = event.target.value || " ")} />
      </div>
      <${Waiting} /><${Timeline} /><${Plug} /><${Wires} /><${Batch} /><${Models} />
    </main>
    <footer id="end">tailrace ${demo.value.version} · <a href=${at("/")}>chat</a> · <a href=${at("/docs")}>all routes</a></footer>`;
}

/** Stays at the top of the page: whether a model answers, or the simulated engine. */
function Speaker() {
  const { name, is_simulated: isSimulated, engine } = speaker.value;
  const both = [simulated.value, real.value].filter(Boolean);
  return html`<div id="speaker" class=${isSimulated ? "simulated" : "real"} role="status">
    <p>${isSimulated
      ? html`<strong>Simulated engine.</strong> No model answers: a formula draws the words, at a fixed speed.`
      : html`<strong>${name}</strong> answers: a real model on this machine (${engine.split("-")[0]}).`}
      ${" "}<${Coming} /></p>
    ${both.length > 1 && html`<label>Engine <select value=${name} onChange=${(event) => (chosen.value = event.target.value)}>
      ${both.map((model) => html`<option value=${model.name} disabled=${!["ready", "restarting"].includes(model.state)}>
        ${model.name}${model.is_simulated ? " (simulated)" : ""}</option>`)}
    </select></label>`}
  </div>`;
}

/** The progress of the real model until it is loaded. */
function Coming() {
  const { fetch: coming } = demo.value;
  if (isAway.value) return html`<span class="away">The server does not answer. A new one is starting.</span>`;
  if (coming?.state === "fetching") {
    return html`<span>Downloading the real model: ${coming.line}${" "}
      ${coming.percent !== null && html`<progress max="100" value=${coming.percent} aria-label="Fetched" />`}</span>`;
  }
  if (coming?.state === "failed") return html`<span>Could not download the real model: ${coming.line}</span>`;
  if (real.value?.state === "loading") return html`<span>${real.value.name} is loading.</span>`;
  if (real.value?.state === "failed") return html`<span>Could not load ${real.value.name}; the terminal shows the reason.</span>`;
  return null;
}

render(html`<${Demo} />`, document.body);
watch();
