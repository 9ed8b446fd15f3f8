"""Conversations, without the database: items in a tree, the turns that requests add, and the file formats for import
and export. Pure functions: no clock, no files, no network."""
