import { localStoragePersistence } from '@tanstack/ai-client';
import { fetchServerSentEvents, useChat } from '@tanstack/ai-react';
import { createRoot } from 'react-dom/client';

const threadId = location.hash.slice(1) || 'chat'; // a second tab with the same address has the same chat
const reconnect = { maxAttempts: 120, delayMs: 500 }; // the server may be starting again
const connection = fetchServerSentEvents(SERVER + '/v1/ag-ui', { reconnect });
const persistence = localStoragePersistence();

function Chat() {
  const { messages, sendMessage, status } = useChat({ threadId, connection, persistence, body: { max_tokens: 300 } });
  const send = (event) => { event.preventDefault(); sendMessage(event.target.text.value); event.target.reset(); };
  return <main data-status={status}>
    {messages.map((message) => <p key={message.id} className={message.role}>{message.parts.map((part) => part.content)}</p>)}
    <form onSubmit={send}><input name="text" aria-label="Your message" /></form>
  </main>;
}
createRoot(document.body).render(<Chat />);
