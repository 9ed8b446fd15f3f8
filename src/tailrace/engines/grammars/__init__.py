"""Grammars that answers have to conform to: converting them, and checking each one before an engine gets it."""
