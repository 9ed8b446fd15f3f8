"""Uses another server as the engine. `engine` implements the interface; the other modules speak that server's
protocol."""
