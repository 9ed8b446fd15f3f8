/** The token timeline: a tick for each token, and the time of each stage. */

import { at } from "../../page/api.js";
import { html } from "../../page/html.js";
import { useSignal } from "../../page/lib/signals.js";

import { Panel, Section, Start, Text, now, seconds } from "./parts.js";
import { Snippets, timeline } from "./snippets.js";
import { asking, begin, demo, kill, speaker } from "./state.js";
import { cancel, create, follow } from "./streams.js";

const TOKENS = 100;
const WIDTH = 1000;
const LEAST_S = 2; // of the time axis
const STALL_S = 0.25;
const STALL_TIMES = 4; // the usual gap between two tokens

export function Timeline() {
  const run = useSignal(null); // {model, since, times, ticks, until, text}
  const isBehind = useSignal(false);

  async function start() {
    const signal = begin();
    const model = speaker.value;
    const others = isBehind.value ? await crowd(model, signal) : [];
    const mine = { model, since: now(), times: null, ticks: [], until: null, text: "" };
    run.value = mine;
    try {
      const stream = await create(asking(model, TOKENS), signal);
      const token = ({ text, token_ids }) => {
        const { ticks } = run.value;
        const come = token_ids.map(() => now() - mine.since); // mostly one
        run.value = { ...run.value, ticks: [...ticks, ...come], text: run.value.text + text };
        if (!ticks.length) readTimes(stream, run);
      };
      const showing = setInterval(() => (run.value = { ...run.value }), 100); // the width grows while nothing comes
      await follow(stream, { token }, signal).finally(() => clearInterval(showing));
    } finally {
      run.value = { ...run.value, until: now() - mine.since };
      others.forEach(cancel);
    }
  }

  const { model, ticks = [], until, text } = run.value ?? {};
  const isRunning = run.value !== null && until === null;
  return html`<${Section} id="timeline" number="2" title="Where the time goes">
    <p>A tick marks the arrival of each token on this page. Before the first token, the request waits in the queue, and the
      engine reads the prompt (prefill). A gap much longer than usual is a stall.</p>
    <div class="actions">
      <${Start} onStart=${start}>Ask<//>
      <label><input type="checkbox" checked=${isBehind} onChange=${(event) => (isBehind.value = event.target.checked)} />
        behind ${demo.value?.max_sequences ?? 8} other streams, which fill the batch</label>
      <${Start} class="danger" disabled=${!isRunning || !ticks.length} onStart=${() => kill("engine", model)}>
        Kill the engine<//>
    </div>
    <${Panel} title="Tokens" model=${model} mood=${isRunning ? "running" : run.value ? "ended" : "idle"}
      state=${run.value && html`<${Legend} run=${run.value} />`}>
      <${Ticks} run=${run.value} />
      <${Text}>${text}<//>
    <//>
    <${Snippets} programs=${() => timeline(asking(speaker.value, TOKENS))} />
  <//>`;
}

/** Fills the batch, so that the next stream waits until one of these ends. */
function crowd(model, signal) {
  const bodies = Array.from({ length: demo.value.max_sequences }, (_, index) => asking(model, 40 + 4 * index));
  return Promise.all(bodies.map((body) => create({ ...body, seed: Math.floor(Math.random() * 2 ** 31) }, signal)));
}

/** Ask the server for the times before the first token. A server that was started later does not know them. */
async function readTimes(stream, run) {
  const answer = await fetch(at(`/demo/streams/${stream.id}/times`)).catch(() => null);
  if (answer?.ok) run.value = { ...run.value, times: await answer.json() };
}

/** `{from, to, kind}` in seconds: queue, prefill, decode, stall. */
function spans({ times, ticks, until, since }) {
  const end = until ?? now() - since;
  const first = ticks[0] ?? end;
  const queue = times ? Math.min(times.queue_s, first) : 0;
  const found = [{ from: 0, to: queue, kind: "queue" }, { from: queue, to: first, kind: times || !ticks.length ? "prefill" : "wait" }];
  const gaps = ticks.slice(1).map((at, index) => at - ticks[index]);
  const usual = gaps.toSorted((one, other) => one - other)[Math.floor(gaps.length / 2)] ?? 0;
  const longest = Math.max(STALL_S, STALL_TIMES * usual);
  const stops = until === null ? [...ticks, end] : ticks;
  for (let index = 1; index < stops.length; index += 1) {
    const isStall = stops[index] - stops[index - 1] > longest;
    const last = found.at(-1);
    if (!isStall && last.kind === "decode") last.to = stops[index];
    else found.push({ from: stops[index - 1], to: stops[index], kind: isStall ? "stall" : "decode" });
  }
  return found.filter(({ from, to }) => to > from);
}

function Ticks({ run }) {
  const ticks = run?.ticks ?? [];
  const whole = Math.max(LEAST_S, run?.until ?? (run ? now() - run.since : 0)); // seconds
  const x = (s) => (WIDTH * s) / whole;
  const marks = Array.from({ length: Math.floor(whole) + 1 }, (_, s) => s).filter((s) => s % Math.ceil(whole / 12) === 0);
  return html`<svg class="ticks" viewBox="0 0 ${WIDTH} 64" preserveAspectRatio="none" role="img"
      aria-label=${`${ticks.length} tokens on a line of ${seconds(whole)}`}>
    ${marks.map((s) => html`<line class="mark" x1=${x(s)} x2=${x(s)} y1="0" y2="64" />`)}
    ${run && spans(run).map(({ from, to, kind }) => html`<rect class=${kind} x=${x(from)} width=${x(to - from)} y="40" height="16" />`)}
    ${ticks.map((at) => html`<line class="tick" x1=${x(at)} x2=${x(at)} y1="8" y2="36" />`)}
  </svg>
  <p class="axis" aria-hidden="true"><span>0 s</span><span>${seconds(whole)}</span></p>`;
}

function Legend({ run }) {
  const sums = new Map();
  for (const { from, to, kind } of spans(run)) sums.set(kind, (sums.get(kind) ?? 0) + to - from);
  return html`<ul class="legend">
    ${[...sums].map(([kind, s]) => html`<li class=${kind}>${kind === "wait" ? "queue and prefill" : kind} ${seconds(s)}</li>`)}
    <li>${run.ticks.length} tokens</li>
  </ul>`;
}
