import { useChat } from '@ai-sdk/react';
import { DefaultChatTransport } from 'ai';
import { useEffect } from 'react';
import { createRoot } from 'react-dom/client';

const id = location.hash.slice(1) || 'chat'; // a second tab with the same address has the same chat
const api = SERVER + '/v1/ai-sdk/chat';
const saved = () => JSON.parse(localStorage.getItem(id) ?? '[]');
const asked = () => saved().findLast((message) => message.role === 'user')?.id ?? '';
const transport = new DefaultChatTransport({
  api,
  body: { maxOutputTokens: 300 },
  prepareReconnectToStreamRequest: () => ({ api: `${api}/${id}/stream?messageId=${asked()}` }),
});

function Chat() {
  const { messages, sendMessage, error, resumeStream, status } = useChat({ id, messages: saved(), transport, resume: true });
  useEffect(() => localStorage.setItem(id, JSON.stringify(messages)), [messages]);
  useEffect(() => { error && setTimeout(resumeStream, 500); }, [error]); // the server may be starting again
  const send = (event) => { event.preventDefault(); sendMessage({ text: event.target.text.value }); event.target.reset(); };
  return <main data-status={status}>
    {messages.map((message) => <p key={message.id} className={message.role}>{message.parts.map((part) => part.text)}</p>)}
    <form onSubmit={send}><input name="text" aria-label="Your message" /></form>
  </main>;
}
createRoot(document.body).render(<Chat />);
