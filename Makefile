# Everything lives in .venv inside the checkout; each target may be run again at no cost.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install install-dev serve test test-deep check bench clean

# What serving needs. pip is not quiet: it shows what it downloads, and how far it is. Python compiles what it imports when
# it imports it: compiling every module of every package beforehand takes 5 s more of a processor.
install: .venv/.installed

.venv/.installed: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing tailrace into .venv: about 115 MB to download, 430 MB on disk."
	@$(BIN)/python -m pip install --disable-pip-version-check --no-compile --editable .
	@touch $@

# What the tests and checks need as well: other engines, clients, a browser's driver.
install-dev: .venv/.installed-dev

.venv/.installed-dev: .venv/.installed
	@echo "Installing what the tests need into .venv: 2.1 GB on disk, which takes minutes."
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --editable . --group dev
	@touch $@

serve: install
	@$(BIN)/tailrace serve $(ARGS)

check: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Three at once, since many of them wait; each with whole files: what a file sets up is set up once. Tests have their
# own limits, which do not reach into a library that hangs: such a process ends here, and says where it was.
test: install-dev
	$(BIN)/pytest -n 3 --dist loadfile -m "not deep" -o faulthandler_timeout=400 -o faulthandler_exit_on_timeout=true $(ARGS)

test-deep: install-dev
	$(BIN)/pytest $(ARGS)

bench: install
	$(BIN)/tailrace bench $(ARGS)

clean:
	rm -rf .venv dist
