/** Pull the plug: two streams, a plain one and tailrace's, while the engine or the server is killed. */

import { html } from "../../page/html.js";
import { useSignal } from "../../page/lib/signals.js";
import { events } from "../../page/streams.js";

import { Panel, Section, Start, Text, now, seconds } from "./parts.js";
import { Snippets, resuming } from "./snippets.js";
import { asking, begin, demo, isAway, kill, look, prompt, speaker } from "./state.js";
import { create, follow, post } from "./streams.js";

const TOKENS = 250;
const LATE_S = 0.05; // later than this after a kill, tokens come from the new process
const NOTHING = { parts: [], tokens: 0, mood: "idle", state: "" };

export function Plug() {
  const plain = useSignal(NOTHING);
  const kept = useSignal(NOTHING);
  const model = useSignal(null);
  const deaths = useSignal([]); // kills since the last mark: {what, at}

  async function start() {
    const signal = begin();
    model.value = speaker.value;
    deaths.value = [];
    plain.value = kept.value = { ...NOTHING, mood: "waiting" };
    await Promise.all([runPlain(model.value, plain, signal), runKept(model.value, kept, deaths, signal)]);
  }

  async function pull(what) {
    await kill(what, model.value);
    deaths.value = [...deaths.value, { what, at: now() }];
    await look();
  }

  const isRunning = ["running", "waiting"].includes(kept.value.mood) && !isAway.value;
  const hasEngine = isRunning && demo.value?.models.some(({ name, pid }) => name === model.value?.name && pid);
  return html`<${Section} id="plug" number="3" title="Pull the plug">
    <p>Two streams of the same answer. The left one works as on most servers: the server writes each token to the socket and
      forgets it. On the right, tailrace numbers and stores each token before it is sent. Start both, then kill something: the
      buttons send <code>SIGKILL</code> to a real process on this machine.</p>
    <div class="actions">
      <${Start} onStart=${start}>Start both<//>
      <${Start} class="danger" disabled=${!hasEngine} onStart=${() => pull("engine")}>Kill the engine<//>
      <${Start} class="danger" disabled=${!isRunning} onStart=${() => pull("server")}>Kill the server<//>
    </div>
    <p class="soft" id="processes">${processes(model.value ?? speaker.value)}</p>
    <div class="pair">
      <${Side} title="A plain server" model=${model.value} side=${plain.value} />
      <${Side} title="tailrace" model=${model.value} side=${kept.value} />
    </div>
    <${Snippets} programs=${() => resuming(asking(speaker.value, TOKENS))} />
  <//>`;
}

function processes(model) {
  if (isAway.value) return "The server does not answer.";
  if (!demo.value || !model) return "";
  const { server, models } = demo.value;
  const engine = models.find(({ name }) => name === model.name)?.pid;
  return `Server: process ${server.pid}, the ${ordinal(server.life)} of this demo. Engine: ${engine ? `process ${engine}` : "starting"}.`;
}

function ordinal(number) {
  const end = number % 100 > 10 && number % 100 < 14 ? "th" : (["th", "st", "nd", "rd"][number % 10] ?? "th");
  return `${number}${end}`;
}

function Side({ title, model, side }) {
  const { parts, tokens, mood, state } = side;
  return html`<${Panel} title=${title} model=${model} mood=${mood}
      state=${html`<span>${tokens} tokens</span><strong>${state}</strong>`}>
    <${Text}>${parts.map((part) => (typeof part === "string" ? part : html`<mark class=${part.kind}>${part.text}</mark>`))}<//>
  <//>`;
}

/** Append text to the parts: texts, with marks between them. */
function grown(parts, text) {
  return typeof parts.at(-1) === "string" ? [...parts.slice(0, -1), parts.at(-1) + text] : [...parts, text];
}

async function runPlain(model, side, signal) {
  const { max_tokens, temperature, seed } = asking(model, TOKENS);
  let isWhole = false;
  try {
    const body = { model: model.name, prompt: prompt.value, max_tokens, temperature, seed };
    for await (const { data } of events(await post("/demo/plain", body, { signal }))) {
      if (data === "[DONE]") isWhole = true;
      else {
        const { parts, tokens } = side.value;
        side.value = { parts: grown(parts, JSON.parse(data).text), tokens: tokens + 1, mood: "running", state: "" };
      }
    }
  } catch {
    // The connection broke; handled below.
  }
  if (isWhole) side.value = { ...side.value, mood: "ended", state: "complete" };
  else if (signal.aborted) side.value = { ...side.value, mood: "ended", state: "stopped" };
  else {
    const mark = { kind: "broken", text: "connection broken; no way to resume" };
    side.value = { ...side.value, parts: [...side.value.parts, mark], mood: "failed", state: "broken: the rest is lost" };
  }
}

async function runKept(model, side, deaths, signal) {
  const stream = await create(asking(model, TOKENS), signal);
  let last = now();
  const token = ({ text, token_ids }) => {
    const { parts, tokens } = side.value;
    const gap = now() - last;
    const isBack = deaths.value.length > 0 && now() - deaths.value[0].at > LATE_S;
    const killed = deaths.value.map(({ what }) => what).join(" and ");
    const marks = isBack ? [{ kind: "survived", text: `${killed} killed: ${seconds(gap)}` }] : [];
    if (isBack) deaths.value = [];
    last = now();
    side.value = { parts: grown([...parts, ...marks], text), tokens: tokens + token_ids.length, mood: "running", state: "" };
  };
  const waiting = (state) => () => (side.value = { ...side.value, mood: "waiting", state });
  const reader = { token, connected: waiting(""), disconnected: waiting("connection lost; reconnecting with the last id") };
  const end = await follow(stream, reader, signal);
  const state = { replayed: "complete; all tokens the same as without the kill", continued: "complete; the tokens after the kill differ" };
  side.value = end
    ? { ...side.value, mood: end.status === "done" ? "ended" : "failed", state: state[end.continuity] ?? (end.error?.message ?? "complete") }
    : { ...side.value, mood: "ended", state: "stopped" };
}
