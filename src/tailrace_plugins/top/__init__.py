"""What a server does: `tailrace ps`, `tailrace logs`, and live in a terminal `tailrace top`."""
