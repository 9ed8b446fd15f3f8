"""Records in a relational database: keys, conversations, and one row per request. No token waits for the database, so a
slow or unreachable database delays no stream."""
