"""Every use of a name that a library does not document, in one module for each library.

Any release of a library may change such a name. So the rest of tailrace uses only the classes and functions of these
modules; `tests/compat` names the releases with which each module was checked, and pyproject.toml excludes later ones.
"""
