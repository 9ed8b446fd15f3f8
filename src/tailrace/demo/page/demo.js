/** The demo: who speaks, and one section for each thing that is shown. */

import { render } from "/page/lib/preact.js";

import { Batch } from "/demo/page/batch.js";
import { Models } from "/demo/page/models.js";
import { html } from "/demo/page/parts.js";
import { Plug } from "/demo/page/plug.js";
import { chosen, demo, isAway, prompt, real, simulated, speaker, watch } from "/demo/page/state.js";
import { Timeline } from "/demo/page/timeline.js";
import { Waiting } from "/demo/page/waiting.js";
import { Wires } from "/demo/page/wires.js";

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
      <h1><img src="/page/icon.svg" alt="" width="28" height="28" />tailrace</h1>
      <nav aria-label="Sections">${SECTIONS.map(([id, name]) => html`<a href=${`#${id}`}>${name}</a>`)}</nav>
    </header>
    <${Speaker} />
    <main>
      <div id="lead">
        <h2>A language model, streamed. And what the stream survives.</h2>
        <p>Everything on this page is done by the server that sent it, on this machine, while you look: real sockets, real
          processes, real kills.</p>
        <label for="prompt">The question</label>
        <input id="prompt" maxlength="500" value=${prompt} onInput=${(event) => (prompt.value = event.target.value || " ")} />
      </div>
      <${Waiting} /><${Timeline} /><${Plug} /><${Wires} /><${Batch} /><${Models} />
    </main>
    <footer id="end">tailrace ${demo.value.version} · <a href="/">chat</a> · <a href="/docs">all routes</a></footer>`;
}

/** Always in sight: whether what is read is a model's, or made up by a formula. */
function Speaker() {
  const { name, is_simulated: isSimulated, engine } = speaker.value;
  const both = [simulated.value, real.value].filter(Boolean);
  return html`<div id="speaker" class=${isSimulated ? "simulated" : "real"} role="status">
    <p>${isSimulated
      ? html`<strong>Simulated engine.</strong> No model speaks: words are drawn by a formula, ${" "}at a set speed.`
      : html`<strong>${name}</strong> speaks, a real model on this machine (${engine.split("-")[0]}).`}
      ${" "}<${Coming} /></p>
    ${both.length > 1 && html`<label>Who speaks <select value=${name} onChange=${(event) => (chosen.value = event.target.value)}>
      ${both.map((model) => html`<option value=${model.name} disabled=${!["ready", "restarting"].includes(model.state)}>
        ${model.name}${model.is_simulated ? " (simulated)" : ""}</option>`)}
    </select></label>`}
  </div>`;
}

/** How far the real model is, where it is not there yet. */
function Coming() {
  const { fetch: coming } = demo.value;
  if (isAway.value) return html`<span class="away">The server does not answer; it is being started again.</span>`;
  if (coming?.state === "fetching") {
    return html`<span>The real model is on its way: ${coming.line}${" "}
      ${coming.percent !== null && html`<progress max="100" value=${coming.percent} aria-label="Fetched" />`}</span>`;
  }
  if (coming?.state === "failed") return html`<span>The real model could not be fetched: ${coming.line}</span>`;
  if (real.value?.state === "loading") return html`<span>${real.value.name} is being loaded.</span>`;
  if (real.value?.state === "failed") return html`<span>${real.value.name} could not be loaded; the terminal says why.</span>`;
  return null;
}

render(html`<${Demo} />`, document.body);
watch();
