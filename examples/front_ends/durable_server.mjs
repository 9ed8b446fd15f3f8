// The server of durable.jsx: it serves the page of each chat, and keeps the chat in a durable stream of tailrace.
import { readFile } from 'node:fs/promises';
import { createServer } from 'node:http';
import { json } from 'node:stream/consumers';
import { ensureDurableChatSessionStream, toDurableChatSessionResponse } from '@durable-streams/tanstack-ai-transport';
import { fetchServerSentEvents } from '@tanstack/ai-client';

const [tailrace, port, folder] = process.argv.slice(2);
const model = fetchServerSentEvents(tailrace + '/v1/ag-ui', { reconnect: { maxAttempts: 120, delayMs: 500 } });

createServer(async (request, response) => {
  if (request.url === '/durable.js') return response.end(await readFile(folder + '/durable.js'));
  const [, threadId] = /^\/([\w-]+)$/.exec(request.url) ?? [];
  if (!threadId) return response.writeHead(404).end();
  const stream = { writeUrl: `${tailrace}/v1/durable/chats/${threadId}` };
  if (request.method === 'GET') {
    await ensureDurableChatSessionStream(stream);
    return response.end(await readFile(folder + '/durable.html'));
  }
  const { messages } = await json(request);
  const run = { threadId, runId: crypto.randomUUID() };
  const responseStream = model.connect(messages, { max_tokens: 300 }, undefined, run);
  const answer = await toDurableChatSessionResponse({ stream, newMessages: messages.slice(-1), responseStream });
  response.writeHead(answer.status).end();
}).listen(Number(port), '127.0.0.1');
