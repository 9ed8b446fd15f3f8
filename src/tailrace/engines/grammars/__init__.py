"""What answers have to conform to: reading grammars, and trying each one before an engine sees it."""
