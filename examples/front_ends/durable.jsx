import { durableStreamConnection } from '@durable-streams/tanstack-ai-transport';
import { useChat } from '@tanstack/ai-react';
import { useEffect, useState } from 'react';
import { createRoot } from 'react-dom/client';

const id = location.pathname.slice(1);
const connection = durableStreamConnection({ sendUrl: '/' + id, readUrl: SERVER + '/v1/durable/chats/' + id });

function Chat() {
  const [live, setLive] = useState(true);
  const { messages, sendMessage, status, error } = useChat({ id, connection, live });
  useEffect(() => { error && setLive(false); }, [error]); // the server may be starting again
  useEffect(() => { live || setTimeout(() => setLive(true), 500); }, [live]);
  const send = (event) => { event.preventDefault(); sendMessage(event.target.text.value); event.target.reset(); };
  return <main data-status={status}>
    {messages.map((message) => <p key={message.id} className={message.role}>{message.parts.map((part) => part.content)}</p>)}
    <form onSubmit={send}><input name="text" aria-label="Your message" /></form>
  </main>;
}
createRoot(document.body).render(<Chat />);
