"""Names of libraries that they do not document, in one module for each library.

Any release of a library may change such a name. So the rest of the core uses no private names (`_x`) and nothing of
`uvicorn.protocols` except through these modules. `tests/compat` names the releases with which each module was checked,
and pyproject.toml excludes later ones. Subclasses use attributes, too: those of uvicorn's connection, which
`transport/http_protocol.py` uses, are in `tests/compat/test_uvicorn.py`.
"""
