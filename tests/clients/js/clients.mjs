// Other people's clients, each as a function that asks for an answer and returns its text as that client shows it.
//
// To add one, write it into `clients`, and register its name in tests/differential/javascript.py. A function takes the
// server's address, a prompt, the number of tokens at most, and a signal that aborts it.

import { setMaxListeners } from "node:events";
import { setTimeout as delay } from "node:timers/promises";

const JSON_HEADERS = { "Content-Type": "application/json" };
const EVENT_HEADERS = { ...JSON_HEADERS, Accept: "text/event-stream" };

const chat = (prompt, max_tokens) => ({ model: "scripted", messages: [{ role: "user", content: prompt }], max_tokens });
const tgi = (url, prompt, max_new_tokens) => ({ endpointUrl: url, inputs: prompt, parameters: { max_new_tokens } });
const openaiText = (url, prompt, max_new_tokens) => ({ ...tgi(url, prompt, max_new_tokens), model: "scripted" });

async function openai(url) {
  const { default: OpenAI } = await import("openai");
  return new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
}

// 4.13.16 is the last one that speaks text-generation-inference's wire.
async function hub(name = "inference") {
  const { InferenceClient } = await import(`@huggingface/${name}`);
  return new InferenceClient("", { retry_on_error: false }); // or a 503 is asked again at once, for ever
}

async function gather(stream, textOf) {
  let text = "";
  for await (const item of stream) text += textOf(item) ?? "";
  return text;
}

async function post(url, path, body, headers, signal) {
  const response = await fetch(url + path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) throw Object.assign(new Error(await response.text()), { status: response.status });
  return response;
}

// The text of a stream of /v1/streams, event by event. Throws unless the stream is done.
class Events {
  text = "";
  status = "";
  ids = [];

  take({ event, data, id }) {
    if (this.status) throw new Error(`an event after the end: ${data}`);
    this.ids.push(id);
    if (!event || event === "message") this.text += JSON.parse(data).text;
    else this.status = event;
    if (event === "error") throw Object.assign(new Error(data), { name: "StreamError" });
  }

  whole() {
    if (this.status !== "done") throw new Error(`the stream ended as ${this.status || "nothing"}`);
    const stream = this.ids[0].replace(/-1$/, "");
    this.ids.forEach((id, index) => {
      if (id !== `${stream}-${index + 1}`) throw new Error(`event ${index + 1} of ${stream} has the id ${id}`);
    });
    return this.text;
  }
}

// fetch-event-source is made for pages.
function pretendPage() {
  globalThis.window ??= globalThis;
  globalThis.document ??= Object.assign(new EventTarget(), { hidden: false });
  setMaxListeners(0, document);
}

class Fatal extends Error {}

