"""The file formats of other programs' chats, for export and import: ChatGPT and ShareGPT."""
