"""Commands for whoever runs a server for others: `tailrace keys`, `usage`, `share`, `backup` and
`restore`."""
