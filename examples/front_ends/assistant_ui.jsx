import { useChat } from '@ai-sdk/react';
import { AssistantRuntimeProvider, ComposerPrimitive, MessagePrimitive, ThreadPrimitive } from '@assistant-ui/react';
import { useAISDKRuntime } from '@assistant-ui/react-ai-sdk';
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
const show = (role) => () => <MessagePrimitive.Root className={role}><MessagePrimitive.Parts /></MessagePrimitive.Root>;
const components = { UserMessage: show('user'), AssistantMessage: show('assistant') };

function Chat() {
  const chat = useChat({ id, messages: saved(), transport, resume: true });
  useEffect(() => localStorage.setItem(id, JSON.stringify(chat.messages)), [chat.messages]);
  useEffect(() => { chat.error && setTimeout(chat.resumeStream, 500); }, [chat.error]); // the server may be starting again
  return <AssistantRuntimeProvider runtime={useAISDKRuntime(chat)}><main data-status={chat.status}>
    <ThreadPrimitive.Root><ThreadPrimitive.Messages components={components} /></ThreadPrimitive.Root>
    <ComposerPrimitive.Root><ComposerPrimitive.Input aria-label="Your message" /></ComposerPrimitive.Root>
  </main></AssistantRuntimeProvider>;
}
createRoot(document.body).render(<Chat />);
