/** State shared by all sections: processes, models, the question. */

import { at } from "../../page/api.js";
import { computed, signal } from "../../page/lib/signals.js";

import { post } from "./streams.js";

const LOOK_MS = 1000;

/** The last response of /demo/state; null before the first one. */
export const demo = signal(null);
export const isAway = signal(false); // the server did not answer
export const chosen = signal(null); // the selected model; null selects the real model once it is loaded
export const prompt = signal("Tell me a story about a river.");

const models = computed(() => demo.value?.models ?? []);
export const simulated = computed(() => models.value.find((model) => model.is_simulated));
export const real = computed(() => models.value.find((model) => !model.is_simulated));

/** The model that answers: the selected one, or the real model once it is loaded. */
export const speaker = computed(() => {
  const picked = models.value.find(({ name }) => name === chosen.value);
  if (picked) return picked;
  return real.value?.state === "ready" || real.value?.state === "restarting" ? real.value : simulated.value;
});

/** The body of a request for `model`, as /v1/streams takes it. The seed makes two runs the same. */
export function asking(model, maxTokens, text = prompt.value) {
  const messages = [{ role: "user", content: text }];
  return { model: model.name, messages, max_tokens: maxTokens, temperature: 0.6, seed: 7 };
}

export async function look() {
  try {
    const answer = await fetch(at("/demo/state"), { cache: "no-store", signal: AbortSignal.timeout(5 * LOOK_MS) });
    demo.value = await answer.json();
    isAway.value = false;
  } catch {
    isAway.value = true;
  }
}

/** Poll the state while the page is visible. */
export async function watch() {
  for (;;) {
    if (!document.hidden || !demo.value) await look();
    await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
  }
}

/** Kill the engine of `model`, or the server, with SIGKILL; returns the process id. Each server has a new token.
 * Throws: as `post`. */
export async function kill(what, model) {
  await look();
  const query = what === "engine" ? `?model=${encodeURIComponent(model.name)}` : "";
  const answer = await post(`/demo/kill/${what}${query}`, {}, { headers: { "x-tailrace-demo": demo.value.token } });
  return (await answer.json()).killed;
}

let running = new AbortController();

/** Stop the running section, if any. Returns the signal that will stop the new one. */
export function begin() {
  running.abort();
  running = new AbortController();
  return running.signal;
}
