/** Programs for each section, in shell, Python and JavaScript. They run as pasted. */

import { html } from "../../page/html.js";
import { useSignal } from "../../page/lib/signals.js";

const LANGUAGES = ["curl", "Python", "JavaScript"];

/** A folded box with the programs; `programs` returns one for each language. */
export function Snippets({ programs }) {
  const language = useSignal("curl");
  const isCopied = useSignal(false);
  const text = programs()[LANGUAGES.indexOf(language.value)];
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    isCopied.value = true;
    setTimeout(() => (isCopied.value = false), 1500);
  };
  return html`<details class="snippets">
    <summary>Copy as curl, Python, JavaScript</summary>
    <div role="group" aria-label="Language">
      ${LANGUAGES.map(
        (name) => html`<button type="button" aria-pressed=${String(name === language.value)}
          onClick=${() => (language.value = name)}>${name}</button>`,
      )}
      <button type="button" class="copy" onClick=${copy}>${isCopied.value ? "Copied" : "Copy"}</button>
    </div>
    <pre tabindex="0"><code>${text}</code></pre>
  </details>`;
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`; // for a shell
const json = (value) => JSON.stringify(value);
const here = () => location.origin;

const curlPost = (path, body, ...more) =>
  [`curl -sN ${quoted(here() + path)}`, "-H 'Content-Type: application/json'", ...more, `-d ${quoted(json(body))}`].join(" \\\n  ");

/** A value in Python: JSON in a string, since Python has other names for null, true and false. */
const loads = (value) => `json.loads(${json(json(value))})`;

const PYTHON_POST = () => `import json
import urllib.request

def post(path, body):
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    request = urllib.request.Request(${json(here())} + path, json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request)
`;

const JAVASCRIPT_POST = () => `const post = (path, body) => fetch(${json(here())} + path, {
  method: "POST",
  headers: { "content-type": "application/json", accept: "text/event-stream" },
  body: JSON.stringify(body),
});
`;

/** OpenAI's wire, with and without streaming. */
export function waiting(body) {
  const path = "/v1/chat/completions";
  const streamed = { ...body, stream: true };
  return [
    `# without streaming\n${curlPost(path, body)}\n\n# streaming\n${curlPost(path, streamed)}`,
    `# python -m pip install openai
import json

from openai import OpenAI

client = OpenAI(base_url=${json(`${here()}/v1`)}, api_key="none")
body = ${loads(body)}
for chunk in client.chat.completions.create(**body, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
`,
    `${JAVASCRIPT_POST()}
const answer = await post(${json(path)}, ${json(streamed)});
const decoder = new TextDecoder();
for await (const bytes of answer.body) console.log(decoder.decode(bytes, { stream: true }));
`,
  ];
}

/** The native wire, with the time of each event. */
export function timeline(body) {
  return [
    curlPost("/v1/streams", body, "-H 'Accept: text/event-stream'"),
    `${PYTHON_POST()}

import time

began_s = time.monotonic()
for line in post("/v1/streams", ${loads(body)}):
    if line.startswith(b"data: "):
        print(f"{time.monotonic() - began_s:.3f} s", json.loads(line[6:]).get("text"))
`,
    `${JAVASCRIPT_POST()}
const began_ms = performance.now();
const answer = await post("/v1/streams", ${json(body)});
const decoder = new TextDecoder();
for await (const bytes of answer.body) {
  console.log(\`\${(performance.now() - began_ms).toFixed(0)} ms\`, decoder.decode(bytes, { stream: true }));
}
`,
  ];
}

