/** Waiting and streaming: the same question twice at the same time. */

import { html } from "../../page/html.js";
import { useSignal } from "../../page/lib/signals.js";
import { events } from "../../page/streams.js";

import { Clock, Panel, Section, Start, Text, now, seconds } from "./parts.js";
import { Snippets, waiting } from "./snippets.js";
import { asking, begin, speaker } from "./state.js";
import { post } from "./streams.js";

const TOKENS = 120;
const NOTHING = { text: "", since: null, first: null, until: null };

export function Waiting() {
  const whole = useSignal(NOTHING);
  const streamed = useSignal(NOTHING);
  const model = useSignal(null);

  async function start() {
    const signal = begin();
    model.value = speaker.value;
    const body = asking(model.value, TOKENS);
    const since = now();
    whole.value = streamed.value = { ...NOTHING, since };
    await Promise.all([waitFor(body, whole, signal), stream(body, streamed, signal)]).catch((error) => {
      for (const side of [whole, streamed]) side.value = { ...side.value, until: side.value.until ?? now() };
      throw error;
    });
  }

  return html`<${Section} id="waiting" number="1" title="Waiting, and streaming">
    <p>Two requests with the same question to the same model, at the same time. The left request waits for the whole
      answer, as many API calls do. The right one streams: each token is shown as soon as it exists.</p>
    <div class="actions"><${Start} onStart=${start}>Ask both<//></div>
    <div class="pair">
      <${Side} title="Waits for the whole answer" model=${model.value} side=${whole.value} />
      <${Side} title="Streams" model=${model.value} side=${streamed.value} />
    </div>
    <${Snippets} programs=${() => waiting(asking(speaker.value, TOKENS))} />
  <//>`;
}

function Side({ title, model, side }) {
  const { text, since, first, until } = side;
  const mood = since === null ? "idle" : until !== null ? "ended" : text ? "running" : "waiting";
  const state = html`<${Clock} since=${since} until=${until} />
    ${first !== null && html`<strong>first words after ${seconds(first - since)}</strong>`}`;
  return html`<${Panel} title=${title} model=${model} mood=${mood} state=${state}>
    <${Text}>${text || (mood === "waiting" ? html`<span class="soft">Nothing yet …</span>` : "")}<//>
  <//>`;
}

async function waitFor(body, side, signal) {
  const answer = await (await post("/v1/chat/completions", body, { signal })).json();
  const at = now();
  side.value = { ...side.value, text: answer.choices[0].message.content, first: at, until: at };
}

async function stream(body, side, signal) {
  const answer = await post("/v1/chat/completions", { ...body, stream: true }, { signal });
  for await (const { data } of events(answer)) {
    if (data === "[DONE]") break;
    const text = JSON.parse(data).choices[0]?.delta.content;
    if (text) side.value = { ...side.value, text: side.value.text + text, first: side.value.first ?? now() };
  }
  side.value = { ...side.value, until: now() };
}
