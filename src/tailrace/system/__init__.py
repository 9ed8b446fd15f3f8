"""What tailrace needs of the operating system: event loops, signals, child processes and the messages to them, and file
systems. This package knows nothing about models, requests or streams.
"""
