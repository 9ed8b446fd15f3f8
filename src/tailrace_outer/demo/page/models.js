/** Two models side by side: the same question to the real model and to the simulated engine. */

import { html } from "../../page/html.js";
import { useSignal } from "../../page/lib/signals.js";

import { Panel, Section, Start, Text, now, seconds } from "./parts.js";
import { Snippets, atOnce } from "./snippets.js";
import { asking, begin, real, simulated } from "./state.js";
import { create, follow } from "./streams.js";

const TOKENS = 80;

export function Models() {
  const answers = useSignal({}); // by the name of a model: {text, mood, state}
  const both = [real.value, simulated.value].filter(Boolean);

  async function ask(model, signal) {
    const since = now();
    const put = (change) => (answers.value = { ...answers.value, [model.name]: { ...answers.value[model.name], ...change } });
    put({ text: "", mood: "waiting", state: model.state === "ready" ? "" : "The model is loading." });
    let tokens = 0;
    let first = null;
    const token = ({ text, token_ids }) => {
      tokens += token_ids.length;
      first ??= now();
      put({ text: answers.value[model.name].text + text, mood: "running", state: `first token after ${seconds(first - since)}` });
    };
    try {
      const end = await follow(await create(asking(model, TOKENS), signal), { token }, signal);
      const rate = tokens > 1 ? `, ${((tokens - 1) / (now() - first)).toFixed(1)} tokens/s` : "";
      put({ mood: "ended", state: end ? `${answers.value[model.name].state}${rate}` : "stopped" });
    } catch (error) {
      put({ mood: "failed", state: signal.aborted ? "stopped" : error.message });
    }
  }

  async function start() {
    const signal = begin();
    await Promise.all(both.map((model) => ask(model, signal)));
  }

  return html`<${Section} id="models" number="6" title="Two models, one server">
    <p>One server with several models; each request names its model. Each model has its own engine process: if one dies, the other
      continues.${real.value ? "" : html` <strong>Only the simulated engine is ready so far.</strong>`}</p>
    <div class="actions"><${Start} onStart=${start}>${both.length > 1 ? "Ask both" : "Ask"}<//></div>
    <div class="pair">
      ${both.map((model) => {
        const { text, mood, state } = answers.value[model.name] ?? { text: "", mood: "idle" };
        return html`<${Panel} key=${model.name} title=${model.engine.split("-")[0]} model=${model} mood=${mood} state=${state}><${Text}>${text.trimStart()}<//><//>`;
      })}
    </div>
    <${Snippets} programs=${() => atOnce(both.map((model) => asking(model, TOKENS)))} />
  <//>`;
}
