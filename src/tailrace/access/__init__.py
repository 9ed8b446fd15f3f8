"""Authentication and authorization: keys, sessions, tickets, scopes, quotas, and the audit log."""
