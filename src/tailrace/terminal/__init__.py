"""What a person at a terminal has of a server. It speaks with servers over HTTP alone, and imports none of one."""
