// The official client, on a stream of its own and on one of tokens. Writes what it read as JSON.
import { DurableStream, IdempotentProducer, stream } from "@durable-streams/client";

const { url, tokens } = JSON.parse(process.argv[2]);

const made = await DurableStream.create({ url, contentType: "application/json" });
const producer = new IdempotentProducer(made, "writer", { epoch: 0 });
for (let n = 0; n < 100; n++) producer.append(JSON.stringify({ n }));
await producer.flush();
await made.close();

async function read(address, live) {
  const answer = await stream({ url: address, offset: "-1", live });
  const messages = [];
  for await (const message of answer.jsonStream()) messages.push(message);
  return messages;
}

// The tokens first as they come; by the last turn the stream has ended.
const outcome = { made: {}, tokens: {} };
for (const live of ["sse", "long-poll", false]) {
  outcome.tokens[String(live)] = await read(tokens, live);
  outcome.made[String(live)] = await read(url, live);
}
process.stdout.write(JSON.stringify(outcome));
