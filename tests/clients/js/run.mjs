// Runs one client for each of some prompts at once and writes, as a list in JSON, what it returned or threw.
//
// node run.mjs '{"client": …, "url": …, "prompts": […], "max_tokens": …, "abort": true or false}'
//
// With `abort` each request is given up as soon as its answer has begun, and the ids of the streams are written, too.

import { clients } from "./clients.mjs";

const job = JSON.parse(process.argv[2]);

async function outcome(prompt) {
  const controller = job.abort ? new AbortController() : undefined;
  const stream_ids = [];
  if (job.abort) {
    const fetch = globalThis.fetch;
    globalThis.fetch = async (...request) => {
      const response = await fetch(...request);
      stream_ids.push(response.headers.get("x-stream-id"));
      controller.abort();
      return response;
    };
  }
  try {
    return { text: await clients[job.client](job.url, prompt, job.max_tokens, controller?.signal), stream_ids };
  } catch (error) {
    const name = error.name === "Error" ? error.constructor.name : error.name;
    return { error: name, message: String(error.message), stream_ids };
  }
}

const alive = setInterval(() => {}, 1_000); // an EventSource that waits to reconnect would let the process end
process.stdout.write(JSON.stringify(await Promise.all(job.prompts.map(outcome))));
clearInterval(alive);
