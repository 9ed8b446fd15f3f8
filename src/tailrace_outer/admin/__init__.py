"""Commands for whoever runs a server for others: `tailrace keys` and `tailrace usage`."""
