"""What a conversation is, without the database that keeps it: items in a tree, what a request adds to it, and the
forms in which people carry conversations from one program to another. Pure: no clock, no file, no network."""
