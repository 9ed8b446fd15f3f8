"""The outer layer: parts of tailrace around its core, the package `tailrace`. They use the inside of the core.

Rule: the core imports nothing of this package. It finds these parts by their entry points, like the plugins. Only the
names that others import are re-exported there: `tailrace.serve`, `tailrace.engine`, `tailrace.testing`,
`tailrace.client` and some of `tailrace.cli.commands`.
"""
