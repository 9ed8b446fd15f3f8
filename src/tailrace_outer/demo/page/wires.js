/** One stream on four wires at the same time, and the bytes per token of each wire. */

import { at } from "../../page/api.js";
import { html } from "../../page/html.js";
import { useSignal } from "../../page/lib/signals.js";
import { pieces } from "../../page/streams.js";

import { Panel, Section, Start, Text } from "./parts.js";
import { Snippets, fourWires } from "./snippets.js";
import { asking, begin, prompt, speaker } from "./state.js";
import { create } from "./streams.js";

const TOKENS = 60;
const SHOWN = 1200; // characters, the last ones
const WIRES = [
  { id: "native", title: "tailrace: SSE with ids", about: "resumes" },
  { id: "openai", title: "OpenAI: chat chunks", about: "OpenAI's clients" },
  { id: "tgi", title: "Text Generation Inference", about: "Hugging Face's clients" },
  { id: "plain", title: "Plain text", about: "curl" },
];
const EMPTY = { text: "", bytes: 0, mood: "idle" };

export function Wires() {
  const shown = useSignal(Object.fromEntries(WIRES.map(({ id }) => [id, EMPTY])));
  const model = useSignal(null);
  const tokens = useSignal(0); // of the stream, once it is over

  async function start() {
    const signal = begin();
    model.value = speaker.value;
    tokens.value = 0;
    const stream = await create(asking(model.value, TOKENS), signal);
    const put = (id, change) => (shown.value = { ...shown.value, [id]: { ...shown.value[id], ...change } });
    await Promise.all(
      WIRES.map(async ({ id }) => {
        put(id, { ...EMPTY, mood: "running" });
        try {
          const answer = await fetch(at(`/demo/streams/${stream.id}/as/${id}`), { cache: "no-store", signal });
          for await (const { text, bytes } of pieces(answer)) {
            const before = shown.value[id];
            put(id, { text: (before.text + text).slice(-SHOWN), bytes: before.bytes + bytes });
          }
        } finally {
          put(id, { mood: "ended" });
        }
      }),
    );
    tokens.value = (await (await fetch(at(`/v1/streams/${stream.id}`), { signal })).json()).usage.completion_tokens;
  }

  return html`<${Section} id="wires" number="4" title="One stream, four wires">
    <p>The model answers once. Four clients read the same stream at the same time, each on another wire. The panels show the
      raw bytes of each response.</p>
    <div class="actions"><${Start} onStart=${start}>Ask once<//></div>
    <div class="pair">
      ${WIRES.map(({ id, title, about }) => {
        const { text, bytes, mood } = shown.value[id];
        const each = tokens.value ? html`<strong>${(bytes / tokens.value).toFixed(1)} bytes per token</strong>` : "";
        return html`<${Panel} key=${id} title=${title} model=${model.value} mood=${mood}
            state=${html`<span>${about}</span><span>${bytes} bytes</span>${each}`} data-wire=${id}>
          <${Text}><code>${text}</code><//>
        <//>`;
      })}
    </div>
    <${Snippets} programs=${() => fourWires(asking(speaker.value, TOKENS), prompt.value)} />
  <//>`;
}
