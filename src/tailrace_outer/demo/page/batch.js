/** One stream alone, then eight in a batch: tokens per second. */

import { html } from "../../page/html.js";
import { useSignal } from "../../page/lib/signals.js";

import { Panel, Section, Start, Text, now } from "./parts.js";
import { Snippets, atOnce } from "./snippets.js";
import { asking, begin, speaker } from "./state.js";
import { together } from "./streams.js";

const TOKENS = 60;
const TOPICS = ["a river", "a lighthouse", "a dog", "a mill", "a bridge", "the rain", "a boat", "the stars"];
const NOBODY = { texts: TOPICS.map(() => ""), alone: null, all: null, phase: "" };

export function Batch() {
  const shown = useSignal(NOBODY);
  const model = useSignal(null);

  /** Return the tokens per second of these topics together, from the first token to the last. */
  async function measure(topics, signal) {
    const bodies = new Map(topics.map((topic) => [topic, question(model.value, topic)]));
    let tokens = 0;
    let first = null;
    let last = null;
    const token = (topic, { text, token_ids }) => {
      last = now();
      if (first === null) first = last;
      else tokens += token_ids.length;
      const texts = shown.value.texts.with(TOPICS.indexOf(topic), shown.value.texts[TOPICS.indexOf(topic)] + text);
      shown.value = { ...shown.value, texts };
    };
    await together(bodies, { token }, signal);
    return last > first ? tokens / (last - first) : null;
  }

  async function start() {
    const signal = begin();
    model.value = speaker.value;
    try {
      shown.value = { ...NOBODY, phase: "One stream alone …" };
      const alone = await measure(TOPICS.slice(0, 1), signal);
      if (signal.aborted) return;
      shown.value = { ...NOBODY, alone, phase: "Eight streams together …" };
      const all = await measure(TOPICS, signal);
      if (!signal.aborted) shown.value = { ...shown.value, all };
    } finally {
      shown.value = { ...shown.value, phase: "" };
    }
  }

  const { texts, alone, all, phase } = shown.value;
  const most = Math.max(alone ?? 0, all ?? 0, 1);
  return html`<${Section} id="batch" number="5" title="Eight streams, one batch">
    <p>For each token, an engine reads all its weights. The streams of a batch share this work: each stream is slower than alone,
      but all together are faster.${model.value?.is_simulated && html` <strong>The simulated engine reads no weights</strong>:
      each stream always gets the same number of tokens per second.`}</p>
    <div class="actions"><${Start} onStart=${start}>Ask one, then eight<//><span class="soft" role="status">${phase}</span></div>
    <${Rate} name="alone" rate=${alone} most=${most} />
    <${Rate} name="eight together" rate=${all} most=${most} />
    ${alone && all ? html`<p id="gain"><strong>${(all / alone).toFixed(1)} times</strong> the tokens in the same time.</p>` : ""}
    <div class="grid">
      ${texts.map((text, index) => html`<${Panel} key=${index} title=${TOPICS[index]} mood=${text && phase ? "running" : text ? "ended" : "idle"}>
        <${Text}>${text}<//>
      <//>`)}
    </div>
    <${Snippets} programs=${() => atOnce(TOPICS.map((topic) => question(speaker.value, topic)))} />
  <//>`;
}

const question = (model, topic) => asking(model, TOKENS, `Tell me a story about ${topic}.`);

function Rate({ name, rate, most }) {
  return html`<div class="rate"><span>${name}</span>
    <svg viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true"><rect width=${(100 * (rate ?? 0)) / most} height="6" /></svg>
    <span>${rate === null ? "" : `${rate.toFixed(1)} tokens/s`}</span></div>`;
}