/** A client that reconnects with the last id, until the stream ends. */
export function resuming(body) {
  return [
    `id=$(${curlPost("/v1/streams", body)} | sed 's/.*"id":"\\([^"]*\\)".*/\\1/')
seen=$(mktemp)
until grep -qE '^event: (done|cancelled|error|interrupted)' "$seen"; do
  curl -sN "${here()}/v1/streams/$id/events" -H "Last-Event-ID: $(sed -n 's/^id: //p' "$seen" | tail -n 1)" | tee -a "$seen"
  sleep 0.5
done`,
    `import http.client
import json
import time
import urllib.request

HERE = ${json(here())}
body = json.dumps(${loads(body)}).encode()
create = urllib.request.Request(HERE + "/v1/streams", body, {"Content-Type": "application/json"})
events_url = json.load(urllib.request.urlopen(create))["events_url"]
last, data, is_over = "", {}, False
while not is_over:
    try:
        for line in urllib.request.urlopen(urllib.request.Request(HERE + events_url, headers={"Last-Event-ID": last})):
            name, _, value = line.decode().rstrip("\\n").partition(": ")
            if name == "event":
                is_over = value in ("done", "cancelled", "error", "interrupted")
            elif name == "data":
                data = json.loads(value)
            elif name == "id":
                last = value
                print(data.get("text", ""), end="", flush=True)
    except (OSError, http.client.HTTPException):
        time.sleep(0.5)  # the connection broke: reconnect
`,
    `${JAVASCRIPT_POST()}
const created = await fetch(${json(`${here()}/v1/streams`)}, {
  method: "POST",
  headers: { "content-type": "application/json" },
  body: ${json(json(body))},
});
const { events_url } = await created.json();
let last = "", isOver = false;
while (!isOver) {
  try {
    const answer = await fetch(${json(here())} + events_url, { headers: { "last-event-id": last } });
    const decoder = new TextDecoder();
    let rest = "";
    for await (const bytes of answer.body) {
      const blocks = (rest + decoder.decode(bytes, { stream: true })).split("\\n\\n");
      rest = blocks.pop();
      for (const block of blocks) {
        last = /^id: (.*)$/m.exec(block)?.[1] ?? last;
        isOver ||= /^event: (done|cancelled|error|interrupted)/m.test(block);
        console.log(JSON.parse(/^data: (.*)$/m.exec(block)[1]).text ?? "");
      }
    }
  } catch {
    await new Promise((resolve) => setTimeout(resolve, 500)); // the connection broke: reconnect
  }
}
`.replace(JAVASCRIPT_POST(), "").trimStart(),
  ];
}

/** The same question on four wires. The programs make four requests; the page shows one stream. */
export function fourWires(body, text) {
  const n = body.max_tokens;
  const asked = [
    ["/v1/streams", body],
    ["/v1/chat/completions", { ...body, stream: true }],
    ["/generate_stream", { inputs: text, parameters: { max_new_tokens: n, seed: body.seed } }],
    ["/query-stream", { query: text, max_tokens: n }],
  ];
  const remark = "The last two wires name no model: the first model answers, here the simulated engine.";
  return [
    `# ${remark}\n` +
      asked.map(([path, each]) => curlPost(path, each, "-H 'Accept: text/event-stream'")).join("\n"),
    `# ${remark}
${PYTHON_POST()}

for path, body in ${loads(asked)}:
    answer = post(path, body).read()
    print(path, len(answer), "bytes:", answer[:80])
`,
    `// ${remark}
${JAVASCRIPT_POST()}
for (const [path, body] of ${json(asked)}) {
  const answer = await (await post(path, body)).text();
  console.log(path, answer.length, "characters:", answer.slice(0, 80));
}
`,
  ];
}

/** Several requests at the same time, which run in one batch. */
export function atOnce(bodies) {
  return [
    `${bodies.map((body) => `${curlPost("/v1/chat/completions", body)} &`).join("\n")}\nwait`,
    `${PYTHON_POST()}

from concurrent.futures import ThreadPoolExecutor

def ask(body):
    return json.load(post("/v1/chat/completions", body))["choices"][0]["message"]["content"]

bodies = ${loads(bodies)}
with ThreadPoolExecutor(len(bodies)) as threads:
    for text in threads.map(ask, bodies):
        print(text)
`,
    `${JAVASCRIPT_POST()}
const ask = async (body) => (await (await post("/v1/chat/completions", body)).json()).choices[0].message.content;
for (const text of await Promise.all(${json(bodies)}.map(ask))) console.log(text);
`,
  ];
}