export const clients = {
  // OpenAI's wire

  "openai chat": async (url, prompt, count, signal) => {
    const completion = await (await openai(url)).chat.completions.create(chat(prompt, count), { signal });
    return completion.choices[0].message.content;
  },

  "openai chat stream": async (url, prompt, count, signal) => {
    const client = await openai(url);
    const stream = await client.chat.completions.create({ ...chat(prompt, count), stream: true }, { signal });
    return gather(stream, (chunk) => chunk.choices[0]?.delta?.content);
  },

  "openai chat helper": async (url, prompt, count, signal) => {
    const stream = (await openai(url)).chat.completions.stream(chat(prompt, count), { signal });
    return (await stream.finalContent()) ?? "";
  },

  "openai completion stream": async (url, prompt, count, signal) => {
    const body = { model: "scripted", prompt, max_tokens: count, stream: true };
    return gather(await (await openai(url)).completions.create(body, { signal }), (chunk) => chunk.choices[0]?.text);
  },

  "hub chat": async (url, prompt, count, signal) => {
    const body = { ...chat(prompt, count), endpointUrl: url };
    return (await (await hub()).chatCompletion(body, { signal })).choices[0].message.content;
  },

  "hub chat stream": async (url, prompt, count, signal) => {
    const body = { ...chat(prompt, count), endpointUrl: url };
    return gather((await hub()).chatCompletionStream(body, { signal }), (chunk) => chunk.choices[0]?.delta?.content);
  },

  "hub text": async (url, prompt, count, signal) =>
    (await (await hub()).textGeneration(openaiText(url, prompt, count), { signal })).generated_text,

  "hub text stream": async (url, prompt, count, signal) =>
    gather((await hub()).textGenerationStream(openaiText(url, prompt, count), { signal }), (c) => c.choices[0]?.text),

  "eventsource-parser chat stream": async (url, prompt, count, signal) => {
    const { EventSourceParserStream } = await import("eventsource-parser/stream");
    const body = { ...chat(prompt, count), stream: true };
    const response = await post(url, "/v1/chat/completions", body, JSON_HEADERS, signal);
    const events = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(new EventSourceParserStream());
    let text = "";
    for await (const { data } of events) {
      if (data === "[DONE]") return text;
      const chunk = JSON.parse(data);
      if (chunk.error) throw Object.assign(new Error(chunk.error.message), { name: "StreamError" });
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    throw new Error("no [DONE]");
  },

  "openai response stream": async (url, prompt, count, signal) => {
    const body = { model: "scripted", input: prompt, max_output_tokens: count, stream: true };
    const events = await (await openai(url)).responses.create(body, { signal });
    return gather(events, (event) => (event.type === "response.output_text.delta" ? event.delta : ""));
  },

  // Anthropic's and Ollama's wires

  "anthropic stream": async (url, prompt, count, signal) => {
    const { default: Anthropic } = await import("@anthropic-ai/sdk");
    const client = new Anthropic({ baseURL: url, apiKey: "unused", maxRetries: 0 });
    const stream = client.messages.stream(
      { model: "scripted", max_tokens: count, messages: [{ role: "user", content: prompt }] },
      { signal },
    );
    return stream.finalText().catch(async (error) => {
      const message = stream.receivedMessages[0]; // it takes an answer without text for an error
      if (message?.content.length === 0 && message.stop_reason === "end_turn") return "";
      throw error;
    });
  },

  "ollama chat stream": async (url, prompt, count) => {
    const { Ollama } = await import("ollama");
    const client = new Ollama({ host: url });
    const { messages } = chat(prompt, count);
    const parts = await client.chat({ model: "scripted", messages, stream: true, options: { num_predict: count } });
    return gather(parts, (part) => part.message.content);
  },

  // Front ends

  "ai sdk": async (url, prompt, count, signal) => {
    const { DefaultChatTransport, readUIMessageStream } = await import("ai");
    const transport = new DefaultChatTransport({ api: `${url}/v1/ai-sdk/chat`, body: { maxOutputTokens: count } });
    const messages = [{ id: "1", role: "user", parts: [{ type: "text", text: prompt }] }];
    const chat = { chatId: crypto.randomUUID(), messages, trigger: "submit-message", abortSignal: signal };
    const stream = await transport.sendMessages(chat);
    let last;
    const options = { stream, terminateOnError: true };
    for await (const message of readUIMessageStream(options)) last = message;
    return last.parts.map((part) => part.text ?? "").join("");
  },

  // The reader leaves after some chunks, as a page that is reloaded, and asks for the answer of its chat.
  "ai sdk resumed": async (url, prompt, count) => {
    const { DefaultChatTransport, readUIMessageStream } = await import("ai");
    const body = { maxOutputTokens: count, seed: 0 };
    const transport = new DefaultChatTransport({ api: `${url}/v1/ai-sdk/chat`, body });
    const messages = [{ id: "1", role: "user", parts: [{ type: "text", text: prompt }] }];
    const chatId = crypto.randomUUID();
    const left = new AbortController();
    const asked = { chatId, messages, trigger: "submit-message", abortSignal: left.signal };
    const begun = await transport.sendMessages(asked);
    await begun.getReader().read();
    left.abort();
    const stream = await transport.reconnectToStream({ chatId });
    let last;
    for await (const message of readUIMessageStream({ stream, terminateOnError: true })) last = message;
    if ((await transport.reconnectToStream({ chatId })) !== null) throw new Error("it follows an answer that has ended");
    return last.parts.map((part) => part.text ?? "").join("");
  },

  "ag-ui": async (url, prompt, count) => {
    const { HttpAgent } = await import("@ag-ui/client");
    const initialMessages = [{ id: "1", role: "user", content: prompt }];
    const agent = new HttpAgent({ url: `${url}/v1/ag-ui`, threadId: crypto.randomUUID(), initialMessages });
    const { newMessages } = await agent.runAgent({ forwardedProps: { max_tokens: count, seed: 0 } });
    return newMessages.map((message) => message.content).join("");
  },

  // text-generation-inference's wire

  "hub 4.13.16 text": async (url, prompt, count, signal) => {
    const body = tgi(url, prompt, count);
    body.parameters.return_full_text = false;
    return (await (await hub("inference-tgi")).textGeneration(body, { signal })).generated_text;
  },

  "hub 4.13.16 text stream": async (url, prompt, count, signal) => {
    const stream = (await hub("inference-tgi")).textGenerationStream(tgi(url, prompt, count), { signal });
    return gather(stream, ({ token }) => (token.special ? "" : token.text));
  },

  "hub 4.13.16 generated_text": async (url, prompt, count, signal) => {
    const body = tgi(url, prompt, count);
    body.parameters.return_full_text = false;
    return gather((await hub("inference-tgi")).textGenerationStream(body, { signal }), (event) => event.generated_text);
  },

  // As the page of text-generation-inference has it; the last version that does not first ask a server of its own.
  "hub 2.5.0 as documented": async (url, prompt, count) => {
    const { HfInferenceEndpoint } = await import("@huggingface/inference-2");
    const hf = new HfInferenceEndpoint(url, "hf_YOUR_TOKEN");
    const stream = hf.textGenerationStream({ inputs: prompt, parameters: { max_new_tokens: count } });
    return gather(stream, (r) => r.token.text);
  },

  // Our own wire

  eventsource: async (url, prompt, count, signal) => {
    const { EventSource } = await import("eventsource");
    const created = await post(url, "/v1/streams", { prompt, max_tokens: count }, JSON_HEADERS, signal);
    const source = new EventSource(url + (await created.json()).events_url);
    signal?.addEventListener("abort", () => source.close());
    const events = new Events();
    return new Promise((resolve, reject) => {
      const take = (type) => (message) => {
        if (type === "error" && message.data === undefined) {
          if (source.readyState === EventSource.CLOSED) reject(new Error(message.message));
          return; // it reconnects
        }
        try {
          events.take({ event: type, data: message.data, id: message.lastEventId });
          if (!events.status) return;
          source.close();
          resolve(events.whole());
        } catch (error) {
          source.close();
          reject(error);
        }
      };
      for (const type of ["message", "done", "cancelled", "interrupted", "error"]) {
        source.addEventListener(type, take(type));
      }
    });
  },

  // Nobody closes it: it asks once more, and is told that there is no more.
  "eventsource left alone": async (url, prompt, count) => {
    const { EventSource } = await import("eventsource");
    const created = await post(url, "/v1/streams", { prompt, max_tokens: count }, JSON_HEADERS);
    const statuses = [];
    const source = new EventSource(url + (await created.json()).events_url, {
      fetch: async (...request) => {
        const response = await fetch(...request);
        statuses.push(response.status);
        return response;
      },
    });
    const events = new Events();
    source.onmessage = ({ data, lastEventId }) => events.take({ data, id: lastEventId });
    source.addEventListener("done", ({ data, lastEventId }) => events.take({ event: "done", data, id: lastEventId }));
    await new Promise((resolve) => {
      source.onerror = () => source.readyState === EventSource.CLOSED && resolve();
    });
    await delay(50); // it would have to show itself
    if (statuses.join() !== "200,204") throw new Error(`it asked: ${statuses}`);
    return events.whole();
  },

  "fetch-event-source": async (url, prompt, count, signal) => {
    pretendPage();
    const { fetchEventSource } = (await import("@microsoft/fetch-event-source")).default;
    const events = new Events();
    await fetchEventSource(`${url}/v1/streams`, {
      method: "POST",
      headers: { ...JSON_HEADERS },
      body: JSON.stringify({ prompt, max_tokens: count }),
      signal,
      onopen: async (response) => {
        if (response.status !== 200) throw new Fatal(`status ${response.status}`);
      },
      onmessage: (message) => {
        try {
          events.take(message);
        } catch (error) {
          throw Object.assign(new Fatal(error.message), { name: error.name });
        }
      },
      onerror: (error) => {
        if (error instanceof Fatal) throw error; // anything else is asked again
      },
    });
    return events.whole();
  },

  "eventsource-parser": async (url, prompt, count, signal) => {
    const { EventSourceParserStream } = await import("eventsource-parser/stream");
    const response = await post(url, "/v1/streams", { prompt, max_tokens: count }, EVENT_HEADERS, signal);
    const stream = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(new EventSourceParserStream());
    const events = new Events();
    for await (const event of stream) events.take(event);
    return events.whole();
  },

  websocket: (url, prompt, count) => {
    const socket = new WebSocket(`${url.replace("http", "ws")}/v1/ws`);
    let text = "";
    return new Promise((resolve, reject) => {
      socket.onopen = () => socket.send(JSON.stringify({ type: "create", prompt, max_tokens: count }));
      socket.onmessage = ({ data }) => {
        const frame = JSON.parse(data);
        if (frame.type === "delta") text += frame.text;
        else if (frame.type === "done") resolve(text);
        else if (frame.error) reject(Object.assign(new Error(data), { name: "StreamError" }));
      };
      socket.onclose = ({ code }) => reject(new Error(`closed: ${code}`));
      socket.onerror = () => reject(new Error("no socket"));
    }).finally(() => socket.close());
  },

  // The wire of the article about vLLM, and the EventSource that it wanted: each event has all the text so far

  "eventsource, text so far": async (url, prompt, count) => {
    const { EventSource } = await import("eventsource");
    const headers = { ...JSON_HEADERS, "X-Tailrace-Linger": "60" };
    const answer = await post(url, "/generate-stream", { prompt, max_tokens: count }, headers);
    const source = new EventSource(`${url}/generate-stream?stream_id=${answer.headers.get("X-Stream-Id")}`);
    await answer.body.cancel();
    let text = "";
    return new Promise((resolve, reject) => {
      source.onmessage = ({ data }) => {
        if (data === "[DONE]") return resolve(text);
        const shown = JSON.parse(data);
        if (shown.error) reject(Object.assign(new Error(data), { name: "StreamError" }));
        text = shown.text;
      };
      source.onerror = ({ message }) => source.readyState === EventSource.CLOSED && reject(new Error(message));
    }).finally(() => source.close());
  },

  // Plain text

  "fetch text": async (url, prompt, count, signal) => {
    const path = `/?prompt=${encodeURIComponent(prompt)}&max_tokens=${count}`;
    return (await post(url, path, undefined, {}, signal)).text();
  },

  "fetch pieces": async (url, prompt, count, signal) => {
    const path = `/?prompt=${encodeURIComponent(prompt)}&max_tokens=${count}`;
    const decoder = new TextDecoderStream("utf-8", { ignoreBOM: true });
    return gather((await post(url, path, undefined, {}, signal)).body.pipeThrough(decoder), (piece) => piece);
  },
};
